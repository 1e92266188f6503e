"""Days, weeks and months of a time zone, whose rules are the caller's.

    2026-03-29 in Europe/Berlin    23 hours: from 2026-03-28 23:00 UTC until 2026-03-29 22:00 UTC
"""

from __future__ import annotations

import datetime
import functools

from serverless_gpu.model.utc_days import DAY_NS, date_of, days_of_month, days_of_week, number_of, week_of

_SECOND_NS = 1_000_000_000
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def local_day(at_ns: int, zone: datetime.tzinfo) -> int:
    """Return the day since 1970-01-01 that a clock in a zone shows at a moment."""
    return number_of((_EPOCH + datetime.timedelta(seconds=at_ns // _SECOND_NS)).astimezone(zone).date())


def midnight_ns(day: int, zone: datetime.tzinfo) -> int:
    """Return when a day begins in a zone, in nanoseconds since 1970, even where clocks skip midnight."""
    local = datetime.datetime.combine(date_of(day), datetime.time(), zone)
    found_ns = (local - _EPOCH) // datetime.timedelta(seconds=1) * _SECOND_NS
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
