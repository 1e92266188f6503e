"""Periods of a time zone: without a gap, as long as the zone's days are, and what of a charge lies in them."""

from __future__ import annotations

import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.billing.budget import Budget, Period, Scope, part_until, window
from serverless_gpu.model.calendars import DAY_NS, HOUR_NS, local_day, midnight_ns

BERLIN = ZoneInfo("Europe/Berlin")
ZONES = [datetime.UTC, BERLIN, *map(ZoneInfo, ("America/Sao_Paulo", "Pacific/Kiritimati", "Asia/Kathmandu"))]


def at(text: str) -> int:
    return round(datetime.datetime.fromisoformat(f"{text}+00:00").timestamp()) * 1_000_000_000


@pytest.mark.parametrize(
    ("period", "moment", "start", "end", "hours"),
    [
        (Period.DAY, "2026-03-29T12:00", "2026-03-28T23:00", "2026-03-29T22:00", 23),
        (Period.DAY, "2026-10-25T12:00", "2026-10-24T22:00", "2026-10-25T23:00", 25),
        (Period.DAY, "2026-11-22T22:59", "2026-11-21T23:00", "2026-11-22T23:00", 24),
        (Period.DAY, "2026-11-22T23:00", "2026-11-22T23:00", "2026-11-23T23:00", 24),
        (Period.WEEK, "2026-10-25T12:00", "2026-10-18T22:00", "2026-10-25T23:00", 169),
        (Period.MONTH, "2026-11-30T23:30", "2026-11-30T23:00", "2026-12-31T23:00", 744),
        (Period.MONTH, "2026-03-10T00:00", "2026-02-28T23:00", "2026-03-31T22:00", 743),
    ],
)
def test_22D6_periods_are_of_the_budgets_time_zone(
    period: Period, moment: str, start: str, end: str, hours: int
) -> None:
    found = window(period, at(moment), BERLIN)
    assert (found.start_ns, found.end_ns) == (at(start), at(end))
    assert found.end_ns - found.start_ns == hours * HOUR_NS


@given(st.sampled_from(Period), st.sampled_from(ZONES), st.integers(0, 60 * 366 * DAY_NS))
def test_22D6_windows_of_every_zone_follow_each_other_without_a_gap(
    period: Period, zone: datetime.tzinfo, moment: int
) -> None:
    found = window(period, moment, zone)
    assert found.start_ns <= moment < found.end_ns
    assert window(period, found.end_ns - 1, zone) == found == window(period, found.start_ns, zone)
    assert window(period, found.end_ns, zone).start_ns == found.end_ns
    assert found.start_ns // DAY_NS in found.days and (found.end_ns - 1) // DAY_NS in found.days


def test_22D6_a_day_whose_midnight_is_left_out_begins_with_its_first_moment() -> None:
    """Clocks in Brazil went from 23:59:59 to 01:00 on 2018-11-04."""
    zone = ZoneInfo("America/Sao_Paulo")
    day = local_day(at("2018-11-04T12:00"), zone)
    assert midnight_ns(day, zone) == at("2018-11-04T03:00")


@given(
    amount=st.integers(-(10**12), 10**12),
    gpus=st.integers(1, 64),
    took_ms=st.integers(0, 86_400_000),
    before_ms=st.integers(0, 3_600_000),
    cuts=st.lists(st.integers(-10, 100_000_000), min_size=2, max_size=5).map(sorted),
)
def test_22D6_parts_of_a_charge_add_up_to_it(
    amount: int, gpus: int, took_ms: int, before_ms: int, cuts: list[int]
) -> None:
    start, end = 0, (before_ms + took_ms) * 1_000_000
    parts = [part_until(amount, took_ms * gpus, gpus, start, end, cut * 1_000_000) for cut in cuts]
    assert sorted(parts, key=abs) == parts and all(0 <= abs(part) <= abs(amount) for part in parts)
    back = [part_until(-amount, -took_ms * gpus, gpus, start, end, cut * 1_000_000) for cut in cuts]
    assert [one + other for one, other in zip(parts, back, strict=True)] == [0] * len(cuts)
    assert part_until(amount, took_ms * gpus, gpus, start, end, end) == amount
    if took_ms:
        assert part_until(amount, took_ms * gpus, gpus, start, end, before_ms * 1_000_000) == 0, "it began after that"


def test_22D6_a_zone_that_is_not_there_any_more_is_utc() -> None:
    budget = Budget(scope=Scope(kind="everything"), period=Period.DAY, limit_micros=1, time_zone="Mars/Olympus")
    assert budget.zone is datetime.UTC
