"""Receipt of a multi-node run, combined from the nodes' receipts and charges.

    node 0 ─ receipt, charge ─┐
    node 1 ─ receipt, charge ─┼─▶ `together`   amounts: sums of the charges, each rounded once
    node 2 ─ no receipt, charge ┘              times: those of the slowest node; notes: prefixed with the node's name

The ledger computes the device usage and cost of each node from the final reason of the whole attempt. A node that stops
at the server's request does not know whether the server bills the device time. A device counts as free only after a
report from the device's node. The state of devices on a silent node is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from serverless_gpu.model.billing.ledger import Charge, bill_of
from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.model.receipt import Receipt, Segments


class CrewAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded device usage of an attempt on one node."""

    node: str
    receipt: Receipt | None  # The node's receipt, or None if no receipt arrived.
    used: Charge  # Charge for the node's facts at the attempt's tariff and final reason.
    gpus: int = 0  # Number of the attempt's devices on the node.


class GangOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Final values of an attempt that all its nodes share."""

    state: str
    reason: Reason | None  # Reason of the attempt's end, or None if the state needs no explanation.


def restated(account: CrewAccount, whole: GangOutcome) -> Receipt | None:
    """Return one node's receipt with usage and cost from the ledger, or None without a receipt."""
    receipt = account.receipt
    if receipt is None:
        return None
    return msgspec.structs.replace(
        receipt,
        gpu_ms=account.used.gpu_ms,
        micros=account.used.micros,
        bill=bill_of(account.used, whole.reason),
    )


def together(accounts: Sequence[CrewAccount], whole: GangOutcome) -> Receipt | None:
    """Return the combined receipt of an attempt on several nodes, or None without any receipt."""
    found = [(each.node, each.receipt) for each in accounts if each.receipt is not None]
    if not found:
        return None
    receipts = [receipt for _, receipt in found]
    used = _sum(each.used for each in accounts)
    # Each segment has the time of the slowest node. `first_line_ms` is the earliest time of all nodes.
    parts = [receipt.segments for receipt in receipts]
    slowest = {name: _most(getattr(part, name) for part in parts) for name in Segments.__struct_fields__}
    lines = [part.first_line_ms for part in parts if part.first_line_ms is not None]
    return msgspec.structs.replace(
        receipts[0],
        state=whole.state,
        reason=None if whole.reason in (None, Reason.COMPLETED) else whole.reason.value,
        gpus=tuple(gpu for receipt in receipts for gpu in receipt.gpus),
        segments=Segments(**{**slowest, "first_line_ms": min(lines, default=None)}),
        gpu_ms=used.gpu_ms,
        micros=used.micros,
        peak_memory_bytes=_most(receipt.peak_memory_bytes for receipt in receipts),
        warm=all(receipt.warm for receipt in receipts),
        warm_reason=_joined_text(found, lambda receipt: receipt.warm_reason),
        gate=_gate(accounts),
        quarantined=tuple(gpu for receipt in receipts for gpu in receipt.quarantined),
        facts=sum(receipt.facts for receipt in receipts),
        world_size=sum(receipt.world_size for receipt in receipts),
        notes=_notes(accounts),
        environment=_joined_text(found, lambda receipt: receipt.environment),
        uses=tuple(use for receipt in receipts for use in receipt.uses),
        tracked=next((receipt.tracked for receipt in receipts if receipt.tracked), ""),
        bill=bill_of(used, whole.reason),
        nodes=tuple(each.node for each in accounts),
        redacted=_added(receipt.redacted for receipt in receipts),
    )


def _sum(charges: Iterable[Charge]) -> Charge:
    """Return the sum of rounded charges, as the ledger does."""
    found = list(charges)
    priced = [charge.micros for charge in found if charge.micros is not None]
    names = ("gpus", "gpu_ms", "billed_ms", "core_ms", "memory_mib_ms", "core_micros", "memory_micros", "dbu_micros")
    sums = {name: sum(getattr(charge, name) for charge in found) for name in names}
    return Charge(**sums, micros=sum(priced) if priced else None)


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Return the sums of several counts by name."""
    total: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            total[name] = total.get(name, 0) + count
    return total


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _joined_text(found: Sequence[tuple[str, Receipt]], word: Callable[[Receipt], str]) -> str:
    """Return the text of all nodes once if their texts are equal, else one text per node."""
    texts = [(node, word(receipt)) for node, receipt in found]
    if len({text for _, text in texts}) == 1:
        return texts[0][1]
    return "; ".join(f"{node}: {text}" for node, text in texts if text)


def _gate(accounts: Sequence[CrewAccount]) -> str:
    """Return the evidence that the nodes released their devices.

    The text begins with devices that are not free, because clients may truncate the text.
    """
    texts = {each.receipt.gate for each in accounts if each.receipt is not None}
    is_free = all(each.receipt is not None and not each.receipt.quarantined for each in accounts)
    if is_free and len(texts) == 1:
        return f"on each of {len(accounts)} nodes, {texts.pop()}"
    missing = [
        f"the state of {'the device' if each.gpus == 1 else f'the {each.gpus} devices'} on {each.node} is not known"
        for each in accounts
        if each.receipt is None
    ]
    held = [each for each in accounts if each.receipt is not None and each.receipt.quarantined]
    free = [each for each in accounts if each.receipt is not None and not each.receipt.quarantined]
    said = [f"{each.node}: {each.receipt.gate}" for each in (*held, *free) if each.receipt is not None]
    return "; ".join([*missing, *said])


def _notes(accounts: Sequence[CrewAccount]) -> tuple[str, ...]:
    """Return the receipt's notes, with the node's name in notes that not all nodes share."""
    every = [each.receipt.notes for each in accounts if each.receipt is not None]
    common = [note for note in every[0] if all(note in notes for notes in every)] if len(every) == len(accounts) else []
    found = list(common)
    for each in accounts:
        if each.receipt is None:
            found.append(f"node {each.node} has sent no receipt, so its charge ends with its last report")
        else:
            own = [note for note in each.receipt.notes if note not in common]
            found += [f"{each.node}: {note}" for note in own]
    return tuple(found)
