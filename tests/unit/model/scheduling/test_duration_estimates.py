"""How long a run is likely to take, from its like."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from serverless_gpu.model.scheduling.duration_estimates import SAMPLES_MAX, expected_s, over_after_s


@pytest.mark.parametrize(
    ("durations", "expected"),
    [
        ([], None),
        ([60.0, 60.0], None),
        ([60.0, 70.0, 50.0], 70.0),
        ([60.0, 70.0, 50.0, 9000.0, 55.0], 70.0),  # one of five hung
        ([10.0] * 16 + [100.0] * 4, 10.0),
        ([10.0] * 15 + [100.0] * 5, 100.0),
        ([10.0] * 20 + [9000.0] * 20, 10.0),  # what is long ago does not count
    ],
)
def test_the_duration_that_four_of_five_stayed_within(durations: list[float], expected: float | None) -> None:
    assert expected_s(durations) == expected


@pytest.mark.parametrize(
    ("elapsed", "expected", "limit", "over"),
    [
        (0.0, None, None, (None, False)),
        (5.0, None, 100.0, (100.0, True)),
        (5.0, 60.0, None, (60.0, False)),
        (60.0, 60.0, None, (120.0, False)),
        (130.0, 60.0, None, (240.0, False)),
        (130.0, 60.0, 200.0, (200.0, True)),
        (5.0, 60.0, 60.0, (60.0, True)),
        (5.0, 0.0, None, (None, False)),
    ],
)
def test_what_is_learned_counts_until_it_is_past_and_then_for_twice_as_long(
    elapsed: float, expected: float | None, limit: float | None, over: tuple[float | None, bool]
) -> None:
    assert over_after_s(elapsed, expected_s=expected, limit_s=limit) == over


@given(st.lists(st.floats(0.001, 1e7), min_size=3, max_size=60))
def test_at_least_four_of_five_of_those_that_count_are_over_by_then(durations: list[float]) -> None:
    expected = expected_s(durations)
    assert expected is not None
    newest = durations[:SAMPLES_MAX]
    assert sum(duration <= expected for duration in newest) >= 0.8 * len(newest) - 1e-9
    assert expected in newest


@given(st.floats(0, 1e8), st.floats(0.001, 1e6), st.one_of(st.none(), st.floats(0.001, 1e8)))
def test_nobody_is_expected_to_end_in_the_past_or_beyond_its_limit(
    elapsed: float, expected: float, limit: float | None
) -> None:
    over, is_bound = over_after_s(elapsed, expected_s=expected, limit_s=limit)
    assert over is not None
    assert over > elapsed or (is_bound and over == limit)
    assert limit is None or over <= limit
    assert is_bound == (over == limit)
