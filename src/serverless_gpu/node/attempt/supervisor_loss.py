"""Settles an attempt whose supervisor died: writes its last `alive` fact, final state and receipt.

    facts.jsonl     + alive        until a process of the attempt was last seen
    stopped.json    + final state  `model/lifecycle/attempt_lifecycle.py` decides who pays
    receipt.json    + receipt      computed from the facts

The first process that notices the loss (agent, uplink or client) calls this module. The calling process must hold the
attempt's lock. While a process holds the lock, no supervisor runs and no other process writes the attempt's files.

Failure cases: If no process watched the attempt, its newest output file is the last observed activity. After a reboot,
the last fact is the last observed activity, because boottimes of two boots cannot be compared. If a full disk prevents
further facts, the receipt counts only the facts in the file. This module removes an incomplete fact from the end of the
facts file.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.model.billing.pricing import UNPRICED, Tariff
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.lifecycle.attempt import MEANINGS, FactKind, Failure, alive_after
from serverless_gpu.model.lifecycle.attempt_lifecycle import LossEvidence, judge_loss
from serverless_gpu.model.receipt import Receipt, Segments
from serverless_gpu.node.attempt import usage_account
from serverless_gpu.node.attempt.claim import read_pid, try_lock
from serverless_gpu.node.attempt.history import (
    first_facts,
    last_fact,
    meter_of,
    read_ending,
    read_launch,
    read_receipt,
    spec_of,
    touched_ns,
)
from serverless_gpu.node.attempt.server_attempt_record import has_remote
from serverless_gpu.node.attempt.usage_account import reckon, write_json
from serverless_gpu.node.base import protocol
from serverless_gpu.node.devices.kernel_log import KERNEL, KernelLog

COUNTED = "the receipt counts time up to the run's last observed activity, because later use is unknown"
_BEFORE_NS = 1_000_000_000  # Largest difference between the kernel's clock and this process's clock, in nanoseconds.
_TAIL_BYTES = 64 << 10
_LOOKS_MAX = 64  # Maximum number of reads, enough for the whole kernel log.
_USING = frozenset({FactKind.EXEC, FactKind.HELD})


class LostAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Receipt values that the attempt directory does not contain."""

    run_id: str
    fence: int
    gpu_type: str = ""
    world_size: int = 0
    tariff: Tariff = UNPRICED


def settle_loss(
    directory: Path,
    clock: Clock,
    *,
    seen_ns: int | None = None,
    stopped: protocol.Stopped | None = None,
    lost: LostAttempt | None = None,
) -> protocol.Stopped:
    """Write the missing files of an attempt without a supervisor. Return the attempt's final state.

    `seen_ns` is the boottime at which a process of the attempt was last seen; None if no process watched the attempt.
    `stopped` is the final state to write if no file contains one; None if the supervisor was lost.
    """
    is_settled = read_receipt(directory) is not None
    if not is_settled:
        note_life(directory, clock, seen_ns)
    known = read_ending(directory)
    if known is None:
        known = stopped or lost_ending(directory, clock)
        write_json(directory / "stopped.json", known)
    if not is_settled:
        write_json(directory / "receipt.json", _receipt(directory, lost or _of_this_node(directory), known))
        usage_account.give_back_reserve(directory)
    return known


def settle_here(directory: Path, clock: Clock, *, seen_ns: int | None = None) -> bool:
    """Settle an attempt of this node under the attempt's lock. Return True on success."""
    try:
        if not first_facts(directory) or has_remote(directory):
            return False
        lock = try_lock(directory)
    except OSError:
        return False
    if lock < 0:
        return False
    try:
        settle_loss(directory, clock, seen_ns=seen_ns)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def lost_ending(directory: Path, clock: Clock) -> protocol.Stopped:
    """Return the final state of an attempt whose supervisor died."""
    facts = first_facts(directory)
    since_ns = clock.wall_ns() - max(0, clock.boottime_ns() - facts[0].boottime_ns) if facts else clock.wall_ns()
    reason, detail = judge_loss(
        LossEvidence(
            boot_id=facts[0].boot_id if facts else "",
            boot_id_now=clock.boot_id(),
            pid=read_pid(directory),
            is_memory_limited=bool(facts) and facts[0].memory_bytes > 0,
            kernel_lines=_kernel_lines(clock, since_ns - _BEFORE_NS),
        )
    )
    cause = Failure(rank=None, reason=reason, at_ns=clock.boottime_ns(), detail=detail) if detail else None
    return protocol.Stopped(state=MEANINGS[reason].state, reason=reason, cause=cause, consequences=())


