"""Days of UTC: which a moment is in, and which week and month a day belongs to.

    nanoseconds since 1970 ── ÷ DAY_NS ─▶ day, counted from 1970-01-01 ─▶ week, from Monday on; month; date

The ledger has its rows by day, and reports and budgets add them up by week and month: here, so that both mean the same.

Failure cases: a day beyond the calendar of Python (the year 9999) raises `OverflowError`.
"""

from __future__ import annotations

import datetime

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
