"""Reports of use: by what it is grouped, over which days, and what the figures in it are.

    charges (rows of the ledger) ─▶ amounts by account and day ─▶ groups: by user, team, tag, month … ─▶ table, file
    what goes on now ─────────────▶ the same, computed, and marked: it is not in the ledger yet

Amounts are integers, and each charge is in exactly one group, so the groups of any report over the same days add up to
the same numbers. A run is counted where it was first charged. Money of two currencies is never added.

    busy    device time with work ÷ device time that telemetry saw
    seen    device time that telemetry saw ÷ device time that was used
    idle    (device time that was seen without work + time in which a session held devices for no run)
            ÷ (device time that was seen + that time)
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from serverless_gpu import units
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model import calendars
from serverless_gpu.model.spec import TAG_CHARACTERS_MAX

DAYS_MAX = 3_660
"""A report is over ten years at most."""
BY_MAX = 6
WHERE_MAX = 16
ACCOUNT_FIELDS: Mapping[str, str] = {
    "user": "owner",
    "team": "team",
    "pool": "pool",
    "policy": "policy",
    "gpu_type": "gpu_type",
    "name": "name",
    "workload": "workload",
    "environment": "environment",
}
"""What a report may be grouped by, and what an account calls it."""
PERIODS = ("day", "week", "month")
TAG = "tag:"
_KNOWN = f"{', '.join((*ACCOUNT_FIELDS, 'run', *PERIODS))} or tag:KEY"


class Accounted(Protocol):
    """A row of `accounts`: the principal and the roles in which it used something."""

    @property
    def owner(self) -> str: ...
    @property
    def team(self) -> str: ...
    @property
    def pool(self) -> str: ...
    @property
    def reserved(self) -> bool: ...
    @property
    def policy(self) -> str: ...
    @property
    def gpu_type(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def workload(self) -> str: ...
    @property
    def environment(self) -> str: ...
    @property
    def currency(self) -> str: ...
    @property
    def tags(self) -> Mapping[str, str]: ...


class Amounts(msgspec.Struct, frozen=True, kw_only=True):
    """Use, and its cost.

    Attributes:
        runs: how many runs were first charged among these.
        queued_ms: milliseconds that they waited for devices; the segments after it are device-milliseconds.
        gpu_ms: device-milliseconds that were used; `billed_ms` those that count: not where the platform failed.
        unpriced_ms: those that count and have no price.
        core_ms: core-milliseconds that are billed; `memory_mib_ms` likewise MiB-milliseconds of host memory.
        micros: millionths of the currency unit; None where nothing of it has a price.
        dbu_micros: millionths of a DBU.
        observed_ms: device-milliseconds that telemetry saw, of attempts that ended; `busy_ms` those with work.
        provisional_ms: device-milliseconds of entries that may still be taken back: their nodes fell silent.
        going_ms: device-milliseconds that are not in the ledger yet, of what goes on now.
    """

    runs: int = 0
    queued_ms: int = 0
    environment_ms: int = 0
    start_ms: int = 0
    run_ms: int = 0
    stop_ms: int = 0
    gate_ms: int = 0
    idle_ms: int = 0
    gpu_ms: int = 0
    billed_ms: int = 0
    unpriced_ms: int = 0
    core_ms: int = 0
    memory_mib_ms: int = 0
    micros: int | None = None
    dbu_micros: int = 0
    observed_ms: int = 0
    busy_ms: int = 0
    provisional_ms: int = 0
    going_ms: int = 0

    @property
    def busy(self) -> float | None:
        """Return the part of what telemetry saw in which devices worked; None where it saw nothing."""
        return self.busy_ms / self.observed_ms if self.observed_ms > 0 else None

    @property
    def seen(self) -> float | None:
        """Return the part of what was used that telemetry saw; None where nothing was used."""
        return self.observed_ms / self.gpu_ms if self.gpu_ms > 0 else None

    @property
    def idle(self) -> float | None:
        """Return the part of what was seen, or held for no run, in which devices did nothing; None where that is 0."""
        of_ms = self.observed_ms + self.idle_ms
        return (self.observed_ms - self.busy_ms + self.idle_ms) / of_ms if of_ms > 0 else None


_FIELDS = tuple(name for name in Amounts.__struct_fields__ if name != "micros")


class ReportRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a report.

    Attributes:
        key: what it is about, a part for each field that it is grouped by; "" is "none".
        currency: of its money.
        amounts: what was used.
    """

    key: tuple[str, ...]
    currency: str
    amounts: Amounts


