"""Downsampling keeps peaks and gaps, and stays within its bounds."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.time_buckets import (
    BUCKETS_MAX,
    STEPS_MS,
    Band,
    Downsampled,
    Downsampler,
    step_ms,
    summary,
    thinned,
)

START_MS = 1_800_000_000_000
values = st.one_of(st.none(), st.floats(min_value=-1e12, max_value=1e12))
# Intervals and values: a clock can be set back, and a row can have any number of the two columns.
series = st.lists(st.tuples(st.integers(min_value=-3_000, max_value=90_000), values, values), min_size=1, max_size=120)


def table_of(rows: list[tuple[int, float | None, float | None]], step: int) -> Downsampled:
    downsampler, columns = Downsampler(step), (0, 1)
    for at_ms, first, second in timed(rows):
        downsampler.add(at_ms, columns, (first, second))
    return downsampler.result()


def timed(rows: list[tuple[int, float | None, float | None]]) -> list[tuple[int, float | None, float | None]]:
    at_ms, found = START_MS, []
    for interval, first, second in rows:
        at_ms += interval
        found.append((at_ms, first, second))
    return found


@given(series, st.sampled_from(STEPS_MS[:12]))
def test_every_peak_is_in_a_bucket_and_no_bucket_invents_one(
    rows: list[tuple[int, float | None, float | None]], step: int
) -> None:
    table = table_of(rows, step)
    for column, place in ((0, 1), (1, 2)):
        known = [value for row in timed(rows) if (value := row[place]) is not None]
        if not known:
            assert column not in table.bands
            continue
        band = table.bands[column]
        assert min(v for v in band.minimum if v is not None) == min(known)
        assert max(v for v in band.maximum if v is not None) == max(known)
        for low, mean, high in zip(band.minimum, band.mean, band.maximum, strict=True):
            assert (low is None) == (mean is None) == (high is None)
            if low is not None and mean is not None and high is not None:
                slack = 1e-9 * max(abs(low), abs(high), 1e-300)
                assert low - slack <= mean <= high + slack


@given(series, st.sampled_from(STEPS_MS[:12]))
def test_times_ascend_with_one_point_for_each_bucket(
    rows: list[tuple[int, float | None, float | None]], step: int
) -> None:
    table = table_of(rows, step)
    buckets = [at_ms // step for at_ms in table.times_ms]
    assert buckets == sorted(set(buckets))
    assert all(len(part) == len(buckets) for band in table.bands.values() for part in (band.minimum, band.mean))


@given(
    st.integers(min_value=0, max_value=1 << 50),
    st.integers(min_value=0, max_value=1 << 50),
    st.integers(min_value=1, max_value=BUCKETS_MAX),
)
def test_a_range_has_at_most_the_requested_buckets(start: int, length: int, buckets: int) -> None:
    step = step_ms(start, start + length, buckets)
    assert (start + length) // step - start // step < buckets


@given(series)
def test_a_longer_series_changes_no_bucket_before_its_last(
    rows: list[tuple[int, float | None, float | None]],
) -> None:
    # A live chart loads only the newest buckets again.
    rows = [(abs(interval) + 1, first, second) for interval, first, second in rows]
    whole, part = table_of(rows, 10_000), table_of(rows[:-1], 10_000)
    kept = [at_ms for at_ms in part.times_ms if at_ms // 10_000 < part.times_ms[-1] // 10_000] if part.times_ms else []
    assert list(whole.times_ms[: len(kept)]) == kept


def test_a_long_silence_is_a_gap_and_a_longer_interval_is_not() -> None:
    downsampler = Downsampler(1_000)
    times = [*range(0, 60_000, 1_000), *range(200_000, 260_000, 1_000), *range(262_000, 300_000, 2_000)]
    for at_ms in times:
        downsampler.add(START_MS + at_ms, (0,), (1.0,))
    table = downsampler.result()
    gaps = [at for at, value in zip(table.times_ms, table.bands[0].mean, strict=True) if value is None]
    assert gaps == [START_MS + 60_000]


def test_intervals_that_double_are_not_gaps() -> None:
    downsampler, at_ms = Downsampler(1_000), START_MS
    for doubling in range(9):
        for _ in range(5):
            downsampler.add(at_ms, (0,), (1.0,))
            at_ms += 1_000 << doubling
    assert None not in downsampler.result().bands[0].mean


def test_a_column_that_appears_later_has_no_values_before() -> None:
    downsampler = Downsampler(1_000)
    downsampler.add(START_MS, (0,), (1.0,))
    downsampler.add(START_MS + 1_000, (0, 1), (2.0, math.nan))
    downsampler.add(START_MS + 2_000, (1, 0), (5.0, 3.0))
    table = downsampler.result()
    assert table.bands[0].mean == (1.0, 2.0, 3.0)
    assert table.bands[1].mean == (None, None, 5.0)


@given(series, st.integers(min_value=1, max_value=60))
def test_a_thinner_table_keeps_the_peaks(rows: list[tuple[int, float | None, float | None]], count: int) -> None:
    table = table_of(rows, 1_000)
    thin = thinned(table, count)
    assert len(thin.times_ms) == min(count, len(table.times_ms))
    for column, band in table.bands.items():
        assert max(v for v in thin.bands[column].maximum if v is not None) == max(
            v for v in band.maximum if v is not None
        )


def test_the_summary_of_bands_counts_each_bucket_once() -> None:
    one = Band(minimum=(0.0, None, 2.0), mean=(1.0, None, 3.0), maximum=(2.0, None, 9.0))
    found = summary([one])
    assert found is not None
    assert (found.minimum, found.mean, found.maximum, found.last) == (0.0, 2.0, 9.0, 3.0)
    assert summary([Band(minimum=(None,), mean=(None,), maximum=(None,))]) is None
