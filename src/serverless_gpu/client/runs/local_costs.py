"""Computes a local run's current cost from its attempt directories.

    runs/<run>/<fence>/   spec.json (price) · facts.jsonl · stopped.json · lock held ─▶ lines ─▶ `Cost`
                          receipt.json: used if facts or the price are missing (an earlier version, a full disk)

A running attempt uses its devices up to the present, because its supervisor has not recorded their release. The cost
calculation ignores unreadable files. If the supervisor was killed, the usage ends at the last recorded fact.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock, created_wall_ns
from serverless_gpu.client.runs.timeline import attempt_directories
from serverless_gpu.model.billing.ledger import LedgerLine, priced
from serverless_gpu.model.billing.pricing import UNPRICED
from serverless_gpu.model.cost import AttemptUse, Cost, together
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Fact, FactKind
from serverless_gpu.model.receipt import Bill, Receipt
from serverless_gpu.node.attempt.history import first_facts, is_live, meter_of, read_ending, read_price, read_receipt

_MS_NS = 1_000_000


def cost_here(run: Path, clock: Clock) -> Cost:
    """Return a run's usage and cost so far, computed from the run directory."""
    directories = attempt_directories(run)
    used = [attempt_used(directory, clock) for directory in directories]
    is_over = bool(used) and used[-1].is_final
    begun = bool(used) and bool(used[-1].lines)
    waits_ns = 0 if begun or is_over else clock.wall_ns() - (created_wall_ns(run.name) or clock.wall_ns())
    return together(used, waits_ms=max(0, waits_ns) // _MS_NS, is_final=is_over)


def attempt_used(directory: Path, clock: Clock) -> AttemptUse:
    """Return an attempt's device usage, computed from the attempt directory."""
    receipt, live = read_receipt(directory), is_live(directory)
    gpu_type, tariff = read_price(directory)
    facts = first_facts(directory)
    if receipt is not None and (tariff is None or not facts):
        return _by_receipt(receipt)
    stopped = read_ending(directory)
    meter, _ = meter_of(directory)
    if live and facts and receipt is None:
        first = facts[0]  # While the supervisor is running, the device usage lasts until now.
        now_ns = clock.boottime_ns() if first.boot_id == clock.boot_id() else first.boottime_ns
        alive_ns = max(first.boottime_ns, now_ns)
        meter.add(msgspec.structs.replace(first, kind=FactKind.ALIVE, boottime_ns=alive_ns))
    return AttemptUse(
        lines=priced(meter.used(), tariff or UNPRICED, is_billed=stopped is None or MEANINGS[stopped.reason].is_billed),
        currency=(tariff or UNPRICED).currency,
        gpu_type=gpu_type,
        queued_ms=_waited_ms(directory, facts, receipt),
        # The receipt is the last file that the supervisor writes before it exits.
        is_final=receipt is not None or not live,
    )


def _waited_ms(directory: Path, facts: list[Fact], receipt: Receipt | None) -> int:
    """Return the number of milliseconds for which an attempt waited for devices."""
    if receipt is not None and receipt.segments.queued_ms is not None:
        return receipt.segments.queued_ms
    created_ns = created_wall_ns(directory.parent.name)
    if not facts or created_ns is None:
        return 0
    return max(0, facts[0].wall_ns - created_ns) // _MS_NS


def _by_receipt(receipt: Receipt) -> AttemptUse:
    """Return an attempt's usage from its receipt, if facts or a price are missing."""
    bill = receipt.bill or Bill(billed_ms=receipt.gpu_ms)
    whole = LedgerLine(
        day=0, start_ns=0, end_ns=0, gpus=len(receipt.gpus), gpu_ms=receipt.gpu_ms, billed_ms=bill.billed_ms
    )
    parts = receipt.segments
    return AttemptUse(
        lines=(
            msgspec.structs.replace(
                whole,
                environment_ms=(parts.environment_ms or 0) * whole.gpus,
                start_ms=(parts.start_ms or 0) * whole.gpus,
                run_ms=(parts.run_ms or 0) * whole.gpus,
                stop_ms=(parts.stop_ms or 0) * whole.gpus,
                gate_ms=(parts.gate_ms or 0) * whole.gpus,
                idle_ms=receipt.gpu_ms if receipt.runs is not None else 0,
                core_ms=bill.core_ms,
                memory_mib_ms=bill.memory_mib_ms,
                micros=receipt.micros,
                dbu_micros=bill.dbu_micros,
            ),
        ),
        currency=receipt.currency,
        gpu_type=receipt.gpu_type,
        queued_ms=parts.queued_ms or 0,
    )
