"""Usage reports: grouping fields, date ranges and calculated figures.

    charges (ledger entries) ──▶ amounts by account and day ─▶ groups: by user, team, tag, month … ─▶ table, file
    use of running attempts ───▶ the same, computed and marked, because the ledger does not have it yet

Amounts are integers. All reports over the same days have equal totals, because each charge is in exactly one group. A
report counts a run in the group of the run's first charge. A report never adds money of two currencies.

    busy    device time with work ÷ device time with telemetry
    seen    device time with telemetry ÷ device time in use
    idle    (device time with telemetry and without work + time in which a session held devices without a run)
            ÷ (device time with telemetry + time in which a session held devices without a run)
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from serverless_gpu import units
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model import calendars
from serverless_gpu.model.spec import TAG_CHARACTERS_MAX

DAYS_MAX = 3_660
"""Maximum number of days in a report: ten years."""
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
"""Fields for grouping a report, with the names of the account columns."""
PERIODS = ("day", "week", "month")
TAG = "tag:"
_KNOWN = f"{', '.join((*ACCOUNT_FIELDS, 'run', *PERIODS))} or tag:KEY"


class Accounted(Protocol):
    """A row of `accounts`: a principal that used devices, and the labels of its device usage."""

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
    """Device usage of a report group, and the usage's cost.

    Attributes:
        runs: number of runs whose first charge is in the group.
        queued_ms: milliseconds that the runs waited for devices. The fields of later segments are in device-
            milliseconds.
        gpu_ms: device-milliseconds in use. `billed_ms` excludes attempts that failed because of the platform.
        unpriced_ms: billed device-milliseconds without a price.
        core_ms: billed core-milliseconds. `memory_mib_ms` counts the billed MiB-milliseconds of host memory.
        micros: cost in millionths of the currency unit, or None if no device has a price.
        dbu_micros: cost in millionths of a DBU.
        observed_ms: device-milliseconds with telemetry, of ended attempts. `busy_ms` counts busy device-milliseconds.
        provisional_ms: device-milliseconds of entries from silent nodes, which the ledger may still reverse.
        going_ms: device-milliseconds of running attempts, which the ledger does not contain yet.
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
        """Return the busy fraction of the device time with telemetry, or None without telemetry."""
        return self.busy_ms / self.observed_ms if self.observed_ms > 0 else None

    @property
    def seen(self) -> float | None:
        """Return the fraction of the used device time with telemetry, or None without usage."""
        return self.observed_ms / self.gpu_ms if self.gpu_ms > 0 else None

    @property
    def idle(self) -> float | None:
        """Return the idle fraction of the observed or held device time, or None if that time is zero."""
        of_ms = self.observed_ms + self.idle_ms
        return (self.observed_ms - self.busy_ms + self.idle_ms) / of_ms if of_ms > 0 else None


_FIELDS = tuple(name for name in Amounts.__struct_fields__ if name != "micros")


class ReportRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a usage report.

    Attributes:
        key: the values of the grouping fields, in the order of the fields. "" stands for "none".
        currency: currency of the row's amounts.
        amounts: the device usage of the group and its cost.
    """

    key: tuple[str, ...]
    currency: str
    amounts: Amounts


class DayRange(NamedTuple):
    """A half-open range of UTC days, counted from 1970-01-01."""

    from_day: int
    until_day: int


class UsageUnit(NamedTuple):
    """A time unit for tables: name, length, and the shortest time that tables show in the unit."""

    name: str
    ms: int
    from_ms: int


UNITS = (
    UsageUnit("hours", units.MS_PER_HOUR, units.MS_PER_HOUR // 10),
    UsageUnit("minutes", 60_000, 60_000),
    UsageUnit("seconds", 1_000, 0),
)


class NameCost(msgspec.Struct, frozen=True, kw_only=True):
    """Unit economics of the runs with one name.

    Attributes:
        name: name of the runs.
        currency: currency of the costs.
        runs: number of runs with a price.
        mean_micros: mean cost of a run, in millionths of the currency unit. `median_micros` is the median.
        median_gpu_ms: median device-milliseconds of a run.
    """

    name: str
    currency: str
    runs: int
    mean_micros: int
    median_micros: int
    median_gpu_ms: int


class CostShare(NamedTuple):
    """A group's share of the total cost, in hundredths of a per cent."""

    name: str
    is_team: bool
    group: ReportRow
    part: int | None


def parse_by(text: str) -> tuple[str, ...]:
    """Parse the grouping fields of a report.

    Commas separate fields. The text ``%2C`` stands for a comma in a tag's key, and ``%25`` for a per cent sign. Raises
    InvalidValue for unknown, repeated or too many fields.
    """
    found = tuple(part.strip().replace("%2C", ",").replace("%25", "%") for part in text.split(",") if part.strip())
    for field in found:
        refuse_unknown(field)
    if len(set(found)) < len(found):
        raise InvalidValue(f"a report cannot be grouped by the same field twice: {text[:80]}")
    if len(found) > BY_MAX:
        raise InvalidValue(f"a report can be grouped by {BY_MAX} fields at most, not {len(found)}")
    return found


def write_by(by: Iterable[str]) -> str:
    """Return the grouping fields in the format that `parse_by` reads."""
    return ",".join(field.replace("%", "%25").replace(",", "%2C") for field in by)


def refuse_unknown(field: str) -> None:
    """Raise InvalidValue for a field that reports cannot group by."""
    is_tag = field.startswith(TAG) and len(TAG) < len(field) <= len(TAG) + TAG_CHARACTERS_MAX
    if (is_tag and "\0" not in field) or field in ACCOUNT_FIELDS or field in PERIODS or field == "run":
        return
    raise InvalidValue(f"a report cannot be grouped by {field[:40]!r}", hint=f"one of {_KNOWN}")


