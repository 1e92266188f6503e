"""The scheduler, driven by a trace: every job has its time, nobody has more than there is; gangs of real traces."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.scheduling.values import BEST_EFFORT, CRITICAL, NORMAL, Pool, QueuePolicy
from serverless_gpu.replay import (
    POLICIES,
    Cluster,
    Job,
    Machine,
    Settings,
    Trace,
    cluster_of,
    generate,
    read_trace,
    simulate,
)
from serverless_gpu.replay import trace_of as in_order
from serverless_gpu.replay.figures import moments
from serverless_gpu.replay.simulation import Durations
from tests.support.golden import golden
from tests.support.replay.baselines import CLUSTERS, JOBS, made
from tests.support.replay.real import TRACES, needs_traces


def test_who_fits_starts_at_once_and_who_does_not_when_there_is_room() -> None:
    outcome = simulate(in_order(made((5, 100, 6), (6, 50, 4), (7, 200, 2))), cluster_of(1, 8), "ours")
    assert outcome.spans == [[(5, 105)], [(105, 155)], [(7, 207)]]


def test_the_same_trace_gives_the_same_outcome() -> None:
    trace, cluster = generate(300, gpus=32, load=1.1), cluster_of(4, 8)
    assert simulate(trace, cluster, "ours").spans == simulate(trace, cluster, "ours").spans


def test_a_gang_of_several_nodes_waits_for_whole_ones() -> None:
    jobs = made((0, 10, 1), (1, 10, 16))
    assert simulate(in_order(jobs), cluster_of(2, 8), "ours").spans == [[(0, 10)], [(10, 20)]]
    assert simulate(in_order(jobs), cluster_of(3, 8), "ours").spans == [[(0, 10)], [(1, 11)]]


def test_declared_durations_let_small_jobs_into_the_gap_before_a_gang() -> None:
    # One GPU is free until 100, when eight are wanted at once; of two jobs that want it one is over by then.
    jobs = made((0, 100, 7), (1, 50, 8), (2, 200, 1), (3, 90, 1))
    known = Settings(durations="known")
    assert simulate(in_order(jobs), cluster_of(1, 8), "ours", settings=known).spans == [
        [(0, 100)], [(100, 150)], [(150, 350)], [(3, 93)],
    ]  # fmt: skip


def test_what_earlier_jobs_of_a_name_took_lets_the_next_into_the_gap() -> None:
    def job(name: str, submit: float, duration: float, gpus: int) -> Job:
        return Job(job_id=name, name=name, user="alice", submit_s=submit, duration_s=duration, gpus=gpus)

    short = [job("eval", at, 60, 1) for at in (0, 100, 200)]
    long = [job("train", 1_000 * n, 900, 8) for n in range(1, 4)]
    # At 5,000 eight are taken, likely until 5,900; sixteen are wanted. An eval is over by then; who knows of the last?
    jobs = [
        *short,
        *long,
        job("train", 5_000, 900, 8),
        job("big", 5_001, 50, 16),
        job("eval", 5_002, 60, 1),
        job("", 5_003, 60, 7),
    ]
    spans = {
        at: simulate(in_order(jobs), cluster_of(2, 8), "ours", settings=Settings(durations=at)).spans
        for at in ("learned", "unknown")
    }
    assert spans["learned"][-3:] == [[(5_900, 5_950)], [(5_002, 5_062)], [(5_950, 6_010)]]
    assert spans["unknown"][-2:] == [[(5_002, 5_062)], [(5_003, 5_063)]]


def test_preemption_makes_room_for_who_has_more_right_and_the_job_goes_on_later() -> None:
    low = Job(job_id="low", submit_s=0, duration_s=10_000, gpus=8, priority=BEST_EFFORT)
    high = Job(job_id="high", submit_s=5_000, duration_s=100, gpus=8, priority=CRITICAL)
    told = Settings(preemption=True)
    outcome = simulate(in_order([low, high]), cluster_of(1, 8), "ours", settings=told)
    assert outcome.spans == [[(0, 5_000), (5_100, 10_100)], [(5_000, 5_100)]]
    assert outcome.figures.preemptions == 1
    assert simulate(in_order([low, high]), cluster_of(1, 8), "ours").figures.preemptions == 0


def test_a_reserved_pool_is_for_those_who_name_it() -> None:
    cluster = Cluster(
        machines=(Machine(name="a", gpus=4, pool="research"), Machine(name="b", gpus=4)),
        pools=(Pool(name="research", reserved=True),),
    )
    jobs = [Job(job_id=str(n), submit_s=n, duration_s=10, gpus=4, pool="research" * (n > 1)) for n in range(3)]
    assert simulate(in_order(jobs), cluster, "ours").spans == [[(0, 10)], [(10, 20)], [(2, 12)]]


def test_a_reserved_pool_lends_to_who_can_leave_and_gets_it_back() -> None:
    cluster = Cluster(
        machines=(Machine(name="a", gpus=4, pool="research"), Machine(name="b", gpus=4)),
        pools=(Pool(name="research", reserved=True, lends=True),),
    )
    guests = [
        Job(job_id=str(n), submit_s=0, duration_s=100, gpus=4, priority=BEST_EFFORT, preemptible=True) for n in range(2)
    ]
    own = Job(job_id="own", submit_s=30, duration_s=20, gpus=4, pool="research")
    spans = simulate(in_order([*guests, own]), cluster, "ours").spans
    assert spans[2] == [(30, 50)]
    assert sorted(map(len, spans)) == [1, 1, 2]


def test_who_can_never_be_placed_is_left_out_with_the_reason() -> None:
    cluster = Cluster(
        machines=(
            Machine(name="a", gpus=4, gpu_type="H100", pool="research"),
            Machine(name="b", gpus=2, gpu_type="A10"),
        ),
        pools=(Pool(name="research", reserved=True),),
    )
    asked = [(4, "A10", ""), (2, "A10", ""), (1, "L4", ""), (1, "H100", ""), (4, "", "research"), (2, "", "gone")]
    jobs = [
        Job(job_id=str(place), submit_s=0, duration_s=5, gpus=gpus, gpu_type=gpu_type, pool=pool)
        for place, (gpus, gpu_type, pool) in enumerate(asked)
    ]
    for policy in ("first-fit", "ours"):
        outcome = simulate(in_order(jobs), cluster, policy)
        assert outcome.impossible == {
            "that need more GPUs than the cluster has": 1,
            "that need L4, which the cluster does not have": 1,
            "that need H100, which the cluster does not have": 1,
        }


def test_nobody_names_the_only_pool() -> None:
    cluster = Cluster(machines=(Machine(name="a", gpus=4, pool="p"),), pools=(Pool(name="p", reserved=True),))
    with pytest.raises(InvalidValue, match=re.escape(golden("replay.driving.name-reserved-pool"))):
        simulate(in_order(made((0, 1, 1))), cluster, "ours")


def test_times_that_are_very_long_are_no_reason_to_lose_a_job() -> None:
    jobs = made((0, 1e14, 2), (9e14, 1e14, 2))
    for policy in POLICIES:
        assert simulate(in_order(jobs), cluster_of(1, 2), policy).unserved == 0


def test_after_a_stop_only_the_rest_is_declared() -> None:
    # 6,000 s of the first are left when it goes on at 4,100: the eight are promised 10,100, and only one fits before.
    low = Job(job_id="low", submit_s=0, duration_s=10_000, gpus=6, priority=BEST_EFFORT)
    high = Job(job_id="high", submit_s=4_000, duration_s=100, gpus=8, priority=CRITICAL)
    jobs = [low, high, *made((4_200, 10, 8), (4_201, 5_890, 1), (4_202, 5_910, 1))]
    outcome = simulate(in_order(jobs), cluster_of(1, 8), "ours", settings=Settings(durations="known", preemption=True))
    assert outcome.spans[0] == [(0, 4_000), (4_100, 10_100)]
    assert outcome.spans[2] == [(10_100, 10_110)]
    assert outcome.spans[3:] == [[(4_201, 10_091)], [(10_110, 16_020)]]


def test_shares_of_teams_hold_under_overload() -> None:
    jobs = [
        Job(job_id=f"{n}{team}", submit_s=60 * n, duration_s=3_600, gpus=2, team=team, user=team)
        for n in range(1_000)
        for team in ("search", "vision")
    ]
    cluster = msgspec.structs.replace(cluster_of(4, 8), teams={"search": 70, "vision": 30})
    teams = simulate(in_order(jobs), cluster, "ours").figures.teams
    assert teams == pytest.approx({"search": 0.7, "vision": 0.3}, abs=0.02)
    told = Settings(scheduling=QueuePolicy(team_weights={"search": 30, "vision": 70}))
    assert simulate(in_order(jobs), cluster, "ours", settings=told).figures.teams["vision"] == pytest.approx(
        0.7, abs=0.02
    )


def test_how_far_it_is_is_told() -> None:
    told: list[tuple[int, int]] = []
    simulate(
        generate(1_200, gpus=64), cluster_of(8, 8), "ours", progress=lambda done, total: told.append((done, total))
    )
    assert told == [(500, 1_200), (1_000, 1_200)]


CLASSES = st.lists(st.sampled_from([CRITICAL, NORMAL, BEST_EFFORT]), min_size=25, max_size=25)


@settings(max_examples=80, deadline=None)
@given(JOBS, CLASSES, CLUSTERS, st.sampled_from(["unknown", "learned", "known"]), st.booleans())
def test_every_job_has_its_time_and_nobody_has_more_than_there_is(
    jobs: list[Job], classes: list[int], cluster: Cluster, durations: Durations, preemption: bool
) -> None:
    told = Settings(durations=durations, preemption=preemption, scheduling=QueuePolicy(preempt_after_s=3))
    placed = (msgspec.structs.replace(job, priority=each) for job, each in zip(jobs, classes, strict=False))
    outcome = simulate(Trace(jobs=tuple(placed)), cluster, "ours", settings=told)
    assert (outcome.unserved, len(outcome.jobs)) == (0, len(jobs))
    for job, had in zip(outcome.jobs, outcome.spans, strict=True):
        assert sum(ended - began for began, ended in had) == pytest.approx(job.duration_s)
        assert job.submit_s <= had[0][0]
        assert len(had) <= 1 + QueuePolicy().preemptions_max
    assert all(0 <= moment.used <= cluster.gpus for moment in moments(outcome.jobs, outcome.spans))


@needs_traces
@pytest.mark.parametrize(("name", "gpus"), [("cluster04", 600), ("cluster04", 512), ("cluster02", 128)])
def test_on_real_traces_gangs_wait_no_longer_than_with_first_fit(name: str, gpus: int) -> None:
    trace = read_trace(TRACES / "microsoft_itp_2021.parquet", {"cluster": name})
    cluster = cluster_of(gpus // 8, 8).as_sum()
    first_fit, ours = (simulate(trace, cluster, policy).figures for policy in ("first-fit", "ours"))
    assert ours.wait.mean <= 1.25 * first_fit.wait.mean
    assert first_fit.gang_wait is not None
    assert ours.gang_wait is not None
    assert ours.gang_wait.mean <= first_fit.gang_wait.mean
    assert ours.gang_wait.p95 <= first_fit.gang_wait.p95
