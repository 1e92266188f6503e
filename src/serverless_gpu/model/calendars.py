"""Days, weeks and months in UTC and in time zones, and the weekly hours in which a node is shared.

    nanoseconds since 1970 ── ÷ DAY_NS ─▶ day, counted from 1970-01-01 ─▶ week (from Monday), month, date
    2026-03-29 in Europe/Berlin           23 hours: from 2026-03-28 23:00 UTC until 2026-03-29 22:00 UTC
    "mon-fri 19:00-07:00", "sat-sun"      ─▶ `Calendar`: whether a node is shared now, and the time of the next change

The ledger has one row per day. Reports and budgets use the same functions to add up days, so that their weeks and
months agree. The caller passes time zones as `zoneinfo` objects.

The local time of the calendar's zone decides when a node is shared. If a clock change skips an hour, a sharing window
within the skipped hour does not occur. If a clock change repeats an hour, a sharing window within the repeated hour
occurs twice. A sharing window whose end is earlier than its start ends on the next day.

Failure cases: a day after the year 9999 raises `OverflowError`. An invalid window raises `InvalidValue` with the valid
forms.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Iterator, Sequence

import msgspec

from serverless_gpu.errors import InvalidValue

HOUR_NS = 3_600_000_000_000
DAY_NS = 24 * HOUR_NS
SINCE_MONDAY = 3
"""Number of days from the Monday of week 0 to day 0, because 1970-01-01 was a Thursday."""
_SECOND_NS = 1_000_000_000
_EPOCH = datetime.date(1970, 1, 1)
_EPOCH_UTC = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def date_of(day: int) -> datetime.date:
    """Return the date of a day number."""
    return _EPOCH + datetime.timedelta(days=day)


def number_of(date: datetime.date) -> int:
    """Return the day number of a date."""
    return (date - _EPOCH).days


def format_day(day: int) -> str:
    """Return a day as text, such as ``2026-11-30``."""
    return date_of(day).isoformat()


def week_of(day: int) -> int:
    """Return the week number of a day. Weeks begin on Monday. Week 0 contains 1970-01-01."""
    return (day + SINCE_MONDAY) // 7


def days_of_week(week: int) -> range:
    """Return the days of a week, Monday first."""
    monday = 7 * week - SINCE_MONDAY
    return range(monday, monday + 7)


def format_week(week: int) -> str:
    """Return a week as text, such as ``2026-W48``. Week 0 is the first week of 1970."""
    year, number, _ = date_of(max(0, days_of_week(week)[0])).isocalendar()
    return f"{year}-W{number:02d}"


def days_of_month(day: int) -> range:
    """Return the days of the month that contains a day."""
    first = date_of(day).replace(day=1)
    following = (first + datetime.timedelta(days=31)).replace(day=1)
    return range(number_of(first), number_of(following))


def format_month(day: int) -> str:
    """Return the month of a day as text, such as ``2026-11``."""
    return format_day(day)[:7]


def local_day(at_ns: int, zone: datetime.tzinfo) -> int:
    """Return the local day number in a time zone at a moment."""
    return number_of((_EPOCH_UTC + datetime.timedelta(seconds=at_ns // _SECOND_NS)).astimezone(zone).date())


def midnight_ns(day: int, zone: datetime.tzinfo) -> int:
    """Return the start of a day in a time zone, in nanoseconds since 1970."""
    local = datetime.datetime.combine(date_of(day), datetime.time(), zone)
    found_ns = (local - _EPOCH_UTC) // datetime.timedelta(seconds=1) * _SECOND_NS
    if local_day(found_ns, zone) == day:
        return found_ns
    before_ns = found_ns - 86_400 * _SECOND_NS
    # Binary search for the first second of the local day, because some clock changes skip midnight.
    while found_ns - before_ns > _SECOND_NS:
        middle_ns = (before_ns + found_ns) // 2 // _SECOND_NS * _SECOND_NS
        before_ns, found_ns = (middle_ns, found_ns) if local_day(middle_ns, zone) < day else (before_ns, middle_ns)
    return found_ns


@functools.lru_cache(maxsize=64)
def bounds_ns(period: str, at_ns: int, zone: datetime.tzinfo) -> tuple[int, int]:
    """Return the start of the day, week or month that contains a moment, and the next start."""
    day = at_ns // DAY_NS if zone is datetime.UTC else local_day(at_ns, zone)
    days = range(day, day + 1)
    if period == "week":
        days = days_of_week(week_of(day))
    elif period == "month":
        days = days_of_month(day)
    if zone is datetime.UTC:
        return days.start * DAY_NS, days.stop * DAY_NS
    return midnight_ns(days.start, zone), midnight_ns(days.stop, zone)


# --- weekly sharing windows of nodes ----------------------------------------------------------------------------------


WINDOWS_MAX = 32
_WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_MINUTES = 24 * 60
# Numbers of days that the short search and the long search for the next sharing change cover. The next sharing change
# is usually within 4 days. A sharing window recurs after a week, or after two weeks if a clock change skips the window.
_AHEAD_DAYS = (4, 17)
_TIMES = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})", re.ASCII)
_FORMS = 'write days, times or both: "mon-fri 19:00-07:00", "sat-sun", "sat,sun 08:00-24:00", "22:00-06:00"'


class WeeklyWindow(msgspec.Struct, frozen=True, kw_only=True):
    """A weekly sharing window: days of the week and times of day."""

    days: tuple[int, ...]  # Weekdays on which the window begins, 0 for Monday.
    begins: int = 0  # Start of the window in minutes since midnight.
    # End of the window in minutes since midnight, always greater than `begins`. An end above 1440 is on the next day.
    ends: int = _DAY_MINUTES

    @property
    def text(self) -> str:
        """Return the sharing window in the format that `parse_window` reads."""
        days = "" if len(self.days) == len(_WEEKDAYS) else ",".join(_ranges(self.days))
        ends = self.ends - _DAY_MINUTES if self.ends > _DAY_MINUTES else self.ends
        times = "" if (self.begins, self.ends) == (0, _DAY_MINUTES) else f"{_clock(self.begins)}-{_clock(ends)}"
        return f"{days} {times}".strip() or "mon-sun"


class Calendar(msgspec.Struct, frozen=True, kw_only=True):
    """Weekly times at which other principals may use a node."""

    # Weekly sharing windows of the node. A node without sharing windows is always shared.
    windows: tuple[WeeklyWindow, ...]
    zone: datetime.tzinfo  # Time zone of the windows.


def parse_calendar(texts: Sequence[str], zone: datetime.tzinfo) -> Calendar:
    """Parse the sharing windows of a calendar. Raises InvalidValue for an invalid or superfluous window."""
    if len(texts) > WINDOWS_MAX:
        raise InvalidValue(f"a calendar cannot have {len(texts)} windows", hint=f"{WINDOWS_MAX} at most")
    return Calendar(windows=tuple(parse_window(text) for text in texts), zone=zone)


def parse_window(text: str) -> WeeklyWindow:
    """Parse a weekly sharing window such as ``"mon-fri 19:00-07:00"``."""
    words = text.lower().replace("–", "-").split()
    if not words or len(words) > 2:
        raise _bad(text, "a window needs days, times or both")
    if len(words) == 2 or not _is_times(words[0]):
        days = _parse_days(words[0], text)
    else:
        days = tuple(range(len(_WEEKDAYS)))
    if len(words) == 1 and not _is_times(words[0]):
        return WeeklyWindow(days=days)
    begins, ends = _parse_times(words[-1], text)
    return WeeklyWindow(days=days, begins=begins, ends=ends)


def is_shared(calendar: Calendar, at_ns: int) -> bool:
    """Return True if principals other than the owner may use a node at a moment."""
    local = datetime.datetime.fromtimestamp(at_ns // _SECOND_NS, calendar.zone)
    minute = local.hour * 60 + local.minute
    today, yesterday = local.weekday(), (local.weekday() - 1) % len(_WEEKDAYS)
    return not calendar.windows or any(
        (today in window.days and window.begins <= minute < window.ends)
        or (yesterday in window.days and minute + _DAY_MINUTES < window.ends)
        for window in calendar.windows
    )


def turns_at(calendar: Calendar, at_ns: int) -> int | None:
    """Return the time at which sharing next starts or stops, or None for never."""
    if not calendar.windows:
        return None
    now = is_shared(calendar, at_ns)
    for days in _AHEAD_DAYS:
        seconds, known = _seconds(calendar, at_ns // _SECOND_NS, days)
        for second in seconds:
            if second * _SECOND_NS > at_ns and is_shared(calendar, second * _SECOND_NS) != now:
                if second < known:
                    return second * _SECOND_NS
                break
    return None


def _seconds(calendar: Calendar, now: int, days: int) -> tuple[list[int], int]:
    """Return possible sharing changes in seconds, and the second up to which the list is complete.

    Sharing may change at the start or end of a window and at a clock change.
    """
    yesterday = datetime.datetime.fromtimestamp(now, calendar.zone).date() - datetime.timedelta(days=1)
    minutes = {minute % _DAY_MINUTES for window in calendar.windows for minute in (window.begins, window.ends)}
    found = {
        _second(yesterday + datetime.timedelta(days=number), minute, fold, calendar.zone)
        for number in range(days)
        for minute in minutes
        for fold in (0, 1)
    }
    found.update(_moved(calendar.zone, now, days))
    return sorted(found), _second(yesterday + datetime.timedelta(days=days - 1), 0, 0, calendar.zone)


def _second(day: datetime.date, minute: int, fold: int, zone: datetime.tzinfo) -> int:
    local = datetime.datetime(day.year, day.month, day.day, minute // 60, minute % 60, tzinfo=zone, fold=fold)
    return int(local.timestamp())


def _moved(zone: datetime.tzinfo, now: int, days: int) -> Iterator[int]:
    """Yield the seconds at which a zone's clock changes.

    The function does not find two clock changes that cancel each other out within a day.
    """
    for number in range(days):
        low, high = (now + (number + step) * _DAY_MINUTES * 60 for step in (0, 1))
        before = _offset(zone, low)
        if before == _offset(zone, high):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _offset(zone, middle) == before else (low, middle)
        yield high


def _offset(zone: datetime.tzinfo, second: int) -> datetime.timedelta | None:
    return datetime.datetime.fromtimestamp(second, zone).utcoffset()


def _is_times(word: str) -> bool:
    return ":" in word


def _parse_days(word: str, text: str) -> tuple[int, ...]:
    days: set[int] = set()
    for part in word.split(","):
        first, dash, last = part.partition("-")
        ends = [_parse_day(first, text), _parse_day(last if dash else first, text)]
        span = (ends[1] - ends[0]) % len(_WEEKDAYS)
        days |= {(ends[0] + number) % len(_WEEKDAYS) for number in range(span + 1)}
    return tuple(sorted(days))


def _parse_day(word: str, text: str) -> int:
    if word not in _WEEKDAYS:
        raise _bad(text, f"{word!r} is not one of {', '.join(_WEEKDAYS)}")
    return _WEEKDAYS.index(word)


def _parse_times(word: str, text: str) -> tuple[int, int]:
    match = _TIMES.fullmatch(word)
    if match is None:
        raise _bad(text, f"{word!r} is not a range of times")
    hour, minute, last_hour, last_minute = (int(digits) for digits in match.groups())
    begins, ends = hour * 60 + minute, last_hour * 60 + last_minute
    if minute > 59 or last_minute > 59 or begins >= _DAY_MINUTES or ends > _DAY_MINUTES:
        raise _bad(text, f"{word!r} is not within 00:00 to 24:00")
    if begins == ends:
        raise _bad(text, f"{word!r} is an empty range of times, so write only the days to share whole days")
    return begins, ends if ends > begins else ends + _DAY_MINUTES


def _ranges(days: Sequence[int]) -> Iterator[str]:
    first = 0
    for number, day in enumerate(days):
        if number + 1 == len(days) or days[number + 1] != day + 1:
            yield _WEEKDAYS[day] if first == number else f"{_WEEKDAYS[days[first]]}-{_WEEKDAYS[day]}"
            first = number + 1


def _clock(minute: int) -> str:
    return f"{minute // 60:02d}:{minute % 60:02d}"


def _bad(text: str, what: str) -> InvalidValue:
    return InvalidValue(f"{text!r} is not a valid window of a calendar: {what}", hint=_FORMS)
