"""The ledger: what follows from facts in money, and the rows in which that is kept.

A charge is a pure function of facts and a tariff, so that facts may arrive late, twice and in any order.

    facts ─ metering.py ─▶ use of each day ─ tariff ─▶ lines ─ post ─▶ entries, against what is there already

    day 1   day 2        costs are differences of one total, which is rounded up once for the attempt:
    0.34    0.33         the lines add up to the charge

What a ledger has of a day is never changed: it is taken back, number by number, and written again.

Failure cases: a silent node's last day is provisional, and is taken back when more is known. Facts of several attempts,
or two different facts under one number, are a fault of the caller and raise `InvalidValue`: any sum of them would
depend on the order they came in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from serverless_gpu.model.billing.metering import FIRST_USED, SEGMENTS, DayUse, Meter
from serverless_gpu.model.billing.pricing import UNPRICED, Tariff, cost, cost_parts, dbu_cost
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Fact, Reason, distinct
from serverless_gpu.model.receipt import Bill

_AFTER_GRACE = "after the grace that its ranks had"


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """The use and the cost of one attempt: the sum of its lines."""

    attempt: str = ""  # the attempt, as `run:fence`
    gpu_type: str = ""
    gpus: int = 0  # the most devices it had at once
    gpu_ms: int = 0  # device-milliseconds that were used; `billed_ms` those that are billed
    billed_ms: int = 0
    core_ms: int = 0  # core-milliseconds that are billed; `memory_mib_ms` the same, for MiB
    memory_mib_ms: int = 0
    micros: int | None = None  # cost in millionths of the currency unit; None when there is no price
    core_micros: int = 0  # what of it is for cores; `memory_micros` for memory
    memory_micros: int = 0
    dbu_micros: int = 0


def charge(facts: Iterable[Fact], *, gpu_type: str, tariff: Tariff = UNPRICED, is_billed: bool = True) -> Charge:
    """Return what an attempt used and costs.

    Use goes from the start of user code, or of holding idle devices, until the devices are free. While they are not, it
    ends provisionally at the last sign of life; the same call with the later facts gives the final charge.

    Raises InvalidValue when the facts are of several attempts, or two facts share a number.
    """
    ordered = distinct(facts)
    whole = sum_of(lines(ordered, tariff, is_billed=is_billed), tariff)
    return msgspec.structs.replace(whole, attempt=ordered[0].attempt if ordered else "", gpu_type=gpu_type)


def sum_of(days: Sequence[LedgerLine], tariff: Tariff) -> Charge:
    """Return the sum of the lines of one attempt."""
    billed_ms = sum(line.billed_ms for line in days)
    core_ms, memory_mib_ms = sum(line.core_ms for line in days), sum(line.memory_mib_ms for line in days)
    _, core_micros, memory_micros = cost_parts(tariff, billed_ms, core_ms, memory_mib_ms)
    return Charge(
        gpus=max((line.gpus for line in days), default=0),
        gpu_ms=sum(line.gpu_ms for line in days),
        billed_ms=billed_ms,
        core_ms=core_ms,
        memory_mib_ms=memory_mib_ms,
        micros=None if tariff.gpu_micros_per_hour is None else sum(line.micros or 0 for line in days),
        core_micros=core_micros,
        memory_micros=memory_micros,
        dbu_micros=sum(line.dbu_micros for line in days),
    )


def bill_of(used: Charge, reason: Reason | None) -> Bill:
    """Return how a charge comes about, and why not all of it is billed."""
    unbilled = ""
    if used.gpu_ms and reason is not None and not MEANINGS[reason].is_billed:
        unbilled = MEANINGS[reason].sentence
    elif used.billed_ms < used.gpu_ms:
        unbilled = _AFTER_GRACE
    return Bill(
        billed_ms=used.billed_ms,
        unbilled=unbilled,
        core_ms=used.core_ms,
        memory_mib_ms=used.memory_mib_ms,
        core_micros=used.core_micros,
        memory_micros=used.memory_micros,
        dbu_micros=used.dbu_micros,
    )


# --- lines: what an attempt used on each day --------------------------------------------------------------------------


class LedgerLine(msgspec.Struct, frozen=True, kw_only=True):
    """The use and the cost of one attempt on one day (UTC).

    The segments are device-milliseconds: how long each lasted, times the devices lent. `gpu_ms` is what counts as use
    (user code until the devices were free, and idle devices of a session); `billed_ms` is that, less what came after
    the grace of a stop that we asked for, or 0 where the platform failed.
    """

    day: int  # days since 1970-01-01
    start_ns: int  # the first moment of it, nanoseconds since 1970; `end_ns` the last
    end_ns: int
    gpus: int  # the most devices lent at once
    environment_ms: int = 0  # while the environment was made ready
    start_ms: int = 0  # while the ranks were started
    run_ms: int = 0
    stop_ms: int = 0  # while the ranks were ended
    gate_ms: int = 0  # while the devices were proven free
    idle_ms: int = 0  # while a session held them and no run used them
    gpu_ms: int = 0
    billed_ms: int = 0
    core_ms: int = 0  # core-milliseconds that are billed, where cores were limited; beyond those that are CPU slots
    memory_mib_ms: int = 0  # MiB-milliseconds that are billed, where memory was limited
    micros: int | None = None  # millionths of the currency unit; None where the devices have no price
    dbu_micros: int = 0


def lines(facts: Iterable[Fact], tariff: Tariff, *, is_billed: bool = True) -> tuple[LedgerLine, ...]:
    """Return what an attempt used on each day, in order; their costs add up to one that is rounded up once.

    Raises InvalidValue when the facts are of several attempts, or two facts share a number.
    """
    meter = Meter()
    for fact in distinct(facts):
        meter.add(fact)
    return priced(meter.used(), tariff, is_billed=is_billed)


def priced(days: Mapping[int, DayUse], tariff: Tariff, *, is_billed: bool = True) -> tuple[LedgerLine, ...]:
    """Return the lines of what an attempt used."""
    found: list[LedgerLine] = []
    billed_ms = core_ms = memory_mib_ms = micros = dbu_micros = 0
    for number, day in days.items():
        if is_billed:
            billed_ms += day.billed_ms
            core_ms += day.core_ms
            memory_mib_ms += day.memory_mib_ms
        total = cost(tariff, billed_ms, core_ms, memory_mib_ms)
        total_dbu = dbu_cost(tariff, billed_ms)
        found.append(
            LedgerLine(
                day=number,
                start_ns=day.start_ns,
                end_ns=day.end_ns,
                gpus=day.gpus,
                **dict(zip(SEGMENTS, day.segments, strict=True)),
                gpu_ms=sum(day.segments[FIRST_USED:]),
                billed_ms=day.billed_ms if is_billed else 0,
                core_ms=day.core_ms if is_billed else 0,
                memory_mib_ms=day.memory_mib_ms if is_billed else 0,
                micros=None if total is None else total - micros,
                dbu_micros=total_dbu - dbu_micros,
            )
        )
        micros, dbu_micros = total or 0, total_dbu
    return tuple(found)


# --- entries: what a ledger has of that -------------------------------------------------------------------------------


class EntryKind(StrEnum):
    """What a row of the ledger is; the rows of one attempt and day add up to what it used then."""

    ORIGINAL = "original"  # the first word about a day
    REVERSAL = "reversal"  # takes one back, number by number
    RESTATED = "restated"  # what holds in its place


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the ledger, never changed and never removed."""

    number: int  # 1, 2, 3 … of its attempt
    kind: EntryKind  # what it is; a reversal has the numbers of the row that it takes back, negative
    provisional: bool  # whether the node fell silent, so that more may come; such rows net to zero once that has come
    line: LedgerLine


