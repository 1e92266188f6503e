"""Two hours of a GPU's values: peaks stay, memory is fixed, and unknown values stay unknown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.device_history import BUCKET_S, BUCKETS, SERIES, DeviceHistory
from serverless_gpu.model.telemetry import GpuSample

S = 1_000_000_000
T0 = 1_900_000_000 // BUCKET_S * BUCKET_S * S
TIMES = st.lists(st.tuples(st.integers(0, 3 * 3600), st.floats(0, 100)), min_size=1, max_size=60)


@given(TIMES)
def test_each_bucket_of_the_last_two_hours_has_the_highest_value(beats: list[tuple[int, float]]) -> None:
    history, beats = DeviceHistory(), sorted(beats)
    for second, busy in beats:
        history.add(GpuSample(busy_percent=busy), wall_ns=T0 + second * S)
    now_s = T0 // S + beats[-1][0]
    expected: dict[int, float] = {}
    for second, busy in beats:
        at_s = (T0 // S + second) // BUCKET_S * BUCKET_S
        if at_s > now_s // BUCKET_S * BUCKET_S - BUCKETS * BUCKET_S:
            expected[at_s] = max(busy, expected.get(at_s, 0.0))
    points = history.points(wall_ns=now_s * S)
    assert {point.at_s: point.values[0] for point in points if point.values[0] is not None} == expected
    assert len(points) <= BUCKETS
    assert [point.at_s for point in points] == sorted(point.at_s for point in points)


def test_a_gap_has_unknown_values_and_old_values_are_gone() -> None:
    history = DeviceHistory()
    history.add(GpuSample(busy_percent=10, power_watts=300), wall_ns=T0)
    history.add(GpuSample(busy_percent=20), wall_ns=T0 + 3 * BUCKET_S * S)
    points = history.points(wall_ns=T0 + 3 * BUCKET_S * S)
    assert [point.values[0] for point in points] == [10, None, None, 20]
    assert points[-1].values[SERIES.index("power_watts")] is None
    assert history.points(wall_ns=T0 + BUCKETS * BUCKET_S * 2 * S) == []


def test_an_older_sample_and_a_value_that_is_no_number_change_nothing() -> None:
    history = DeviceHistory()
    history.add(GpuSample(busy_percent=10), wall_ns=T0 + BUCKETS * BUCKET_S * S)
    history.add(GpuSample(busy_percent=99), wall_ns=T0)
    history.add(GpuSample(busy_percent=float("nan")), wall_ns=T0 + BUCKETS * BUCKET_S * S)
    points = history.points(wall_ns=T0 + BUCKETS * BUCKET_S * S)
    assert [point.values[0] for point in points] == [10]
