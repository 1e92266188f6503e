"""Days, weeks and months of a time zone, and how much of a charge lies in one of them.

    2026-03-29 in Europe/Berlin    23 hours: from 2026-03-28 23:00 UTC until 2026-03-29 22:00 UTC
    a charge of one UTC day        its used time is the end of it, without a break; it is cut where a period begins

The ledger has days of UTC. A period of another zone begins within one of them, so what was used on that day is divided
by time, to the millisecond and the micro: both parts add up to the whole. Values only; the rules of a zone are the
caller's.
"""

from __future__ import annotations

import datetime
import functools

from serverless_gpu.model.utc_days import DAY_NS, date_of, days_of_month, days_of_week, number_of, week_of

_SECOND_NS = 1_000_000_000
_MS_NS = 1_000_000
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


def part_until(amount: int, gpu_ms: int, gpus: int, start_ns: int, end_ns: int, until_ns: int) -> int:
    """Return what of an amount of a charge lies before a moment.

    `amount` and `gpu_ms` may have any sign. The time that counts comes last: environment and start precede it.
    """
    took_ns = abs(gpu_ms) // gpus * _MS_NS if gpus > 0 else 0
    from_ns = max(start_ns, end_ns - took_ns) if took_ns else start_ns
    if until_ns >= end_ns:
        return amount
    if until_ns <= from_ns:
        return 0
    sign = -1 if amount < 0 else 1
    return sign * (abs(amount) * (until_ns - from_ns) // (end_ns - from_ns))
