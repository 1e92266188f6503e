"""Days of UTC: which a moment is in, and which week and month a day belongs to.

    nanoseconds since 1970 ── ÷ DAY_NS ─▶ day, counted from 1970-01-01 ─▶ week, from Monday on; month; date

The ledger has its rows by day, and reports and budgets add them up by week and month: here, so that both mean the same.

Failure cases: a day beyond the calendar of Python (the year 9999) raises `OverflowError`.

Days, weeks and months of a time zone, whose rules are the caller's.

    2026-03-29 in Europe/Berlin    23 hours: from 2026-03-28 23:00 UTC until 2026-03-29 22:00 UTC
"""

from __future__ import annotations

import datetime
import functools

HOUR_NS = 3_600_000_000_000
DAY_NS = 24 * HOUR_NS
SINCE_MONDAY = 3
"""1970-01-01 was a Thursday: day 0 is so many days after the Monday with which week 0 begins."""
_EPOCH = datetime.date(1970, 1, 1)


def date_of(day: int) -> datetime.date:
    """Return the date of a day."""
    return _EPOCH + datetime.timedelta(days=day)


def number_of(date: datetime.date) -> int:
    """Return the day of a date."""
    return (date - _EPOCH).days


def format_day(day: int) -> str:
    """Return a day for people: ``2026-11-30``."""
    return date_of(day).isoformat()


def week_of(day: int) -> int:
    """Return the week of a day: how many weeks, each from Monday on, it is after that of 1970-01-01."""
    return (day + SINCE_MONDAY) // 7


def days_of_week(week: int) -> range:
    """Return the days of a week, Monday first."""
    monday = 7 * week - SINCE_MONDAY
    return range(monday, monday + 7)


def format_week(week: int) -> str:
    """Return a week for people: ``2026-W48``; that of 1970-01-01 as the first of its year."""
    year, number, _ = date_of(max(0, days_of_week(week)[0])).isocalendar()
    return f"{year}-W{number:02d}"


def days_of_month(day: int) -> range:
    """Return the days of the month that a day is in."""
    first = date_of(day).replace(day=1)
    following = (first + datetime.timedelta(days=31)).replace(day=1)
    return range(number_of(first), number_of(following))


def format_month(day: int) -> str:
    """Return the month of a day for people: ``2026-11``."""
    return format_day(day)[:7]


_SECOND_NS = 1_000_000_000
_EPOCH_UTC = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def local_day(at_ns: int, zone: datetime.tzinfo) -> int:
    """Return the day since 1970-01-01 that a clock in a zone shows at a moment."""
    return number_of((_EPOCH_UTC + datetime.timedelta(seconds=at_ns // _SECOND_NS)).astimezone(zone).date())


def midnight_ns(day: int, zone: datetime.tzinfo) -> int:
    """Return when a day begins in a zone, in nanoseconds since 1970, even where clocks skip midnight."""
    local = datetime.datetime.combine(date_of(day), datetime.time(), zone)
    found_ns = (local - _EPOCH_UTC) // datetime.timedelta(seconds=1) * _SECOND_NS
    if local_day(found_ns, zone) == day:
        return found_ns
    before_ns = found_ns - 86_400 * _SECOND_NS
    while found_ns - before_ns > _SECOND_NS:  # the first second of the day
        middle_ns = (before_ns + found_ns) // 2 // _SECOND_NS * _SECOND_NS
        before_ns, found_ns = (middle_ns, found_ns) if local_day(middle_ns, zone) < day else (before_ns, middle_ns)
    return found_ns


@functools.lru_cache(maxsize=64)
def bounds_ns(period: str, at_ns: int, zone: datetime.tzinfo) -> tuple[int, int]:
    """Return when the day, week or month of a moment begins in a zone, and when the next one does."""
    day = at_ns // DAY_NS if zone is datetime.UTC else local_day(at_ns, zone)
    days = range(day, day + 1)
    if period == "week":
        days = days_of_week(week_of(day))
    elif period == "month":
        days = days_of_month(day)
    if zone is datetime.UTC:
        return days.start * DAY_NS, days.stop * DAY_NS
    return midnight_ns(days.start, zone), midnight_ns(days.stop, zone)
