"""Forecasts, alarms, amounts by the hour, and what people read of a budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.billing import budget
from serverless_gpu.model.billing.budget import (
    Alarm,
    Budget,
    BudgetUse,
    Period,
    Scope,
    Standing,
    forecast,
    no_room_text,
    spread,
    stopped_text,
    unusual,
    used_text,
    warning_text,
    window,
)
from serverless_gpu.model.calendars import DAY_NS, HOUR_NS
from tests.support.golden import golden

DAY = 20_775  # 2026-11-18, a Wednesday
NOON = DAY * DAY_NS + DAY_NS // 2


def standing(limit: int, use: int, *, period: Period = Period.MONTH, hard: bool = True, stop: bool = False) -> Standing:
    budget = Budget(scope=Scope(kind="tag", name="project=llm"), period=period, limit_micros=limit, hard=hard)
    return Standing(
        budget=budget,
        window=window(period, NOON),
        used=BudgetUse(micros=use),
        held=BudgetUse(),
        stop=("a",) if stop else (),
    )


def test_a_forecast_goes_on_at_the_rate_of_the_last_days() -> None:
    by_day = {DAY - 8: 10**9, DAY - 3: 70, DAY: 35}  # 105 in three and a half days: 30 a day
    found = forecast(standing(1_000, 600), by_day, NOON)
    assert found.per_day == 30
    assert found.amount == 600 + 30 * 25 // 2  # twelve and a half days are left of November
    assert found.reached_ns is None
    assert found.basis == golden("model.forecasting.used-so-far")
    found = forecast(standing(900, 600), by_day, NOON)
    assert found.reached_ns == NOON + 10 * DAY_NS
    assert forecast(standing(600, 600), by_day, NOON).reached_ns == NOON


def test_a_forecast_of_nothing_is_nothing_and_of_one_day_is_of_today() -> None:
    assert forecast(standing(100, 0), {}, NOON) == budget.Forecast(
        amount=0, per_day=0, reached_ns=None, basis="used so far + use per day since midnight × days left"
    )
    found = forecast(standing(100, 30, period=Period.DAY), {DAY: 30}, NOON)
    assert (found.amount, found.per_day, found.reached_ns) == (60, 60, None)


def test_three_times_the_usual_is_an_alarm() -> None:
    past = [10, 0, 12, 8, 11, 9, 400]
    assert unusual(33, past, least=6) == Alarm(rate=33, usual=10, count=6)
    assert unusual(30, past, least=6) is None
    assert unusual(33, past, least=7) is None
    assert unusual(33, [], least=0) is None and unusual(33, [0], least=0) is None


@given(st.integers(-(10**15), 10**15), st.integers(0, 50 * HOUR_NS), st.integers(0, 25 * HOUR_NS))
def test_an_amount_is_spread_over_its_hours_and_nothing_of_it_is_lost(amount: int, start: int, length: int) -> None:
    found = spread(amount, start, start + length)
    assert sum(found.values()) == amount
    assert min(found) == start // HOUR_NS and max(found) == max(start, start + length - 1) // HOUR_NS
    assert all(part * amount >= 0 for part in found.values()) or abs(amount) < 100
    assert spread(-amount, start, start + length).keys() == found.keys()


@given(st.integers(0, 10**15), st.integers(0, 50 * HOUR_NS), st.integers(0, 25 * HOUR_NS))
def test_what_is_taken_back_is_taken_back_hour_by_hour_to_one(amount: int, start: int, length: int) -> None:
    there, back = spread(amount, start, start + length), spread(-amount, start, start + length)
    assert all(abs(there[hour] + back[hour]) <= 1 for hour in there)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            warning_text("llm", standing(10**8, 81_200_000), "USD", is_open=True),
            "budget 'llm' is at 81 % this month (81.20 of 100.00 USD used);"
            " at 100 % the server stops its runs, with their grace period for a checkpoint",
        ),
        (
            warning_text("llm", standing(10**8, 81_200_000, hard=False), "USD", is_open=False),
            "budget 'llm' is at 81 % this month; at 100 % no new run starts",
        ),
        (
            stopped_text("llm", standing(10**8, 100_020_000), "USD", is_open=True),
            "budget 'llm' is used up: 100.02 of 100.00 USD this month",
        ),
        (
            stopped_text("llm", standing(10**8, 99_000_000, stop=True), "USD", is_open=False),
            "the remaining amount of budget 'llm' this month does not cover the run's next minute",
        ),
        (
            no_room_text("llm", standing(10**8, 10**8)),
            "budget 'llm' is used up this month; the next period begins on 2026-12-01 (UTC)",
        ),
    ],
)
def test_what_people_read(said: str, text: str) -> None:
    assert said == text


def test_gpu_time_is_written_as_gpu_time() -> None:
    budget = Budget(scope=Scope(kind="everything"), period=Period.WEEK, limit_gpu_ms=360_000_000)
    told = Standing(
        budget=budget, window=window(Period.WEEK, NOON), used=BudgetUse(gpu_ms=291_600_000), held=BudgetUse()
    )
    assert used_text(told, "USD") == golden("model.forecasting.81-100-gpu")
