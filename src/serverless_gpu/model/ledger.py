"""Facts, charges and receipts: what happened on GPUs, what follows in time and money, and the account of a run.

A fact is never changed; a charge is a pure function of facts and a price, so that facts may arrive late, twice and in
any order. Writing facts down and sending them is the node's work and must not be here.

                 reserved   hydrating   exec   alive ... alive   exited   freed
    billable                              ├──────────────────────────────────┤
    no freed yet (provisional end)        ├──────────────┤ (or exited, if that came)

A session holds devices between runs: `held` starts what `freed` ends, once for each set of devices that stood idle, so
that no device is ever counted twice.

                 reserved   held    freed ─ a run has them, and its own facts ─ held    freed
    billable                ├─────────┤                                          ├────────┤

Failure cases: a silent node or a reboot ends the billable time at the last sign of life, in the user's favour;
boottimes of two boots are never compared. Facts of several attempts, or two different facts under one number, are a
fault of the caller and raise `InvalidValue`: any sum of them would depend on the order they came in.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from itertools import pairwise

import msgspec

from serverless_gpu import units
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.pricing import UNPRICED, Tariff


class FactKind(StrEnum):
    """What a fact says happened."""

    RESERVED = "reserved"
    HYDRATING = "hydrating"
    EXEC = "exec"
    HELD = "held"
    ALIVE = "alive"
    EXITED = "exited"
    FREED = "freed"


_STARTS = frozenset({FactKind.EXEC, FactKind.HELD})


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """One record of what happened to an attempt on a node.

    Attributes:
        attempt: the attempt, as ``run:fence``.
        seq: number within the attempt; ``(attempt, seq)`` names the fact.
        kind: what happened.
        boot_id: the boot in which `boottime_ns` counts.
        boottime_ns: nanoseconds since boot; all durations come from it.
        wall_ns: nanoseconds since 1970; only places the fact on a calendar.
        gpus: identifiers of the devices held.
        cpus: cores held; 0 when they were not limited.
        memory_bytes: host memory held; 0 when it was not limited.
    """

    attempt: str
    seq: int
    kind: FactKind
    boot_id: str
    boottime_ns: int
    wall_ns: int
    gpus: tuple[str, ...]
    cpus: int
    memory_bytes: int


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt used and costs.

    Attributes:
        attempt: the attempt, as ``run:fence``.
        gpu_type: type of its devices.
        gpus: the most devices it held at once.
        gpu_ms: billable GPU-milliseconds.
        micros: cost in millionths of the currency unit; None when there is no price.
    """

    attempt: str
    gpu_type: str
    gpus: int
    gpu_ms: int
    micros: int | None


def charge(facts: Iterable[Fact], *, gpu_type: str, tariff: Tariff = UNPRICED) -> Charge:
    """Return what an attempt used and costs.

    Billable time goes from the start of user code, or of holding idle devices, until the devices are free. While they
    are not, it ends provisionally at the last sign of life; the same call with the later facts gives the final charge.

    Args:
        facts: facts of one attempt, in any order, with any repetition.
        gpu_type: type of its devices.
        tariff: as it was in force when the devices were reserved.

    Raises:
        InvalidValue: the facts are of several attempts, or two different ones carry the same number.
    """
    ordered = _distinct(facts)
    gpus, gpu_ms, place = 0, 0, 0
    while place < len(ordered):
        if ordered[place].kind not in _STARTS:
            place += 1
            continue
        held = len(set(ordered[place].gpus))
        billable_ms, place = _billable_ms(ordered, place)
        gpus, gpu_ms = max(gpus, held), gpu_ms + units.gpu_milliseconds(held, billable_ms)
    return Charge(
        attempt=ordered[0].attempt if ordered else "",
        gpu_type=gpu_type,
        gpus=gpus,
        gpu_ms=gpu_ms,
        micros=None if tariff.gpu_micros_per_hour is None else units.micros_for(gpu_ms, tariff.gpu_micros_per_hour),
    )


def _distinct(facts: Iterable[Fact]) -> list[Fact]:
    """Return each fact once, by number."""
    ordered = sorted(set(facts), key=lambda fact: fact.seq)
    attempts = sorted({fact.attempt for fact in ordered})
    if len(attempts) > 1:
        raise InvalidValue(f"a charge is for one attempt, these facts are of {', '.join(attempts)}")
    for fact, following in pairwise(ordered):
        if fact.seq == following.seq:
            raise InvalidValue(f"two different facts of attempt {fact.attempt} carry the number {fact.seq}")
    return ordered


def _billable_ms(ordered: list[Fact], at: int) -> tuple[int, int]:
    """Return the billable time of the interval that starts at a place of the list, and the place after its end."""
    start, end = ordered[at], ordered[at].boottime_ns
    for place in range(at + 1, len(ordered)):
        fact = ordered[place]
        if fact.boot_id != start.boot_id:
            continue  # a later boot proves the attempt dead, but its boottime says nothing about when
        if fact.kind is FactKind.FREED:
            return max(0, fact.boottime_ns - start.boottime_ns) // 1_000_000, place + 1
        if fact.kind in (FactKind.ALIVE, FactKind.EXITED):
            end = max(end, fact.boottime_ns)
    return (end - start.boottime_ns) // 1_000_000, len(ordered)


# --- lines: what an attempt used on each day --------------------------------------------------------------------------


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt used on one day (UTC), and what that costs.

    The segments are GPU-milliseconds: how long each lasted, times the devices held. `gpu_ms` is what counts as use
    (user code until the devices were free, and idle devices of a session); `billed_ms` is that, or 0 where the platform
    failed.

    Attributes:
        day: days since 1970-01-01.
        start_ns: the first moment of it, nanoseconds since 1970; `end_ns` the last.
        gpus: the most devices held at once.
        environment_ms: while the environment was made ready.
        start_ms: while the ranks were started.
        run_ms: while user code ran.
        stop_ms: while the ranks were ended.
        gate_ms: while the devices were proven free.
        idle_ms: while a session held them and no run used them.
        core_ms: core-milliseconds that are billed, where cores were limited.
        memory_mib_ms: MiB-milliseconds that are billed, where memory was limited.
        micros: millionths of the currency unit; None where nothing that was used has a price.
        dbu_micros: millionths of a DBU.
    """

    day: int
    start_ns: int
    end_ns: int
    gpus: int
    environment_ms: int = 0
    start_ms: int = 0
    run_ms: int = 0
    stop_ms: int = 0
    gate_ms: int = 0
    idle_ms: int = 0
    gpu_ms: int = 0
    billed_ms: int = 0
    core_ms: int = 0
    memory_mib_ms: int = 0
    micros: int | None = None
    dbu_micros: int = 0


class EntryKind(StrEnum):
    """What a row of the ledger is; the rows of one attempt and day add up to what it used then."""

    ORIGINAL = "original"  # the first word about a day
    REVERSAL = "reversal"  # takes one back, number by number
    RESTATED = "restated"  # what holds in its place


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the ledger, never changed and never removed.

    Attributes:
        number: 1, 2, 3 … of its attempt.
        kind: what it is; a reversal has the numbers of the row that it takes back, negative.
        provisional: whether the node fell silent, so that more may come; such rows net to zero once that has come.
    """

    number: int
    kind: EntryKind
    provisional: bool
    line: Line
