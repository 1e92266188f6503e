"""Schedulers to compare with: tables by hand, and what holds for any jobs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serverless_gpu.replay import POLICIES, Cluster, Job, cluster_of
from serverless_gpu.replay.baselines import KEYS, Nodes, Spans, in_order, placed_again
from serverless_gpu.replay.figures import moments
from tests.support.replay.baselines import BLOCKED, CLUSTERS, JOBS, made

BASELINES = [policy for policy in POLICIES if policy != "ours"]


def replayed(jobs: list[Job], cluster: Cluster, policy: str) -> Spans:
    if policy in KEYS:
        return placed_again(jobs, cluster, KEYS[policy])
    return in_order(jobs, cluster, strict=policy == "fifo")


@pytest.mark.parametrize(
    ("policy", "spans"),
    [
        ("fifo", [[(0, 100)], [(100, 150)], [(150, 350)], [(150, 155)]]),
        ("first-fit", [[(0, 100)], [(202, 252)], [(2, 202)], [(100, 105)]]),
        # Seconds left at 1: 99 and 50; at 3: the one 5, the eight 48, the six 99; at 8: 48 and 94.
        ("srtf", [[(0, 1), (3, 8), (56, 150)], [(1, 3), (8, 56)], [(56, 256)], [(3, 8)]]),
        # GPU seconds left at 1: 594 and 400; at 3: 5, 384, 400, 594; at 8: the eight 384, the two 390.
        ("srsf", [[(0, 1), (56, 155)], [(1, 3), (8, 56)], [(3, 8), (56, 251)], [(3, 8)]]),
    ],
)
def test_four_jobs_on_eight_gpus(policy: str, spans: Spans) -> None:
    assert replayed(BLOCKED, cluster_of(1, 8), policy) == spans


def test_a_job_of_several_nodes_takes_whole_ones_and_a_part() -> None:
    nodes = Nodes(cluster_of(4, 8))
    assert nodes.take(3) == ((0, 3),)
    assert nodes.take(19) == ((1, 8), (2, 8), (0, 3))
    assert nodes.take(8) == ((3, 8),)
    assert nodes.take(3) is None
    assert nodes.take(2) == ((0, 2),)


def test_a_job_of_several_nodes_needs_whole_ones() -> None:
    nodes = Nodes(cluster_of(2, 8))
    nodes.take(1)
    assert nodes.take(10) == ((1, 8), (0, 2))
    nodes.empty()
    nodes.take(1)
    assert nodes.take(15) == ((1, 8), (0, 7))
    assert nodes.free == 0


def test_what_is_given_back_is_free_again() -> None:
    nodes = Nodes(cluster_of(2, 4))
    taken = nodes.take(6)
    assert taken is not None
    assert nodes.take(3) is None
    nodes.give(taken)
    assert (nodes.free, nodes.take(8)) == (8, ((0, 4), (1, 4)))


@settings(max_examples=60, deadline=None)
@given(JOBS, CLUSTERS, st.sampled_from(BASELINES))
def test_every_job_has_its_time_and_nobody_has_more_than_there_is(
    jobs: list[Job], cluster: Cluster, policy: str
) -> None:
    spans = replayed(jobs, cluster, policy)
    for job, had in zip(jobs, spans, strict=True):
        assert sum(ended - began for began, ended in had) == pytest.approx(job.duration_s)
        assert job.submit_s <= had[0][0]
        assert all(first[1] < second[0] for first, second in pairwise(had))
    assert all(0 <= moment.used <= cluster.gpus for moment in moments(jobs, spans))


@settings(max_examples=60, deadline=None)
@given(JOBS)
def test_fifo_starts_jobs_in_the_order_of_their_arrival(jobs: list[Job]) -> None:
    starts = [had[0][0] for had in replayed(jobs, cluster_of(2, 8), "fifo")]
    assert starts == sorted(starts)


@settings(max_examples=60, deadline=None)
@given(JOBS)
def test_first_fit_leaves_nothing_free_that_a_waiting_job_could_have(jobs: list[Job]) -> None:
    spans = replayed(jobs, cluster_of(1, 16), "first-fit")
    assert all(moment.smallest > 16 - moment.used for moment in moments(jobs, spans))


def test_22C_of_equals_the_one_that_was_ahead_before_comes_first() -> None:
    jobs = made((0, 13, 1), (0, 8, 2), (0, 5, 1))  # at 5 the first has 8 s left, as the second has
    assert replayed(jobs, cluster_of(1, 2), "srtf") == [[(0, 5), (13, 21)], [(5, 13)], [(0, 5)]]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 8), st.sampled_from([1, 1, 2, 3, 4])), min_size=1, max_size=14
    ),
    st.sampled_from(sorted(KEYS)),
)
def test_22C_equals_keep_the_order_of_the_previous_pass(rows: list[tuple[int, int, int]], policy: str) -> None:
    jobs = made(*((float(submit), float(duration), gpus) for submit, duration, gpus in rows))
    assert replayed(jobs, cluster_of(2, 2), policy) == sorted_again(jobs, cluster_of(2, 2), policy)


def sorted_again(jobs: list[Job], cluster: Cluster, policy: str) -> Spans:
    """Return what comes of one list of jobs that is sorted at each event, as the originals do it."""
    key, nodes = KEYS[policy], Nodes(cluster)
    left = [job.duration_s for job in jobs]
    spans: Spans = [[] for _ in jobs]
    runnable: list[int] = []
    began: dict[int, float] = {}
    coming, now = list(range(len(jobs))), 0.0
    while coming or runnable:
        ends = [at + left[place] for place, at in began.items()]
        now = min([jobs[place].submit_s for place in coming[:1]] + ends)
        for place, at in list(began.items()):
            left[place] -= now - at
            spans[place] = [*spans[place], (at, now)]
        runnable = [place for place in runnable if left[place]]
        while coming and jobs[coming[0]].submit_s <= now:
            runnable.append(coming.pop(0))
        runnable.sort(key=lambda place: key(jobs[place], left[place]))
        nodes.empty()
        began = {place: now for place in runnable if nodes.take(jobs[place].gpus) is not None}
    return [joined(each) for each in spans]


def joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans without the cuts at which nobody stopped."""
    found: list[tuple[float, float]] = []
    for begin, end in spans:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found
