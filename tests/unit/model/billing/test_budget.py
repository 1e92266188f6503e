"""Windows, matching, what goes on and what it holds; whom a hard budget stops, and what may start."""

from __future__ import annotations

import datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.billing.budget import (
    CLOSED,
    FULL,
    NOTHING,
    Budget,
    BudgetUse,
    Period,
    Scope,
    ScopeKind,
    Spender,
    Standing,
    Subject,
    first_hold,
    goes_on_text,
    held,
    is_refused,
    judge,
    keys,
    may_start,
    used,
    warning_text,
    window,
)
from serverless_gpu.model.calendars import DAY_NS, format_day
from tests.support.golden import golden

NOW = 1_795_000_000_000_000_000  # 2026-11-18 15:06:40 UTC
SECOND = 1_000_000_000
HOUR_OF_ONE = 3_600_000_000  # micros: one unit a second
EVERYTHING = Scope(kind="everything")


def at(text: str) -> int:
    return round(datetime.datetime.fromisoformat(f"{text}+00:00").timestamp()) * SECOND


def money(limit: int, *, hard: bool = True, period: Period = Period.MONTH) -> Budget:
    return Budget(scope=EVERYTHING, period=period, limit_micros=limit * 1_000_000, hard=hard)


def spender(run_id: str = "a", *, used_s: float | None = 0.0, seen_s: float = 0.0, **changed: object) -> Spender:
    """Return an attempt that has run for so long, and was heard of so long ago."""
    started_ns = None if used_s is None else NOW - round((used_s + seen_s) * SECOND)
    usual = Spender(
        run_id=run_id,
        fence=1,
        gpus=2,
        micros_per_hour=HOUR_OF_ONE,
        placed_ns=NOW - round(((used_s or 0.0) + seen_s) * SECOND) - 1,
        started_ns=started_ns,
        seen_ns=NOW - round(seen_s * SECOND),
        grace_s=30.0,
        alone_s=900.0,
    )
    return msgspec.structs.replace(usual, **changed)


def standing_at(limit: int, use: int, hold: int = 0, *, hard: bool = True) -> Standing:
    budget = money(limit, hard=hard)
    within = window(budget.period, NOW)
    return Standing(
        budget=budget, window=within, used=BudgetUse(micros=use * 1_000_000), held=BudgetUse(micros=hold * 1_000_000)
    )


@pytest.mark.parametrize(
    ("period", "moment", "start", "end"),
    [
        (Period.DAY, "2026-11-18T15:06:40", "2026-11-18", "2026-11-19"),
        (Period.DAY, "2026-11-18T00:00:00", "2026-11-18", "2026-11-19"),
        (Period.WEEK, "2026-11-22T23:59:59", "2026-11-16", "2026-11-23"),  # a Sunday
        (Period.WEEK, "2026-11-23T00:00:00", "2026-11-23", "2026-11-30"),  # a Monday
        (Period.MONTH, "2026-12-31T23:59:59", "2026-12-01", "2027-01-01"),
        (Period.MONTH, "2028-02-29T12:00:00", "2028-02-01", "2028-03-01"),
        (Period.MONTH, "2027-01-31T12:00:00", "2027-01-01", "2027-02-01"),
    ],
)
def test_periods_are_of_utc(period: Period, moment: str, start: str, end: str) -> None:
    found = window(period, at(moment))
    assert (found.start_ns, found.end_ns) == (at(start), at(end))
    assert format_day(found.days[0]) == start and format_day(found.days[-1] + 1) == end


@given(st.sampled_from(Period), st.integers(0, 60 * 366 * DAY_NS))
def test_windows_follow_each_other_without_a_gap(period: Period, moment: int) -> None:
    found = window(period, moment)
    assert found.start_ns <= moment < found.end_ns
    assert window(period, found.start_ns) == window(period, found.end_ns - 1) == found
    assert window(period, found.end_ns).start_ns == found.end_ns


WHOSE = Subject(owner="alice", team="search", pool="fast", policy="night", tags={"project": "llm", "a=b": "c"})


@pytest.mark.parametrize(
    ("kind", "name", "counts"),
    [
        ("everything", "", True),
        ("user", "alice", True),
        ("user", "bob", False),
        ("user", "search", False),
        ("team", "search", True),
        ("team", "", False),
        ("pool", "fast", True),
        ("policy", "night", True),
        ("tag", "project=llm", True),
        ("tag", "project", True),
        ("tag", "project=", False),
        ("tag", "project=ll", False),
        ("tag", "llm", False),
        ("tag", "a=b=c", False),
        ("tag", "a=b", False),
    ],
)
def test_whose_use_counts(kind: ScopeKind, name: str, counts: bool) -> None:
    assert ((kind, name) in keys(WHOSE)) is counts
    if kind in ("team", "pool", "policy", "tag"):
        assert (kind, name) not in keys(Subject(owner="alice"))


