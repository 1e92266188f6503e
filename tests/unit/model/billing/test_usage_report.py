"""What use is grouped by, over which days, who pays what, and what the figures mean."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model import calendars
from serverless_gpu.model.billing import usage_report
from serverless_gpu.model.billing.usage_report import Amounts, DayRange, ReportRow
from tests.support.model.usage import Account

HOUR_MS = 3_600_000


def group(*key: str, currency: str = "USD", **amounts: Any) -> ReportRow:
    return ReportRow(key=key, currency=currency, amounts=Amounts(**amounts))


def test_fields_are_read_as_they_are_written_and_others_are_refused() -> None:
    assert usage_report.parse_by("user, team,tag:stage,month") == ("user", "team", "tag:stage", "month")
    assert usage_report.parse_by("") == ()
    odd = ("tag:a,b", "tag:100%", 'tag:"', "tag:ü x", "day")
    assert usage_report.parse_by(usage_report.write_by(odd)) == odd
    for wrong in (
        "owner",
        "tag:",
        "tag",
        "runs",
        "user,user",
        "day,week,month,user,team,pool,policy",
        "tag:" + "x" * 257,
    ):
        with pytest.raises(InvalidValue):
            usage_report.parse_by(wrong)


def test_a_charge_is_in_the_group_of_its_account_its_run_and_its_day() -> None:
    day = usage_report.day_of("2026-11-22")
    by = ("user", "team", "pool", "policy", "gpu_type", "name", "environment", "run", "day", "week", "month", "tag:a")
    key = usage_report.key_of(by, Account(tags={"a": "1"}), run_id="r", day=day)
    assert key == (
        *("alice", "search", "lab", "nightly", "H100", "train", "e1", "r"),
        *("2026-11-22", "2026-W47", "2026-11", "1"),
    )
    assert usage_report.key_of(("tag:b",), Account(), run_id="r", day=day) == ("",)


@given(day=st.integers(0, 40_000))
def test_weeks_begin_on_monday_and_months_on_their_first(day: int) -> None:
    date = datetime.date(1970, 1, 1) + datetime.timedelta(days=day)
    year, week, _ = date.isocalendar()
    assert usage_report.label("week", calendars.week_of(day)) == f"{year}-W{week:02d}"
    assert usage_report.label("day", day) == date.isoformat() and usage_report.day_of(date.isoformat()) == day
    assert calendars.format_month(day) == f"{date.year}-{date.month:02d}"
    window = usage_report.month(calendars.format_month(day))
    assert window.from_day <= day < window.until_day
    assert calendars.date_of(window.from_day).day == calendars.date_of(window.until_day).day == 1


@given(first=st.integers(0, 30_000), length=st.integers(1, 800))
def test_the_months_of_a_window_cover_it_each_once(first: int, length: int) -> None:
    found = usage_report.months(DayRange(first, first + length))
    names = [name for _, name in found]
    assert len(set(names)) == len(names) and found[-1][0] >= first + length
    for day in (first, first + length // 2, first + length - 1):
        assert next(name for until, name in found if day < until) == calendars.format_month(day)


def test_days_that_are_none_are_refused() -> None:
    for text in ("2026-13", "2026", "11-2026", "2026-11-01", ""):
        with pytest.raises(InvalidValue, match="not a valid month"):
            usage_report.month(text)
    for text in ("2026-02-30", "yesterday", "22.11.2026"):
        with pytest.raises(InvalidValue, match="not a valid day"):
            usage_report.day_of(text)
    for window in (DayRange(10, 10), DayRange(11, 10), DayRange(-1, 3)):
        with pytest.raises(InvalidValue, match="ends before"):
            usage_report.checked(window)
    with pytest.raises(InvalidValue, match="at most"):
        usage_report.checked(DayRange(0, 10_000))


def test_no_price_and_a_price_are_a_price_and_nothing_priced_is_none() -> None:
    assert usage_report.added(Amounts(), Amounts()).micros is None
    assert usage_report.added(Amounts(micros=0), Amounts()).micros == 0
    assert usage_report.added(Amounts(micros=2, gpu_ms=1), Amounts(micros=3, gpu_ms=4)) == Amounts(micros=5, gpu_ms=5)


def test_currencies_are_never_added() -> None:
    groups = [group("a", micros=1), group("a", currency="EUR", micros=2), group("a", micros=4)]
    assert usage_report.together(groups) == [group("a", micros=5), group("a", currency="EUR", micros=2)]
    assert usage_report.totals(groups) == [group(micros=5), group(currency="EUR", micros=2)]


def test_a_report_has_periods_in_their_order_and_in_each_what_costs_most_first() -> None:
    groups = [group("2026-11", "a", micros=9), group("2026-10", "b"), group("2026-10", "a", micros=1)]
    assert [one.key for one in usage_report.in_order(groups, ("month", "user"))] == [
        ("2026-10", "a"),
        ("2026-10", "b"),
        ("2026-11", "a"),
    ]


def test_busy_seen_and_idle_are_what_their_formulas_say() -> None:
    amounts = Amounts(gpu_ms=1000, observed_ms=800, busy_ms=200, idle_ms=200)
    assert (amounts.busy, amounts.seen, amounts.idle) == (0.25, 0.8, 0.8)
    assert (Amounts().busy, Amounts().seen, Amounts().idle) == (None, None, None)


def test_teams_pay_and_users_without_one() -> None:
    groups = [
        group("search", "alice", micros=100, runs=1),
        group("search", "bob", micros=200, runs=2),
        group("", "carol", micros=300, runs=3),
        group("", "search", micros=1),  # a user who is called as a team is
        group("free", "dora", billed_ms=5),
    ]
    shares = usage_report.chargeback(groups)
    assert [(share.name, share.is_team, share.group.amounts.micros, share.part) for share in shares] == [
        ("search", True, 300, 4992),
        ("carol", False, 300, 4992),
        ("search", False, 1, 16),
        ("free", True, None, None),
    ]
    assert shares[0].group.amounts.runs == 3


@given(amounts=st.lists(st.integers(0, 10**15), min_size=1, max_size=40))
def test_parts_of_the_cost_add_up_to_all_of_it(amounts: list[int]) -> None:
    shares = usage_report.chargeback(group(f"team{at}", "x", micros=micros) for at, micros in enumerate(amounts))
    assert sum(share.group.amounts.micros or 0 for share in shares) == sum(amounts)
    parts = [share.part for share in shares if share.part is not None]
    assert sum(parts) == (10_000 if sum(amounts) else 0)
    for share in shares:
        if share.part is not None:
            exact = (share.group.amounts.micros or 0) * 10_000 / sum(amounts)
            assert abs(share.part - exact) < 1.001


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0.00"),
        (1, "<0.01"),
        (HOUR_MS, "1.00"),
        (HOUR_MS * 12345, "12,345.00"),
        (-HOUR_MS * 3 // 2, "-1.50"),
        (18_000, "0.01"),
    ],
)
def test_hours_never_look_like_nothing(ms: int, text: str) -> None:
    assert usage_report.time_in(usage_report.UNITS[0], ms) == text


def test_a_table_of_short_runs_is_in_minutes_or_seconds() -> None:
    names = [usage_report.unit_for(ms).name for ms in (HOUR_MS, HOUR_MS // 10, HOUR_MS // 10 - 1, 60_000, 59_999, 0)]
    assert names == ["hours", "hours", "minutes", "minutes", "seconds", "seconds"]
    assert usage_report.time_in(usage_report.unit_for(90_000), 90_000) == "1.50"
    assert usage_report.time_in(usage_report.unit_for(999), 999) == "1.00"


def test_money_is_exact() -> None:
    assert [usage_report.decimal(micros) for micros in (0, 1, -1, 12_345_678)] == [
        "0.000000",
        "0.000001",
        "-0.000001",
        "12.345678",
    ]