def has_used_devices(directory: Path) -> bool:
    """Return True if the attempt used its devices. The user pays only from the first use of a device."""
    return any(fact.kind in _USING for fact in first_facts(directory))


def note_life(directory: Path, clock: Clock, seen_ns: int | None = None) -> None:
    """Record the attempt's last activity if it is later than the last fact.

    `seen_ns` is the boottime of the last activity; None selects the time of the newest output.
    """
    last = last_fact(directory)
    if last is None or last.boot_id != clock.boot_id() or last.kind in (FactKind.EXITED, FactKind.FREED):
        return
    if not has_used_devices(directory):
        return
    now_ns = clock.boottime_ns()
    if seen_ns is None:
        seen_ns = now_ns - max(0, clock.wall_ns() - touched_ns(directory / "logs"))
    at_ns = min(seen_ns, now_ns)
    if at_ns <= last.boottime_ns:
        return
    with contextlib.suppress(OSError):
        _cut_off_half_a_line(directory / "facts.jsonl")
        usage_account.append_fact(directory, msgspec.json.encode(alive_after(last, at_ns)) + b"\n", 1 << 62)


def _receipt(directory: Path, lost: LostAttempt, stopped: protocol.Stopped) -> Receipt:
    facts = first_facts(directory)
    gpus = tuple(dict.fromkeys(uuid for fact in facts for uuid in fact.gpus))
    unknown = "not known: the run's supervisor ended before it could check"  # `model/receipt.py` looks for "not known".
    meter, count = meter_of(directory)
    launched = read_launch(directory)
    tariff = launched.tariff or lost.tariff
    gpu_ms, micros, bill = reckon(meter, tariff, stopped.reason)
    spec = spec_of(directory)
    prefix = gpus[0].partition("-")[0] if gpus else ""
    return Receipt(
        run_id=lost.run_id,
        fence=lost.fence,
        state=stopped.state.value,
        reason=stopped.reason.value,
        gpu_type=lost.gpu_type,
        gpus=gpus,
        kind={"FAKE": DeviceKind.FAKE, "GPU": DeviceKind.GPU}.get(prefix, DeviceKind.CPU),
        segments=Segments(),
        gpu_ms=gpu_ms,
        micros=micros,
        currency=tariff.currency,
        peak_memory_bytes=None,
        warm=False,
        warm_reason="not known",
        gate=unknown if gpus else "no device was reserved",
        quarantined=(),
        tags=spec.tags if spec is not None else {},
        facts=count,
        world_size=lost.world_size,
        notes=(COUNTED,) if any(fact.kind in _USING for fact in facts) else (),
        policy=(spec.policy or "") if spec is not None else "",
        bill=bill,
    )


def _of_this_node(directory: Path) -> LostAttempt:
    launched = read_launch(directory)
    return LostAttempt(
        run_id=directory.parent.name,
        fence=int(directory.name) if directory.name.isdigit() else 1,
        gpu_type=launched.gpu_type,
        world_size=launched.world_size,
        tariff=launched.tariff or UNPRICED,
    )


def _kernel_lines(clock: Clock, since_ns: int) -> tuple[str, ...]:
    """Return the kernel messages since a time, or an empty result if the kernel log cannot be read."""
    log = KernelLog(KERNEL, clock, past=True)
    found: list[str] = []
    try:
        for _ in range(_LOOKS_MAX):
            lines = log.lines()
            if not lines:
                break
            found += [line.text for line in lines if line.at_ns >= since_ns]
    finally:
        log.close()
    return tuple(found)


def _cut_off_half_a_line(path: Path) -> None:
    """Truncate the facts file before an incomplete last line. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = os.fstat(fd).st_size
        tail = os.pread(fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        whole = tail.rfind(b"\n") + 1
        if whole != len(tail):
            os.ftruncate(fd, size - len(tail) + whole)
    finally:
        os.close(fd)
