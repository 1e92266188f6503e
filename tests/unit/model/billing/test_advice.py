"""How many GPUs to reserve: the rule against all sizes there are, and one small example by hand."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.billing.advice import (
    Curve,
    GpuRates,
    GpuUse,
    Mix,
    advise,
    best_slots,
    curve_of,
    formulas,
    mix,
    price,
)
from serverless_gpu.model.calendars import HOUR_NS
from tests.support.golden import golden

SPAN = 100


def use(start: int, end: int, gpus: int) -> GpuUse:
    return GpuUse(start_ns=start * HOUR_NS, end_ns=end * HOUR_NS, gpus=gpus)


def hour_uses() -> st.SearchStrategy[list[GpuUse]]:
    one = st.builds(
        lambda start, length, gpus: GpuUse(start_ns=start, end_ns=start + length, gpus=gpus),
        st.integers(-20, SPAN + 20),
        st.integers(0, SPAN),
        st.integers(0, 9),
    )
    return st.lists(one, max_size=12)


def rates() -> st.SearchStrategy[GpuRates]:
    return st.builds(
        lambda reserved, on_demand: GpuRates(reserved=reserved, on_demand=on_demand),
        st.integers(0, 40).map(lambda micros: micros * 100_000),
        st.integers(1, 40).map(lambda micros: micros * 100_000),
    )


def exact_cost(uses: list[GpuUse], told: GpuRates, slots: int) -> int:
    """Return a cost by looking at each nanosecond, in micros × ns per hour: nothing is rounded."""
    cost = 0
    for at_ns in range(SPAN):
        wanted = sum(each.gpus for each in uses if each.start_ns <= at_ns < each.end_ns)
        cost += slots * told.reserved + max(0, wanted - slots) * told.on_demand
    return cost


@given(hour_uses(), rates())
def test_no_other_size_costs_less_and_no_smaller_one_as_little(uses: list[GpuUse], told: GpuRates) -> None:
    curve = curve_of(uses, 0, SPAN)
    costs = [exact_cost(uses, told, slots) for slots in range(curve.peak + 3)]
    assert best_slots(curve, told) == costs.index(min(costs))


@given(hour_uses(), rates(), st.integers(0, 60))
def test_costs_are_those_of_each_moment_rounded_up_once(uses: list[GpuUse], told: GpuRates, slots: int) -> None:
    # An hour of these uses is 10^6 ns long, so that there is something to round.
    grown = [GpuUse(start_ns=each.start_ns * 10**6, end_ns=each.end_ns * 10**6, gpus=each.gpus) for each in uses]
    found = mix(curve_of(grown, 0, SPAN * 10**6), told, slots)
    exact = exact_cost(uses, told, slots) * 10**6
    assert 0 <= found.micros * HOUR_NS - exact < 2 * HOUR_NS
    assert 0 <= found.idle_micros <= found.reserved_micros


@given(hour_uses())
def test_the_curve_has_the_time_of_each_number_of_gpus(uses: list[GpuUse]) -> None:
    curve = curve_of(uses, 0, SPAN)
    wanted = [sum(each.gpus for each in uses if each.start_ns <= at < each.end_ns) for at in range(SPAN)]
    assert curve.peak == max(wanted)
    assert curve.used_ns == sum(wanted)
    for gpus in range(curve.peak + 2):
        assert curve.at_least_ns(gpus) == sum(each >= gpus for each in wanted)
        assert curve.beyond_ns(gpus) == sum(max(0, each - gpus) for each in wanted)


@given(hour_uses(), rates())
def test_advice_followed_when_something_changed_costs_no_less_than_the_best_then(
    uses: list[GpuUse], told: GpuRates
) -> None:
    advice = advise(curve_of(uses, 0, SPAN), told)
    assert [each.what.rsplit(" ", 2)[0] for each in advice.changed] == [
        *["reserved price"] * 2,
        *["on-demand price"] * 2,
        *["demand"] * 2,
    ]
    for each in advice.changed:
        assert each.best.micros <= each.advised.micros + 1  # each of two sums is rounded up
    paying = [slot for slot in advice.slots if slot.pays]
    assert (paying[-1].last if paying else 0) == advice.best.slots
    assert advice.best.micros <= min(advice.none.micros, advice.all_reserved.micros) + 1


def test_one_small_example() -> None:
    """10 hours: 2 GPUs for all of it, 4 more for 6 hours, 2 more for 1."""
    curve = curve_of([use(0, 10, 2), use(1, 7, 4), use(3, 4, 2)], 0, 10 * HOUR_NS)
    assert curve.levels == ((2, 4 * HOUR_NS), (6, 5 * HOUR_NS), (8, 1 * HOUR_NS))
    advice = advise(curve, GpuRates(reserved=1_000_000, on_demand=2_000_000), gpu_type="H100", now=8)
    assert advice.duty_percent == 50.0
    assert [(slot.first, slot.last, slot.share_percent, slot.pays) for slot in advice.slots] == [
        (1, 2, 100.0, True),
        (3, 6, 60.0, True),
        (7, 8, 10.0, False),
    ]
    # 60 reserved hours of which 20 + 24 work, and 2 hours on demand.
    assert advice.best == Mix(
        slots=6,
        reserved_micros=60_000_000,
        idle_micros=16_000_000,
        idle_ns=16 * HOUR_NS,
        on_demand_micros=4_000_000,
        on_demand_ns=2 * HOUR_NS,
        duty_percent=100 * 44 / 60,
    )
    assert [each.micros for each in (advice.best, advice.now, advice.none, advice.all_reserved)] == [
        64_000_000,
        80_000_000,
        92_000_000,
        80_000_000,
    ]
    assert {each.what: each.best.slots for each in advice.changed} == {
        "reserved price −20 %": 6,
        "reserved price +20 %": 2,  # 60 % of the time is not more than 60 %
        "on-demand price −20 %": 2,
        "on-demand price +20 %": 6,
        "demand −20 %": 5,
        "demand +20 %": 7,
    }
    told = formulas(advice)
    assert told["break-even duty"] == golden("model.advice.reserved-price-demand")
    assert told["mean demand"] == "GPU-hours ÷ hours = 46.0 ÷ 10.0 = 4.60"
    assert told["reserved"] == golden("model.advice.gpus-hours-reserved")
    assert told["pays"].endswith("slot 6 60.0 %, slot 7 10.0 %")


def test_nothing_that_was_wanted_is_nothing_to_reserve() -> None:
    advice = advise(curve_of([], 0, HOUR_NS), GpuRates(reserved=1, on_demand=2))
    assert (advice.best.slots, advice.best.micros, advice.best.duty_percent, advice.slots) == (0, 0, None, ())


def test_a_reserved_gpu_that_is_free_pays_whenever_it_is_wanted() -> None:
    curve = curve_of([use(0, 1, 3)], 0, 10 * HOUR_NS)
    assert best_slots(curve, GpuRates(reserved=0, on_demand=1)) == 3
    assert best_slots(curve, GpuRates(reserved=2, on_demand=1)) == 0


def test_what_cannot_be_looked_at() -> None:
    with pytest.raises(InvalidValue, match="the time range is empty"):
        curve_of([], 5, 5)
    curve = curve_of([use(0, 1, 1)], 0, HOUR_NS)
    for told in (GpuRates(reserved=-1, on_demand=1), GpuRates(reserved=1, on_demand=0)):
        with pytest.raises(InvalidValue, match=re.escape(golden("model.advice.prices-more"))):
            advise(curve, told)
    with pytest.raises(InvalidValue, match=re.escape(golden("model.advice.gpus-cannot-reserved"))):
        mix(curve, GpuRates(reserved=1, on_demand=1), -1)


def test_too_many_uses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serverless_gpu.model.billing.advice._USES_MAX", 2)
    with pytest.raises(InvalidValue, match=re.escape(golden("model.advice.more-uses-cannot"))):
        curve_of([use(0, 1, 1)] * 3, 0, HOUR_NS)


def test_demand_that_is_less_loses_what_is_below_half_a_gpu() -> None:
    curve = Curve(span_ns=10, levels=((1, 4), (2, 3), (10, 1)))
    assert curve.scaled(40).levels == ((1, 3), (4, 1))
    assert curve.scaled(100) == curve
    assert msgspec.structs.replace(curve, levels=()).scaled(120).levels == ()


@pytest.mark.parametrize(
    ("micros", "text"), [(1_900_000, "1.90"), (0, "0.00"), (34_275, "0.034275"), (1_234_500_000, "1,234.50")]
)
def test_a_price_has_as_many_digits_as_it_has(micros: int, text: str) -> None:
    assert price(micros) == text