class DayRange(NamedTuple):
    """Days of UTC, since 1970-01-01: from one, and not the other any more."""

    from_day: int
    until_day: int


class UsageUnit(NamedTuple):
    """In what times are shown: its name, how long it is, and from which time on."""

    name: str
    ms: int
    from_ms: int


UNITS = (
    UsageUnit("hours", units.MS_PER_HOUR, units.MS_PER_HOUR // 10),
    UsageUnit("minutes", 60_000, 60_000),
    UsageUnit("seconds", 1_000, 0),
)


class CostShare(NamedTuple):
    """The part of the money that a group pays, in hundredths of a per cent."""

    name: str
    is_team: bool
    group: ReportRow
    part: int | None


def parse_by(text: str) -> tuple[str, ...]:
    """Return what a report is grouped by.

    Commas separate fields. A comma in a tag's key is written ``%2C``, a per cent sign ``%25``. Raises InvalidValue when
    a field is unknown or repeated, or when there are too many.
    """
    found = tuple(part.strip().replace("%2C", ",").replace("%25", "%") for part in text.split(",") if part.strip())
    for field in found:
        refuse_unknown(field)
    if len(set(found)) < len(found):
        raise InvalidValue(f"a report cannot be grouped twice by the same: {text[:80]}")
    if len(found) > BY_MAX:
        raise InvalidValue(f"a report is grouped by {BY_MAX} fields at most, not {len(found)}")
    return found


def write_by(by: Iterable[str]) -> str:
    """Return fields as `parse_by` reads them."""
    return ",".join(field.replace("%", "%25").replace(",", "%2C") for field in by)


def refuse_unknown(field: str) -> None:
    """Refuse what use cannot be grouped by."""
    is_tag = field.startswith(TAG) and len(TAG) < len(field) <= len(TAG) + TAG_CHARACTERS_MAX
    if (is_tag and "\0" not in field) or field in ACCOUNT_FIELDS or field in PERIODS or field == "run":
        return
    raise InvalidValue(f"use cannot be grouped by {field[:40]!r}", hint=f"one of {_KNOWN}")


def key_of(by: Sequence[str], account: Accounted, *, run_id: str, day: int) -> tuple[str, ...]:
    """Return the group that a charge is in."""
    return tuple(_part(field, account, run_id, day) for field in by)


def label(field: str, value: object) -> str:
    """Return a part of a key as it is shown.

    A day is its number since 1970-01-01, a week the number of weeks after that of 1970-01-01.
    """
    if field == "day":
        return calendars.format_day(int(str(value)))
    if field == "week":
        return calendars.format_week(int(str(value)))
    return "" if value is None else str(value)


def day_of(text: str) -> int:
    """Return the number of a day that is written ``2026-11-30``."""
    try:
        return calendars.number_of(datetime.date.fromisoformat(text))
    except ValueError:
        raise InvalidValue(f"{text[:40]!r} is no day", hint="write it as 2026-11-30; days are of UTC") from None


def month(text: str) -> DayRange:
    """Return the days of a month that is written ``2026-11``."""
    try:
        found = calendars.days_of_month(calendars.number_of(datetime.date.fromisoformat(f"{text}-01")))
    except ValueError:
        raise InvalidValue(f"{text[:40]!r} is no month", hint="write it as 2026-11") from None
    return checked(DayRange(found.start, found.stop))


def months(window: DayRange) -> list[tuple[int, str]]:
    """Return the months of some days, in their order: the first day after each, and its name."""
    found: list[tuple[int, str]] = []
    day = window.from_day
    while day < window.until_day:
        name, day = calendars.format_month(day), calendars.days_of_month(day).stop
        found.append((day, name))
    return found


def checked(window: DayRange) -> DayRange:
    """Return days that a report may be over."""
    from_day, until_day = window
    if not 0 <= from_day < until_day:
        raise InvalidValue("these days end before they begin", hint="--from is the first day, --to the last one")
    if until_day - from_day > DAYS_MAX:
        raise InvalidValue(f"a report is over {DAYS_MAX} days at most, not {until_day - from_day}")
    return window


def added(one: Amounts, other: Amounts) -> Amounts:
    """Return two amounts together; no price and a price is a price."""
    if one.micros is None or other.micros is None:
        micros = one.micros if other.micros is None else other.micros
    else:
        micros = one.micros + other.micros
    return Amounts(micros=micros, **{name: getattr(one, name) + getattr(other, name) for name in _FIELDS})


def together(groups: Iterable[ReportRow]) -> list[ReportRow]:
    """Return groups with those of the same key and currency as one, in the order in which they first came."""
    found: dict[tuple[tuple[str, ...], str], Amounts] = {}
    for group in groups:
        place = (group.key, group.currency)
        found[place] = added(found[place], group.amounts) if place in found else group.amounts
    return [ReportRow(key=key, currency=currency, amounts=amounts) for (key, currency), amounts in found.items()]


def totals(groups: Iterable[ReportRow]) -> list[ReportRow]:
    """Return what groups add up to, one for each currency."""
    return together(ReportRow(key=(), currency=group.currency, amounts=group.amounts) for group in groups)


def in_order(groups: Iterable[ReportRow], by: Sequence[str]) -> list[ReportRow]:
    """Return groups as they are shown: periods in their order, and in each what costs most first."""
    at = [place for place, field in enumerate(by) if field in PERIODS]
    return sorted(
        groups,
        key=lambda group: (
            [group.key[place] for place in at],
            group.amounts.micros is None,
            -(group.amounts.micros or 0),
            -group.amounts.gpu_ms,
            group.key,
            group.currency,
        ),
    )


def chargeback(groups: Iterable[ReportRow]) -> list[CostShare]:
    """Return who pays what: teams, and users without one.

    The money of all is exactly that of the groups, and the parts of each currency are 100 %: what rounding leaves over
    goes to those whose part was cut most.
    """
    named = together(
        ReportRow(
            key=("team", group.key[0]) if group.key[0] else ("user", group.key[1]),
            currency=group.currency,
            amounts=group.amounts,
        )
        for group in groups
    )
    parts: dict[tuple[tuple[str, ...], str], int] = {}
    for currency in {group.currency for group in named}:
        priced = [group for group in named if group.currency == currency and (group.amounts.micros or 0) > 0]
        for group, part in zip(priced, _parts([group.amounts.micros or 0 for group in priced]), strict=True):
            parts[group.key, currency] = part
    return [
        CostShare(group.key[1], group.key[0] == "team", group, parts.get((group.key, group.currency)))
        for group in in_order(named, ())
    ]


def unit_for(most_ms: int) -> UsageUnit:
    """Return in what the times of a table are shown: hours, or less where nothing in it takes a tenth of one."""
    return next((unit for unit in UNITS if most_ms >= unit.from_ms), UNITS[-1])


def time_in(unit: UsageUnit, ms: int) -> str:
    """Return milliseconds with two decimals; a smaller amount does not look like 0."""
    if 0 < ms < unit.ms // 200:
        return "<0.01"
    hundredths = (2 * ms + unit.ms // 100) // (2 * (unit.ms // 100))
    sign, hundredths = ("-" if hundredths < 0 else ""), abs(hundredths)
    return f"{sign}{hundredths // 100:,}.{hundredths % 100:02d}"


def decimal(micros: int) -> str:
    """Return millionths as an exact number: ``12.345678``."""
    whole, rest = divmod(abs(micros), units.MICROS_PER_UNIT)
    return f"{'-' if micros < 0 else ''}{whole}.{rest:06d}"


def _part(field: str, account: Accounted, run_id: str, day: int) -> str:
    if field in ACCOUNT_FIELDS:
        return str(getattr(account, ACCOUNT_FIELDS[field]))
    if field == "run":
        return run_id
    if field == "month":
        return calendars.format_month(day)
    if field in PERIODS:
        return label(field, calendars.week_of(day) if field == "week" else day)
    return account.tags.get(field.removeprefix(TAG), "")


def _parts(amounts: Sequence[int]) -> list[int]:
    """Return the part of each of all in hundredths of a per cent, 10,000 altogether: by the largest remainder."""
    whole = sum(amounts)
    parts = [amount * 10_000 // whole for amount in amounts]
    rests = sorted(range(len(amounts)), key=lambda place: -(amounts[place] * 10_000 % whole))
    for place in rests[: 10_000 - sum(parts)]:
        parts[place] += 1
    return parts