def key_of(by: Sequence[str], account: Accounted, *, run_id: str, day: int) -> tuple[str, ...]:
    """Return the key of the group that a charge belongs to."""
    return tuple(_part(field, account, run_id, day) for field in by)


def label(field: str, value: object) -> str:
    """Return one value of a group key as text for users.

    A day value counts the days since 1970-01-01. A week value counts the weeks since the week of 1970-01-01.
    """
    if field == "day":
        return calendars.format_day(int(str(value)))
    if field == "week":
        return calendars.format_week(int(str(value)))
    return "" if value is None else str(value)


def day_of(text: str) -> int:
    """Return the day number of a date such as ``2026-11-30``."""
    try:
        return calendars.number_of(datetime.date.fromisoformat(text))
    except ValueError:
        raise InvalidValue(f"{text[:40]!r} is not a valid day", hint="write a day as 2026-11-30, in UTC") from None


def month(text: str) -> DayRange:
    """Return the days of a month such as ``2026-11``."""
    try:
        found = calendars.days_of_month(calendars.number_of(datetime.date.fromisoformat(f"{text}-01")))
    except ValueError:
        raise InvalidValue(f"{text[:40]!r} is not a valid month", hint="write a month as 2026-11") from None
    return checked(DayRange(found.start, found.stop))


def months(window: DayRange) -> list[tuple[int, str]]:
    """Return the months in a range of days, each as the first day after the month and the month's name."""
    found: list[tuple[int, str]] = []
    day = window.from_day
    while day < window.until_day:
        name, day = calendars.format_month(day), calendars.days_of_month(day).stop
        found.append((day, name))
    return found


def checked(window: DayRange) -> DayRange:
    """Return a range of days after checking the range's order and length."""
    from_day, until_day = window
    if not 0 <= from_day < until_day:
        raise InvalidValue("the date range ends before it begins", hint="set --from to the first day, --to to the last")
    if until_day - from_day > DAYS_MAX:
        raise InvalidValue(f"a report covers {DAYS_MAX} days at most, not {until_day - from_day}")
    return window


def added(one: Amounts, other: Amounts) -> Amounts:
    """Return the sum of two amounts. A missing price counts as 0 unless both prices are missing."""
    if one.micros is None or other.micros is None:
        micros = one.micros if other.micros is None else other.micros
    else:
        micros = one.micros + other.micros
    return Amounts(micros=micros, **{name: getattr(one, name) + getattr(other, name) for name in _FIELDS})


def together(groups: Iterable[ReportRow]) -> list[ReportRow]:
    """Merge groups with equal keys and currencies, and return them in order of first occurrence."""
    found: dict[tuple[tuple[str, ...], str], Amounts] = {}
    for group in groups:
        place = (group.key, group.currency)
        found[place] = added(found[place], group.amounts) if place in found else group.amounts
    return [ReportRow(key=key, currency=currency, amounts=amounts) for (key, currency), amounts in found.items()]


def totals(groups: Iterable[ReportRow]) -> list[ReportRow]:
    """Return the totals of all groups, one total per currency."""
    return together(ReportRow(key=(), currency=group.currency, amounts=group.amounts) for group in groups)


def in_order(groups: Iterable[ReportRow], by: Sequence[str]) -> list[ReportRow]:
    """Return groups in display order: by period, then by descending cost and usage."""
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


def unit_economics(runs: Iterable[tuple[str, str, int, int]]) -> list[NameCost]:
    """Return the mean and median cost of runs by name, starting with the highest total.

    Args:
        runs: name, currency, cost in millionths and device-milliseconds of each run.
    """
    named: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for name, currency, micros, gpu_ms in runs:
        named.setdefault((name, currency), []).append((micros, gpu_ms))
    ordered = sorted(named.items(), key=lambda item: (-sum(micros for micros, _ in item[1]), item[0]))
    return [
        NameCost(
            name=name,
            currency=currency,
            runs=len(costs),
            mean_micros=sum(micros for micros, _ in costs) // len(costs),
            median_micros=int(statistics.median(micros for micros, _ in costs)),
            median_gpu_ms=int(statistics.median(gpu_ms for _, gpu_ms in costs)),
        )
        for (name, currency), costs in ordered
    ]


def chargeback(groups: Iterable[ReportRow]) -> list[CostShare]:
    """Return the cost of each team, and of each user without a team.

    The total cost equals the total of the groups. The function rounds up the shares with the largest remainders, so
    that the shares of each currency add up to 100 %.
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
    """Return the time unit of a table, which is hours unless all times are below 0.1 hours."""
    return next((unit for unit in UNITS if most_ms >= unit.from_ms), UNITS[-1])


def time_in(unit: UsageUnit, ms: int) -> str:
    """Return milliseconds in a time unit with two decimals, or ``<0.01`` for small times above 0."""
    if 0 < ms < unit.ms // 200:
        return "<0.01"
    hundredths = (2 * ms + unit.ms // 100) // (2 * (unit.ms // 100))
    sign, hundredths = ("-" if hundredths < 0 else ""), abs(hundredths)
    return f"{sign}{hundredths // 100:,}.{hundredths % 100:02d}"


def decimal(micros: int) -> str:
    """Return millionths as an exact decimal number, such as ``12.345678``."""
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
    """Return shares in hundredths of a per cent that add up to 10,000 (largest remainder method)."""
    whole = sum(amounts)
    parts = [amount * 10_000 // whole for amount in amounts]
    rests = sorted(range(len(amounts)), key=lambda place: -(amounts[place] * 10_000 % whole))
    for place in rests[: 10_000 - sum(parts)]:
        parts[place] += 1
    return parts
