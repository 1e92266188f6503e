"""Which failure explains the others: properties over any set of failures in any order."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.lifecycle.attempt import Attempt, Failure, Limits, Reason, root_cause

CRASHES = (Reason.RANK_SIGNAL, Reason.HOST_OOM)
failure = st.builds(
    Failure,
    rank=st.one_of(st.none(), st.integers(0, 3)),
    reason=st.sampled_from([Reason.RANK_RAISED, Reason.GPU_OOM, Reason.NO_RESULT, Reason.RUNTIME_LOST, *CRASHES]),
    at_ns=st.integers(0, 6),
    peer_lost=st.booleans(),
)
# One failure per rank and moment: between two of the same rank at the same nanosecond the first heard wins.
failures = st.lists(failure, max_size=6, unique_by=lambda f: (f.rank, f.at_ns)).map(tuple)
stop = st.one_of(st.none(), st.integers(0, 6))


def eligible(known: tuple[Failure, ...], stop_ns: int | None) -> list[Failure]:
    return [f for f in known if stop_ns is None or f.at_ns <= stop_ns or f.reason in CRASHES]


@given(failures, stop, st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(
    known: tuple[Failure, ...], stop_ns: int | None, generator: random.Random
) -> None:
    shuffled = list(known)
    generator.shuffle(shuffled)
    assert root_cause(tuple(shuffled), stop_ns) == root_cause(known, stop_ns)


@given(failures, stop)
def test_there_is_a_cause_exactly_when_there_is_a_failure(known: tuple[Failure, ...], stop_ns: int | None) -> None:
    cause = root_cause(known, stop_ns)
    assert (cause is None) == (not known)
    assert cause is None or cause in known


@given(failures, stop)
def test_a_lost_peer_explains_nothing_while_anything_else_does(known: tuple[Failure, ...], stop_ns: int | None) -> None:
    cause = root_cause(known, stop_ns)
    if cause is not None and cause.peer_lost:
        assert all(f.peer_lost for f in eligible(known, stop_ns) or known)


@given(failures, stop)
def test_consequences_never_win_over_what_happened_before_the_stop(
    known: tuple[Failure, ...], stop_ns: int | None
) -> None:
    before = eligible(known, stop_ns)
    if before:
        assert root_cause(known, stop_ns) in before


@given(failures, stop)
def test_the_first_in_time_wins_then_the_attempt_as_a_whole_then_the_lowest_rank(
    known: tuple[Failure, ...], stop_ns: int | None
) -> None:
    cause = root_cause(known, stop_ns)
    rivals = [f for f in eligible(known, stop_ns) or known if cause is not None and f.peer_lost == cause.peer_lost]
    if cause is not None:
        assert cause.at_ns == min(f.at_ns for f in rivals)
        rank = -1 if cause.rank is None else cause.rank
        assert rank == min(-1 if f.rank is None else f.rank for f in rivals if f.at_ns == cause.at_ns)


@given(failure, failure, stop)
def test_a_tie_is_won_by_the_first_heard(one: Failure, other: Failure, stop_ns: int | None) -> None:
    twin = Failure(rank=one.rank, reason=one.reason, at_ns=one.at_ns, peer_lost=one.peer_lost, detail=other.detail)
    assert root_cause((one, twin), stop_ns) is one


@given(failures, stop)
def test_the_cause_of_an_attempt_is_the_root_cause_of_its_failures(
    known: tuple[Failure, ...], stop_ns: int | None
) -> None:
    attempt = Attempt(run_id="r", fence=1, world_size=4, limits=Limits(), failures=known, stop_ns=stop_ns)
    assert attempt.cause == root_cause(known, stop_ns)