def test_an_attempt_holds_a_minute_from_now_or_its_grace() -> None:
    within = window(Period.MONTH, NOW)
    assert used(spender(used_s=10), within) == BudgetUse(micros=10_000_000, gpu_ms=20_000)
    assert held(spender(used_s=10), NOW) == BudgetUse(micros=60_000_000, gpu_ms=120_000)
    assert held(spender(used_s=10, grace_s=100.0), NOW).micros == 115_000_000
    # What is placed and has not begun uses nothing, and holds the same.
    assert used(spender(used_s=None), within) == NOTHING
    assert held(spender(used_s=None), NOW).micros == 60_000_000
    # What was used since the last sign of life is held until it is known.
    assert held(spender(used_s=10, seen_s=7), NOW).micros == 67_000_000
    # A stop that was asked 20 s ago: the rest of its grace and 15 s; one that was asked long ago: until now.
    assert held(spender(used_s=10, stop_ns=NOW - 20 * SECOND), NOW).micros == 25_000_000
    assert held(spender(used_s=10, seen_s=100, stop_ns=NOW - 90 * SECOND), NOW).micros == 100_000_000
    # Nobody goes on for longer than that without an answer.
    assert held(spender(used_s=10, seen_s=5_000, alone_s=900.0), NOW).micros == 960_000_000
    assert held(spender(used_s=10, is_over=True), NOW) == NOTHING
    assert held(spender(used_s=10, micros_per_hour=None), NOW) == BudgetUse(gpu_ms=120_000, unpriced_ms=120_000)
    assert first_hold(100.0, gpus=2, micros_per_hour=HOUR_OF_ONE) == BudgetUse(micros=115_000_000, gpu_ms=230_000)


def test_only_what_was_used_in_the_period_counts() -> None:
    today = window(Period.DAY, NOW)
    since_s = (NOW - today.start_ns) / SECOND
    one = spender(used_s=since_s + 1_000)
    assert used(one, today).micros == (NOW - today.start_ns) // 1_000_000 * 1_000
    assert used(one, window(Period.DAY, today.start_ns - 1)).micros == 1_000_000_000
    assert used(one, window(Period.DAY, NOW + DAY_NS)) == NOTHING


def test_what_came_last_is_stopped_first() -> None:
    """Three that hold a minute each; there is enough for two."""
    three = [spender("a", used_s=30), spender("b", used_s=20), spender("c", used_s=10)]
    assert judge(money(60 + 180), NOTHING, three, NOW).stop == ()
    standing = judge(money(60 + 179), NOTHING, three, NOW)
    assert standing.stop == ("c",) and standing.reached == (80, 95, CLOSED) and standing.left == -1_000_000
    assert judge(money(60 + 120), NOTHING, three, NOW).stop == ("c",)
    assert judge(money(60 + 119), NOTHING, three, NOW).stop == ("b", "c")
    assert judge(money(60 + 59), NOTHING, three, NOW).stop == ("a", "b", "c")
    assert judge(money(60 + 119, hard=False), NOTHING, three, NOW).stop == ()
    assert judge(money(60 + 179), BudgetUse(micros=-5_000_000), three, NOW).stop == ()
    assert judge(money(100 + 179), BudgetUse(micros=45_000_000), three, NOW).stop == ("c",)


def test_who_is_on_the_way_out_keeps_what_it_holds_and_is_not_asked_again() -> None:
    leaving = spender("c", used_s=10, stop_ns=NOW)
    two = [spender("a", used_s=30), leaving]
    assert judge(money(40 + 104), NOTHING, two, NOW).stop == ("a",)
    assert judge(money(40 + 105), NOTHING, two, NOW).stop == ()


def test_what_costs_nothing_is_not_stopped_by_a_budget_of_money() -> None:
    free = spender("free", used_s=100, micros_per_hour=0)
    unpriced = spender("unpriced", used_s=100, micros_per_hour=None)
    standing = judge(money(1), BudgetUse(micros=5_000_000), [free, unpriced], NOW)
    assert standing.stop == () and standing.used.unpriced_ms == 200_000 and standing.reached == (80, 95, 100)
    hours = Budget(scope=EVERYTHING, period=Period.DAY, limit_gpu_ms=1, hard=True)
    assert judge(hours, NOTHING, [free, unpriced], NOW).stop == ("free", "unpriced")


def test_what_has_stopped_somebody_lets_nobody_in_until_it_is_another_one() -> None:
    closed = msgspec.structs.replace(standing_at(100, 10), is_closed=True)
    assert not may_start(closed, NOTHING) and is_refused(closed, NOTHING) and closed.reached == (CLOSED,)


def test_the_end_of_a_period_stops_nobody_for_money_of_the_next_one() -> None:
    end_ns = window(Period.DAY, NOW).end_ns
    late = end_ns - 10 * SECOND
    one = spender(used_s=30, seen_ns=late, started_ns=late - 30 * SECOND)
    day = money(40, period=Period.DAY)
    standing = judge(day, NOTHING, [one], late)
    assert standing.stop == () and standing.held.micros == 10_000_000 and standing.ahead.micros == 60_000_000
    assert not may_start(standing, NOTHING)  # the next day begins with what goes on, and has no room even for that
    assert judge(day, NOTHING, [one], end_ns + 1).stop == ("a",)
    on = msgspec.structs.replace(one, seen_ns=end_ns + 5 * SECOND)
    standing = judge(money(100, period=Period.DAY), BudgetUse(), [on], end_ns + 5 * SECOND)
    assert standing.used.micros == 5_000_000 and standing.stop == ()


