"""When a node is shared, and when it changes hands."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import hypothesis.strategies as st
import pytest
from hypothesis import given

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.calendars import Calendar, WeeklyWindow, is_shared, parse_calendar, parse_window, turns_at

_BERLIN = ZoneInfo("Europe/Berlin")
_NIGHTS = ("mon-fri 19:00-07:00", "sat-sun")
_ZONES = [UTC, _BERLIN, ZoneInfo("America/New_York"), ZoneInfo("Asia/Kathmandu"), ZoneInfo("Australia/Lord_Howe")]


def at(text: str, zone: ZoneInfo | timezone = UTC, fold: int = 0) -> int:
    """Return nanoseconds since 1970 of a time as it is written, in a zone."""
    return int(datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold).timestamp()) * 1_000_000_000


def turn(texts: Sequence[str], now: int, zone: ZoneInfo | timezone = UTC) -> str:
    """Return when a node changes hands next, as a clock there shows it and by how far that is from UTC."""
    found = turns_at(parse_calendar(texts, zone), now)
    return "never" if found is None else datetime.fromtimestamp(found // 10**9, zone).isoformat()


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("mon-fri 19:00-07:00", WeeklyWindow(days=(0, 1, 2, 3, 4), begins=19 * 60, ends=31 * 60)),
        ("sat-sun", WeeklyWindow(days=(5, 6))),
        ("Sat,Sun 8:00-24:00", WeeklyWindow(days=(5, 6), begins=480, ends=1440)),
        ("22:00-06:00", WeeklyWindow(days=(0, 1, 2, 3, 4, 5, 6), begins=1320, ends=1800)),
        ("fri-mon", WeeklyWindow(days=(0, 4, 5, 6))),
        ("mon,wed-thu 00:00-00:30", WeeklyWindow(days=(0, 2, 3), begins=0, ends=30)),
        ("mon–fri 09:00–17:00", WeeklyWindow(days=(0, 1, 2, 3, 4), begins=540, ends=1020)),
        ("mon-sun", WeeklyWindow(days=(0, 1, 2, 3, 4, 5, 6))),
        ("tue 12:00-00:00", WeeklyWindow(days=(1,), begins=720, ends=1440)),
    ],
)
def test_windows_are_read_as_people_write_them_and_written_so_that_they_can_be_read(
    text: str, window: WeeklyWindow
) -> None:
    assert parse_window(text) == window
    assert parse_window(window.text) == window


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "a window needs days, times or both"),
        ("every night please", "a window needs days, times or both"),
        ("weekdays", "'weekdays' is not one of mon, tue, wed, thu, fri, sat, sun"),
        ("mon- 09:00-17:00", "'' is not one of mon"),
        ("mon 9-17", "'9-17' is not a range of times"),
        ("mon 09:00-25:00", "'09:00-25:00' is not within 00:00 to 24:00"),
        ("mon 09:61-10:00", "is not within 00:00"),
        ("24:00-08:00", "is not within 00:00"),
        ("mon 09:00-09:00", "is an empty range of times, so write only the days to share whole days"),
        ("09:00-17:00 mon", "'09:00' is not one of mon"),
    ],
)
def test_what_is_no_window_is_refused_with_what_would_be_one(text: str, what: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        parse_window(text)
    assert what in str(refused.value)
    assert '"mon-fri 19:00-07:00"' in str(refused.value.hint)


def test_a_calendar_has_a_bound() -> None:
    with pytest.raises(InvalidValue, match="33 windows"):
        parse_calendar(["sat"] * 33, UTC)


@pytest.mark.parametrize(
    ("now", "shared", "turns"),
    [
        ("2026-11-23 12:00", False, "2026-11-23T19:00:00+00:00"),  # a Monday
        ("2026-11-23 19:00", True, "2026-11-24T07:00:00+00:00"),
        ("2026-11-23 06:59", False, "2026-11-23T19:00:00+00:00"),  # Sunday's window ends at midnight
        ("2026-11-27 23:00", True, "2026-11-30T00:00:00+00:00"),  # Friday night goes on as the weekend
        ("2026-11-24 06:59", True, "2026-11-24T07:00:00+00:00"),
    ],
)
def test_nights_and_weekends(now: str, shared: bool, turns: str) -> None:
    assert is_shared(parse_calendar(_NIGHTS, UTC), at(now)) is shared
    assert turn(_NIGHTS, at(now)) == turns


def test_what_never_changes_has_no_turn() -> None:
    assert turns_at(Calendar(windows=(), zone=UTC), at("2026-11-23 12:00")) is None
    assert is_shared(Calendar(windows=(), zone=UTC), at("2026-11-23 12:00"))
    assert turn(["mon-sun"], at("2026-11-23 12:00")) == "never"
    assert turn(["06:00-18:00", "18:00-06:00"], at("2026-03-28 12:00"), _BERLIN) == "never"


def test_a_night_in_which_the_clock_goes_forward_is_an_hour_shorter() -> None:
    begins = at("2026-03-28 22:00", _BERLIN)
    ends = turns_at(parse_calendar(["22:00-06:00"], _BERLIN), begins)
    assert ends is not None
    assert (ends - begins) // 10**9 == 7 * 3600
    # What lies in the hour that there is not is not there, and what begins in it begins when it would be over.
    assert turn(["sun 02:00-03:00"], begins, _BERLIN) == "2026-04-05T02:00:00+02:00"
    assert turn(["sun 02:30-04:00"], begins, _BERLIN) == "2026-03-29T03:00:00+02:00"
    assert turn(["sun 01:00-02:30"], at("2026-03-29 01:30", _BERLIN), _BERLIN) == "2026-03-29T03:00:00+02:00"


def test_a_night_in_which_the_clock_goes_back_is_an_hour_longer_and_its_hour_is_there_twice() -> None:
    begins = at("2026-10-24 22:00", _BERLIN)
    ends = turns_at(parse_calendar(["22:00-06:00"], _BERLIN), begins)
    assert ends is not None
    assert (ends - begins) // 10**9 == 9 * 3600
    turns, now = [], begins
    for _ in range(4):
        found = turns_at(parse_calendar(["sun 02:00-02:30"], _BERLIN), now)
        assert found is not None
        turns.append(datetime.fromtimestamp(found // 10**9, _BERLIN).isoformat())
        now = found
    assert turns == [
        "2026-10-25T02:00:00+02:00",
        "2026-10-25T02:30:00+02:00",
        "2026-10-25T02:00:00+01:00",
        "2026-10-25T02:30:00+01:00",
    ]


_WINDOWS = st.lists(
    st.builds(
        lambda days, begins, long: WeeklyWindow(days=tuple(sorted(days)), begins=begins, ends=begins + long),
        st.sets(st.integers(0, 6), min_size=1),
        st.integers(0, 95).map(lambda quarter: quarter * 15),
        st.integers(1, 95).map(lambda quarter: quarter * 15),
    ),
    max_size=4,
)
_YEAR = st.integers(0, 366 * 24 * 60 - 1).map(lambda minute: at("2026-01-01 00:00") + minute * 60_000_000_000)
_MOVED = st.tuples(
    st.sampled_from(
        ["2026-03-08 07:00", "2026-03-29 01:00", "2026-04-04 15:00", "2026-10-25 01:00", "2026-11-01 06:00"]
    ),
    st.integers(-3000, 300),
).map(lambda found: at(found[0]) + found[1] * 60_000_000_000)


@given(_WINDOWS, st.sampled_from(_ZONES), st.one_of(_YEAR, _MOVED))
def test_until_it_turns_nothing_changes_and_then_it_does(windows: list[WeeklyWindow], zone: ZoneInfo, now: int) -> None:
    calendar = Calendar(windows=tuple(windows), zone=zone)
    shared = is_shared(calendar, now)
    turns = turns_at(calendar, now)
    quarter = 15 * 60 * 10**9
    until = turns if turns is not None else now + 8 * 86_400 * 10**9
    first = now - now % quarter + quarter
    assert all(is_shared(calendar, moment) == shared for moment in range(first, until, quarter))
    if turns is not None:
        assert turns > now
        assert is_shared(calendar, turns) != shared
        assert is_shared(calendar, turns - 1) == shared


@given(_WINDOWS, _YEAR)
def test_in_a_zone_whose_clock_stands_a_week_is_like_the_next(windows: list[WeeklyWindow], now: int) -> None:
    calendar = Calendar(windows=tuple(windows), zone=timezone(timedelta(hours=5, minutes=45)))
    week = 7 * 86_400 * 10**9
    turns, later = turns_at(calendar, now), turns_at(calendar, now + week)
    assert is_shared(calendar, now) == is_shared(calendar, now + week)
    assert (turns is None and later is None) or (turns is not None and later == turns + week)
    assert all(parse_window(window.text) == window for window in windows)
