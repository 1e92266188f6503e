"""The token bucket: so much at once, so much a second, in long runs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.node.base.token_bucket import TokenBucket

S = 1_000_000_000


def bucket(resume: int = 1) -> TokenBucket:
    return TokenBucket(per_s=100, burst=250, resume=resume, now_ns=5 * S)


def test_a_burst_passes_at_once_and_then_only_what_the_rate_allows() -> None:
    made = bucket()
    assert [made.take(200, 5 * S), made.take(200, 5 * S), made.take(1, 5 * S)] == [200, 50, 0]
    assert [made.take(200, 6 * S), made.take(200, 6 * S)] == [100, 0]
    assert made.take(1000, 60 * S) == 250, "it holds no more than a burst"


def test_an_empty_one_stays_closed_until_enough_has_gathered() -> None:
    made = bucket(resume=100)
    assert made.take(251, 5 * S) == 250
    assert (made.is_open(5 * S + S // 2), made.take(10, 5 * S + S // 2)) == (False, 0)
    assert (made.is_open(6 * S), made.take(10, 6 * S), made.take(90, 6 * S)) == (True, 10, 90)


def test_taking_all_of_it_does_not_close_it() -> None:
    made = bucket(resume=100)
    assert made.take(250, 5 * S) == 250
    assert made.take(1, 5 * S + S // 10) == 1


def test_no_rounding_is_lost_between_many_looks() -> None:
    made = bucket()
    made.take(250, 5 * S)
    assert sum(made.take(1, 5 * S + step * 1_000_000) for step in range(1, 1001)) == 100


def test_a_clock_that_goes_back_gives_nothing() -> None:
    made = bucket()
    made.take(250, 5 * S)
    assert (made.take(1, 4 * S), made.take(1, 5 * S)) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 3 * S), st.integers(0, 500)), max_size=50), st.integers(1, 300))
def test_never_more_than_the_burst_and_the_rate(steps: list[tuple[int, int]], resume: int) -> None:
    made, now_ns, taken = bucket(resume), 5 * S, 0
    for passed_ns, wanted in steps:
        now_ns += passed_ns
        given_now = made.take(wanted, now_ns)
        assert 0 <= given_now <= wanted
        taken += given_now
        assert taken <= 250 + (now_ns - 5 * S) * 100 // S