@pytest.mark.parametrize(
    ("amounts", "hard", "starts", "refused"),
    [
        ((100, 30, 10, 60), True, True, False),
        ((100, 30, 11, 60), True, False, False),  # once something is given back, it fits
        ((100, 41, 0, 60), True, False, True),
        ((100, 100, 0, 0), True, False, True),
        ((100, 99, 0, 60), False, True, False),
        ((100, 99, 1, 60), False, False, False),
        ((100, 100, 0, 60), False, False, True),
        ((0, 0, 0, 0), False, False, True),
        ((100, 90, 20, 0), False, True, False),  # what costs nothing needs nothing
    ],
)
def test_what_may_start(amounts: tuple[int, int, int, int], hard: bool, starts: bool, refused: bool) -> None:
    """The limit, what is used and held, and what one more would hold."""
    limit, use, hold, wants = amounts
    standing = standing_at(limit, use, hold, hard=hard)
    asked = BudgetUse(micros=wants * 1_000_000)
    assert (may_start(standing, asked), is_refused(standing, asked)) == (starts, refused)


@pytest.mark.parametrize(
    ("use", "reached"), [(0, ()), (79, ()), (80, (80,)), (94, (80,)), (95, (80, 95)), (100, (80, 95, 100))]
)
def test_marks_are_reached_at_80_95_and_100_per_cent(use: int, reached: tuple[int, ...]) -> None:
    assert standing_at(100, use).reached == reached
    assert standing_at(100, use).percent == use
    assert standing_at(0, use).reached == (80, 95, 100)


# --- D6 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used_s", "longest_s", "grace_s", "seconds"),
    [
        (0, None, 30.0, 60),
        (0, 4.0, 30.0, 10),  # 1.25 × 4 s + 5 s
        (9, 4.0, 30.0, 1),
        (10, 4.0, 30.0, 60),  # it takes longer than the others: it holds as any other
        (0, 80.0, 30.0, 60),  # no more than a minute ahead
        (50, 80.0, 30.0, 55),
        (0, 4.0, 60.0, 10),
        (0, 4.0, 61.0, 76),  # a long grace is held in full
    ],
)
def test_22D6_a_run_holds_what_its_like_would_still_use(
    used_s: int, longest_s: float | None, grace_s: float, seconds: int
) -> None:
    one = spender(used_s=used_s, grace_s=grace_s, longest_s=longest_s)
    assert held(one, NOW).micros == seconds * 1_000_000
    if not used_s:
        first = first_hold(grace_s, gpus=1, micros_per_hour=HOUR_OF_ONE, longest_s=longest_s)
        assert first.micros == seconds * 1_000_000
        waits = msgspec.structs.replace(one, started_ns=None, placed_ns=NOW - 100 * SECOND)
        assert held(waits, NOW).micros == seconds * 1_000_000, "its start may take long, and is not used time"


def test_22D6_a_stop_that_was_asked_keeps_its_grace_whatever_was_learned() -> None:
    assert held(spender(used_s=9, longest_s=4.0, grace_s=30.0, stop_ns=NOW), NOW).micros == 45_000_000


@pytest.mark.parametrize(
    ("use", "hold", "hard", "reached"),
    [
        (10, 69, True, ()),
        (10, 70, True, (80,)),
        (10, 85, True, (80, 95)),
        (10, 85, False, ()),
        (100, 0, True, (80, 95, FULL)),
        (100, 0, False, (80, 95, FULL)),
    ],
)
def test_22D6_what_runs_hold_of_a_hard_budget_counts_for_a_warning(
    use: int, hold: int, hard: bool, reached: tuple[int, ...]
) -> None:
    assert standing_at(100, use, hold, hard=hard).reached == reached


def test_22D6_a_budget_that_stops_runs_is_closed_and_not_at_100_per_cent() -> None:
    standing = judge(money(20), NOTHING, [spender("a", used_s=4), spender("b", used_s=4)], NOW)
    assert standing.stop == ("a", "b") and standing.reached == (80, 95, CLOSED)
    standing = judge(money(100), NOTHING, [spender("a", used_s=4), spender("b", used_s=4)], NOW)
    assert standing.stop == ("b",) and standing.percent == 8.0
    said = warning_text("llm", standing, "USD", is_open=True)
    assert (
        "is closed" in said and "8.00 of 100.00 USD used" in said and "100 %" not in said and "1 run is stopped" in said
    )
    goes_on = goes_on_text("llm", standing, "USD", is_open=True)
    assert golden("server.budgets.one-goes") in goes_on
    assert "USD" not in goes_on_text("llm", standing, "USD", is_open=False)
    assert "80 % of budget 'llm'" in warning_text("llm", standing, "USD", is_open=True, mark=80)
