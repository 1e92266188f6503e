"""Quantities are exact integers, and each is written one way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu import units
from tests.support.golden import golden

COUNTS = st.integers(min_value=0, max_value=10**6)
TIMES = st.integers(min_value=0, max_value=10**12)
RATES = st.integers(min_value=0, max_value=10**12)


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (34, "34 ms"),
        (99, "99 ms"),
        (100, "0.1 s"),
        (349, "0.3 s"),
        (350, "0.4 s"),
        (59_949, "59.9 s"),
        (59_950, "1 min 00 s"),
        (185_000, "3 min 05 s"),
        (3_599_499, "59 min 59 s"),
        (3_599_500, "1 h 00 min"),
        (7_800_000, "2 h 10 min"),
        (360_000_000, "100 h 00 min"),
        (-400, "-0.4 s"),
    ],
)
def test_durations_are_written_in_the_unit_people_use(ms: int, text: str) -> None:
    assert units.format_duration_ms(ms) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (1_234_567_890, "1.2 GB"),
        (2 * 10**12, "2.0 TB"),
        (3 * 10**15, "3.0 PB"),
        (4 * 10**18, "4.0 EB"),
        (5 * 10**21, "5000.0 EB"),
        (-1_500, "-1.5 kB"),
    ],
)
def test_sizes_are_decimal(size: int, text: str) -> None:
    assert units.format_bytes(size) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 MiB"),
        ((1 << 30) - 1, "1023 MiB"),
        (1 << 30, "1.0 GiB"),
        (81_559 << 20, "79.6 GiB"),
        (-(80 << 30), "-80.0 GiB"),
    ],
)
def test_memory_of_gpus_is_as_nvidia_smi_has_it(size: int, text: str) -> None:
    assert units.format_gpu_memory(size) == text


@pytest.mark.parametrize(
    ("micros", "text"),
    [
        (0, "0.00 USD"),
        (1, "0.000001 USD"),
        (100, "0.0001 USD"),
        (9_999, "0.009999 USD"),
        (10_000, "0.01 USD"),
        (14_999, "0.01 USD"),
        (15_000, "0.02 USD"),
        (1_234_567, "1.23 USD"),
        (1_234_567_890_000, "1,234,567.89 USD"),
        (-2_500_000, "-2.50 USD"),
    ],
)
def test_money_has_cents_and_never_looks_free_when_it_is_not(micros: int, text: str) -> None:
    assert units.format_micros(micros, "USD") == text


def test_amounts_of_one_column_have_as_many_digits() -> None:
    for amounts, is_any in (((3_000_000, None, -1), True), ((3_000_000, 10_000, 0, None), False), ((), False)):
        assert units.is_any_below_cent(amounts) is is_any
    exact = [units.format_micros(micros, "USD", exact=True) for micros in (1_234_567_890_000, -8_319, 0)]
    assert exact == ["1,234,567.890000 USD", "-0.008319 USD", "0.000000 USD"]


@pytest.mark.parametrize(
    ("gpu_ms", "text"),
    [
        (0, "0.0 GPU-seconds"),
        (40, "0.040 GPU-seconds"),
        (99, "0.099 GPU-seconds"),
        (100, "0.1 GPU-seconds"),
        (12_345, "12.3 GPU-seconds"),
        (3_599_949, "3599.9 GPU-seconds"),
        (3_599_950, "1.0 GPU-hours"),
        (5_400_000, "1.5 GPU-hours"),
        (3_600_000_000 * 2, "2,000.0 GPU-hours"),
        (-12_345, "-12.3 GPU-seconds"),
    ],
)
def test_gpu_time_is_seconds_below_an_hour_and_hours_above(gpu_ms: int, text: str) -> None:
    assert units.format_gpu_ms(gpu_ms) == text


@pytest.mark.parametrize(
    ("gpu_ms", "text"),
    [(12_345, "12.3 CPU slot-seconds"), (40, "0.040 CPU slot-seconds"), (-5_400_000, "-1.5 CPU slot-hours")],
)
def test_time_of_what_is_no_gpu_is_not_called_so(gpu_ms: int, text: str) -> None:
    assert units.format_gpu_ms(gpu_ms, unit="CPU slot") == text


def test_gpu_milliseconds_are_gpus_times_milliseconds() -> None:
    assert units.gpu_milliseconds(8, 1_500) == 12_000
    assert units.gpu_milliseconds(0, 1_500) == 0


@pytest.mark.parametrize(("gpus", "ms"), [(-1, 5), (5, -1)])
def test_negative_gpu_time_is_refused(gpus: int, ms: int) -> None:
    with pytest.raises(ValueError) as refused:
        units.gpu_milliseconds(gpus, ms)
    assert str(refused.value) == golden("common.units.gpu-time-cannot", gpus=gpus, ms=ms)


@pytest.mark.parametrize(
    ("gpu_ms", "rate", "micros"),
    [
        (0, 2_990_000, 0),
        (3_600_000, 2_990_000, 2_990_000),
        (1, 1, 1),
        (3_600_000, 1, 1),
        (3_600_001, 1, 2),
        (1_800_000, 3, 2),
        (5, 0, 0),
        (10**15, 10**9, 277_777_777_777_777_778),
    ],
)
def test_a_cost_is_rounded_up_to_the_micro(gpu_ms: int, rate: int, micros: int) -> None:
    assert units.micros_for(gpu_ms, rate) == micros


@pytest.mark.parametrize(("gpu_ms", "rate"), [(-1, 5), (5, -1)])
def test_a_negative_cost_is_refused(gpu_ms: int, rate: int) -> None:
    with pytest.raises(ValueError) as refused:
        units.micros_for(gpu_ms, rate)
    assert str(refused.value) == golden("common.units.cost-cannot-negative", gpu_ms=gpu_ms, rate=rate)


@given(TIMES, RATES)
def test_a_cost_is_the_least_integer_that_covers_it(gpu_ms: int, rate: int) -> None:
    micros = units.micros_for(gpu_ms, rate)
    assert type(micros) is int
    assert (micros - 1) * units.MS_PER_HOUR < gpu_ms * rate <= micros * units.MS_PER_HOUR


@given(TIMES, TIMES, RATES)
def test_rounding_once_never_costs_more_than_rounding_parts(first_ms: int, second_ms: int, rate: int) -> None:
    whole = units.micros_for(first_ms + second_ms, rate)
    parts = units.micros_for(first_ms, rate) + units.micros_for(second_ms, rate)
    assert 0 <= parts - whole <= 1


@given(COUNTS, TIMES)
def test_gpu_time_is_exact(gpus: int, ms: int) -> None:
    assert units.gpu_milliseconds(gpus, ms) == gpus * ms


@given(st.integers())
def test_no_integer_is_too_strange_to_be_written(value: int) -> None:
    written = (
        units.format_duration_ms(value),
        units.format_bytes(value),
        units.format_gpu_memory(value),
        units.format_micros(value, "EUR"),
        units.format_gpu_ms(value),
    )
    assert all(text.isprintable() and text.startswith("-") == (value < 0) for text in written)


@given(st.integers(min_value=1, max_value=10**15))
def test_a_cost_is_never_written_as_nothing(micros: int) -> None:
    assert any(digit in "123456789" for digit in units.format_micros(micros, "USD"))


@pytest.mark.parametrize(
    ("joules", "text"),
    [
        (0, "0.0 Wh"),
        (1_080, "0.3 Wh"),
        (220_320, "61.2 Wh"),
        (359_900, "0.10 kWh"),
        (1_512_000, "0.42 kWh"),
        (44_280_000, "12.3 kWh"),
        (4_428_000_000, "1,230.0 kWh"),
    ],
)
def test_energy_reads_well(joules: float, text: str) -> None:
    assert units.format_joules(joules) == text
