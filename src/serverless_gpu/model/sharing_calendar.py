"""Calendars of nodes that people use themselves and share: "mon-fri 19:00-07:00", "sat-sun".

What counts is what a clock on the wall there shows. For the two days of a year on which it is moved no rule of its own
is needed: a window from 02:00 to 03:00 is not there when the clock goes from 02:00 to 03:00 at once, and is there
twice when the hour is. A window that ends before it begins ends on the next day.

Where the zone's rules come from is not decided here: a calendar has a `datetime.tzinfo`, as `zoneinfo` gives them.

Failure cases: a text that is no window is refused with the forms there are (`InvalidValue`).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence

import msgspec

from serverless_gpu.errors import InvalidValue

WINDOWS_MAX = 32
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY = 24 * 60
_NS = 1_000_000_000
_AHEAD_DAYS = (4, 17)  # looked at: mostly it is soon; a window comes every week, or two when a moved clock swallows one
_TIMES = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})", re.ASCII)
_FORMS = 'write days, times or both: "mon-fri 19:00-07:00", "sat-sun", "sat,sun 08:00-24:00", "22:00-06:00"'


class WeeklyWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a week."""

    days: tuple[int, ...]  # on which it begins, 0 for Monday
    begins: int = 0  # minutes since midnight
    ends: int = _DAY  # the same, more than `begins`; beyond 1440 on the next day

    @property
    def text(self) -> str:
        """Return it as it is written: `parse_window` reads that."""
        days = "" if len(self.days) == len(_DAYS) else ",".join(_ranges(self.days))
        ends = self.ends - _DAY if self.ends > _DAY else self.ends
        times = "" if (self.begins, self.ends) == (0, _DAY) else f"{_clock(self.begins)}-{_clock(ends)}"
        return f"{days} {times}".strip() or "mon-sun"


class Calendar(msgspec.Struct, frozen=True, kw_only=True):
    """The times at which a node is shared."""

    windows: tuple[WeeklyWindow, ...]  # the times; without any it always is
    zone: datetime.tzinfo  # whose time that is


def parse(texts: Sequence[str], zone: datetime.tzinfo) -> Calendar:
    """Return a calendar. Raises InvalidValue when a text is no window, or there are too many."""
    if len(texts) > WINDOWS_MAX:
        raise InvalidValue(f"a calendar has {len(texts)} windows", hint=f"{WINDOWS_MAX} at most")
    return Calendar(windows=tuple(parse_window(text) for text in texts), zone=zone)


def parse_window(text: str) -> WeeklyWindow:
    """Return what people write as ``"mon-fri 19:00-07:00"``."""
    words = text.lower().replace("–", "-").split()
    if not words or len(words) > 2:
        raise _bad(text, "it is neither days nor times")
    if len(words) == 2 or not _is_times(words[0]):
        days = _parse_days(words[0], text)
    else:
        days = tuple(range(len(_DAYS)))
    if len(words) == 1 and not _is_times(words[0]):
        return WeeklyWindow(days=days)
    begins, ends = _parse_times(words[-1], text)
    return WeeklyWindow(days=days, begins=begins, ends=ends)


def is_shared(calendar: Calendar, at_ns: int) -> bool:
    """Return whether others than its owner may use a node."""
    local = datetime.datetime.fromtimestamp(at_ns // _NS, calendar.zone)
    minute = local.hour * 60 + local.minute
    today, yesterday = local.weekday(), (local.weekday() - 1) % len(_DAYS)
    return not calendar.windows or any(
        (today in window.days and window.begins <= minute < window.ends)
        or (yesterday in window.days and minute + _DAY < window.ends)
        for window in calendar.windows
    )


def turns_at(calendar: Calendar, at_ns: int) -> int | None:
    """Return when a node changes hands next, nanoseconds since 1970; None when it does not."""
    if not calendar.windows:
        return None
    now = is_shared(calendar, at_ns)
    for days in _AHEAD_DAYS:
        seconds, known = _seconds(calendar, at_ns // _NS, days)
        for second in seconds:
            if second * _NS > at_ns and is_shared(calendar, second * _NS) != now:
                if second < known:
                    return second * _NS
                break
    return None


def _seconds(calendar: Calendar, now: int, days: int) -> tuple[list[int], int]:
    """Return when that may be: every end of a window, and when the clock is moved; and until when that is all."""
    yesterday = datetime.datetime.fromtimestamp(now, calendar.zone).date() - datetime.timedelta(days=1)
    minutes = {minute % _DAY for window in calendar.windows for minute in (window.begins, window.ends)}
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
    """Yield the seconds in which the zone's clock is moved; two that make up for each other in a day are not seen."""
    for number in range(days):
        low, high = (now + (number + step) * _DAY * 60 for step in (0, 1))
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
        span = (ends[1] - ends[0]) % len(_DAYS)
        days |= {(ends[0] + number) % len(_DAYS) for number in range(span + 1)}
    return tuple(sorted(days))


def _parse_day(word: str, text: str) -> int:
    if word not in _DAYS:
        raise _bad(text, f"{word!r} is none of {', '.join(_DAYS)}")
    return _DAYS.index(word)


def _parse_times(word: str, text: str) -> tuple[int, int]:
    match = _TIMES.fullmatch(word)
    if match is None:
        raise _bad(text, f"{word!r} is not from when to when")
    hour, minute, last_hour, last_minute = (int(digits) for digits in match.groups())
    begins, ends = hour * 60 + minute, last_hour * 60 + last_minute
    if minute > 59 or last_minute > 59 or begins >= _DAY or ends > _DAY:
        raise _bad(text, f"{word!r} is not on a clock from 00:00 to 24:00")
    if begins == ends:
        raise _bad(text, f"{word!r} is no time at all; days alone stand for all day")
    return begins, ends if ends > begins else ends + _DAY


def _ranges(days: Sequence[int]) -> Iterator[str]:
    first = 0
    for number, day in enumerate(days):
        if number + 1 == len(days) or days[number + 1] != day + 1:
            yield _DAYS[day] if first == number else f"{_DAYS[days[first]]}-{_DAYS[day]}"
            first = number + 1


def _clock(minute: int) -> str:
    return f"{minute // 60:02d}:{minute % 60:02d}"


def _bad(text: str, what: str) -> InvalidValue:
    return InvalidValue(f"{text!r} is no window of a calendar: {what}", hint=_FORMS)