def post(posted: Sequence[LedgerEntry], target: Sequence[LedgerLine], *, final: bool) -> tuple[LedgerEntry, ...]:
    """Return the entries that make a ledger say what it has to; none for what is there and right.

    A row that is wrong is taken back and written again. So is a provisional one once what it says is final: provisional
    rows and their reversals add up to nothing then.

    `final`: no fact of these days will come any more; else the last of them may still change.
    """
    number = max((entry.number for entry in posted), default=0)
    there, known = standing(posted), {entry.line.day for entry in posted}
    wanted = {line.day: line for line in target}
    last = max(wanted, default=0)
    new: list[LedgerEntry] = []
    for day in sorted(wanted.keys() | there.keys()):
        line, entry = wanted.get(day), there.get(day)
        provisional = not final and day == last
        if entry is not None:
            if entry.line == line and not (final and entry.provisional):
                continue
            number += 1
            taken = reversed_line(entry.line)
            new.append(LedgerEntry(number=number, kind=EntryKind.REVERSAL, provisional=entry.provisional, line=taken))
        if line is not None:
            number += 1
            kind = EntryKind.RESTATED if day in known else EntryKind.ORIGINAL
            new.append(LedgerEntry(number=number, kind=kind, provisional=provisional, line=line))
    return tuple(new)


def standing(posted: Iterable[LedgerEntry]) -> dict[int, LedgerEntry]:
    """Return the entries that hold, by their days in order: those that were not taken back."""
    found: dict[int, LedgerEntry] = {}
    for entry in sorted(posted, key=lambda entry: entry.number):
        if entry.kind is EntryKind.REVERSAL:
            found.pop(entry.line.day, None)
        else:
            found[entry.line.day] = entry
    return {day: found[day] for day in sorted(found)}


def reversed_line(line: LedgerLine) -> LedgerLine:
    """Return what takes a line back: its amounts negative, its place and devices as they are."""
    amounts = {name: -value for name in _AMOUNTS if (value := getattr(line, name)) is not None}
    return msgspec.structs.replace(line, **amounts)


_PLACE = ("day", "start_ns", "end_ns", "gpus")
_AMOUNTS = tuple(name for name in LedgerLine.__struct_fields__ if name not in _PLACE)
