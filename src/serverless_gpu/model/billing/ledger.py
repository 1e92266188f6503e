"""Ledger: computes charges from facts and prices, and the entries that record the charges.

A charge is a pure function of facts and a tariff. A node's facts may arrive late, twice and in any order.

    facts ─ metering.py ─▶ use of each day ─ tariff ─▶ lines ─ post ─▶ entries, compared with the posted ones

    day 1   day 2        each cost is a difference of running totals, which are rounded up once per attempt:
    0.34    0.33         the lines add up to the charge

The ledger never changes an entry. To correct an entry, the ledger posts a reversal with negative amounts and a new
entry.

Failure cases: The entry for the last day of a silent node is provisional. The ledger reverses a provisional entry when
more facts arrive. Facts of several attempts, or two different facts with the same number, raise `InvalidValue`. Charges
from conflicting facts would depend on the order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from serverless_gpu.model.billing.metering import FIRST_USED, SEGMENTS, DayUse, Meter
from serverless_gpu.model.billing.pricing import UNPRICED, Tariff, cost, cost_parts, dbu_cost
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Fact, Reason, distinct
from serverless_gpu.model.receipt import Bill

_AFTER_GRACE = "device time after the ranks' grace period"


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """The device usage and the cost of one attempt, as the sum of its ledger lines."""

    attempt: str = ""  # Identifier of the attempt in the form `run:fence`.
    gpu_type: str = ""
    gpus: int = 0  # The highest number of devices in use at the same time.
    gpu_ms: int = 0  # Device-milliseconds in use by the attempt. `billed_ms` counts the billed device-milliseconds.
    billed_ms: int = 0
    core_ms: int = 0  # Billed core-milliseconds. `memory_mib_ms` counts the billed MiB-milliseconds.
    memory_mib_ms: int = 0
    micros: int | None = None  # Cost in millionths of the currency unit, or None without a price.
    core_micros: int = 0  # Cost of the attempt's cores. `memory_micros` is the cost of the attempt's memory.
    memory_micros: int = 0
    dbu_micros: int = 0


def charge(facts: Iterable[Fact], *, gpu_type: str, tariff: Tariff = UNPRICED, is_billed: bool = True) -> Charge:
    """Return the device usage and the cost of an attempt.

    Device usage starts when user code starts, or when a session holds idle devices. The device usage ends when the
    devices are free. While the devices are in use, the last report is the provisional end. A call with all facts
    returns the final charge.

    Raises InvalidValue for facts of several attempts, or for two facts with the same number.
    """
    ordered = distinct(facts)
    whole = sum_of(lines(ordered, tariff, is_billed=is_billed), tariff)
    return msgspec.structs.replace(whole, attempt=ordered[0].attempt if ordered else "", gpu_type=gpu_type)


def sum_of(days: Sequence[LedgerLine], tariff: Tariff) -> Charge:
    """Return the sum of the ledger lines of one attempt."""
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
    """Return the billed amounts of a charge, and the reason why some usage is not billed."""
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


# --- ledger lines: daily device usage of an attempt -------------------------------------------------------------------


class LedgerLine(msgspec.Struct, frozen=True, kw_only=True):
    """The device usage and the cost of one attempt on one UTC day.

    Each segment field is the segment's duration times the number of devices, in device-milliseconds. `gpu_ms` counts
    the device time from the start of user code until release, and a session's idle device time. `billed_ms` excludes
    the time after the grace period of a stop request by the server. `billed_ms` is 0 if the platform failed.
    """

    day: int  # Days since 1970-01-01.
    start_ns: int  # Start of the device usage in nanoseconds since 1970. `end_ns` is the end of the device usage.
    end_ns: int
    gpus: int  # The highest number of devices in use at the same time.
    environment_ms: int = 0  # Device time while the node prepared the environment.
    start_ms: int = 0  # Device time while the ranks started.
    run_ms: int = 0
    stop_ms: int = 0  # Device time while the ranks stopped.
    gate_ms: int = 0  # Device time while the node verified that the devices were free.
    idle_ms: int = 0  # Device time while a session held devices without a run.
    gpu_ms: int = 0
    billed_ms: int = 0
    core_ms: int = 0  # Billed core-milliseconds under a limit of cores, without the cores that are CPU slots.
    memory_mib_ms: int = 0  # Billed MiB-milliseconds under a limit of memory.
    micros: int | None = None  # Cost in millionths of the currency unit, or None if the devices have no price.
    dbu_micros: int = 0


def lines(facts: Iterable[Fact], tariff: Tariff, *, is_billed: bool = True) -> tuple[LedgerLine, ...]:
    """Return the ledger lines of an attempt by day. The function rounds the total cost up once.

    Raises InvalidValue for facts of several attempts, or for two facts with the same number.
    """
    meter = Meter()
    for fact in distinct(facts):
        meter.add(fact)
    return priced(meter.used(), tariff, is_billed=is_billed)


def priced(days: Mapping[int, DayUse], tariff: Tariff, *, is_billed: bool = True) -> tuple[LedgerLine, ...]:
    """Return the ledger lines with costs, from the daily usage of an attempt."""
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


# --- ledger entries: posted lines -------------------------------------------------------------------------------------


class EntryKind(StrEnum):
    """The kind of a ledger entry. The entries of one attempt and day add up to the usage on that day."""

    ORIGINAL = "original"  # The first entry of an attempt for a day.
    REVERSAL = "reversal"  # A reversal cancels an earlier entry with negative amounts.
    RESTATED = "restated"  # A restated entry replaces an entry that the ledger has reversed.


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One immutable row of the ledger."""

    number: int  # Number of the entry within its attempt, counted from 1.
    kind: EntryKind  # A reversal has the negative amounts of the entry that it reverses.
    # True while the node is silent and more facts may arrive. The ledger later reverses a provisional entry.
    provisional: bool
    line: LedgerLine


def post(posted: Sequence[LedgerEntry], target: Sequence[LedgerLine], *, final: bool) -> tuple[LedgerEntry, ...]:
    """Return the entries that correct a ledger, or no entries for a correct ledger.

    The function reverses a wrong entry and posts a corrected entry. When a provisional entry becomes final, the
    function also reverses the provisional entry. Provisional entries and their reversals therefore add up to zero.

    `final` is True if no more facts of the target days can arrive. If `final` is False, the entry for the last day is
    provisional.
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
    """Return the entries without a reversal, by day in ascending order."""
    found: dict[int, LedgerEntry] = {}
    for entry in sorted(posted, key=lambda entry: entry.number):
        if entry.kind is EntryKind.REVERSAL:
            found.pop(entry.line.day, None)
        else:
            found[entry.line.day] = entry
    return {day: found[day] for day in sorted(found)}


def reversed_line(line: LedgerLine) -> LedgerLine:
    """Return the reversal of a ledger line, with negative amounts and the same time and devices."""
    amounts = {name: -value for name in _AMOUNTS if (value := getattr(line, name)) is not None}
    return msgspec.structs.replace(line, **amounts)


_PLACE = ("day", "start_ns", "end_ns", "gpus")
_AMOUNTS = tuple(name for name in LedgerLine.__struct_fields__ if name not in _PLACE)
