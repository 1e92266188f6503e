"""One trace, one cluster, one scheduler: what would have come of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.hardware import matches
from serverless_gpu.model.scheduling.values import BEST_EFFORT, QueuePolicy
from serverless_gpu.replay.baselines import KEYS, Nodes, Spans, in_order, placed_again
from serverless_gpu.replay.clusters import Cluster
from serverless_gpu.replay.figures import Figures, figures_of
from serverless_gpu.replay.scheduler_driver import Drive, Durations, Progress
from serverless_gpu.replay.traces import Job, Trace

POLICIES = ("fifo", "first-fit", *KEYS, "ours")
"""Schedulers by name; `ours` is the one that servers have, the others are in `baselines`."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `ours` beyond the jobs.

    Attributes:
        durations: of how long jobs take it is told the truth (``"known"``), what earlier jobs of the same user and name
            took (``"learned"``), or nothing (``"unknown"``).
        preemption: whether every job may be stopped and go on later; else those that the trace marks.
        scheduling: what the operator decides.
    """

    durations: Durations = "unknown"
    preemption: bool = False
    scheduling: QueuePolicy = QueuePolicy()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a replay.

    Attributes:
        policy: whose decisions these are.
        cluster: where.
        figures: the numbers.
        jobs: those that ran, in the order of their arrival; `spans` has when each had its GPUs.
        impossible: how many jobs the empty cluster has nothing for, by reason; they are left out.
        unserved: jobs that were never placed.
    """

    policy: str
    cluster: Cluster
    figures: Figures
    jobs: tuple[Job, ...]
    spans: Spans
    impossible: Mapping[str, int] = {}
    unserved: int = 0


def simulate(
    trace: Trace,
    cluster: Cluster,
    policy: str = "ours",
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Replay a trace.

    Args:
        trace: the jobs.
        cluster: where they are to run; `Cluster.as_sum` makes it one sum of GPUs.
        policy: one of `POLICIES`.
        settings: what `ours` is told beyond the jobs.
        progress: is told, now and then, how many jobs have ended, and of how many; by `ours` only.

    Raises:
        InvalidValue: there is no such policy, or no job fits the cluster.
    """
    told = settings or Settings()
    jobs, impossible = _possible(trace, cluster)
    if not jobs:
        why = "; ".join(f"{count} {reason}" for reason, count in impossible.items())
        raise InvalidValue(f"no job of {trace.source or 'the trace'} can run on {cluster.text()}: {why}")
    if told.preemption:
        jobs = [msgspec.structs.replace(job, preemptible=True) for job in jobs]
    spans = _spans(jobs, cluster, policy, told, progress)
    ran = [
        (job, had)
        for job, had in zip(jobs, spans, strict=True)
        # A job that was stopped for good has less than its duration.
        if had and sum(ended - began for began, ended in had) >= job.duration_s * (1 - 1e-9) - 1e-3
    ]
    if not ran:
        raise InvalidValue(f"{policy} places none of the jobs of {trace.source or 'the trace'} on {cluster.text()}")
    served = tuple(job for job, _ in ran)
    times = [had for _, had in ran]
    return Outcome(
        policy=policy,
        cluster=cluster,
        figures=figures_of(served, times, gpus=cluster.gpus, gang_gpus=cluster.gang_gpus),
        jobs=served,
        spans=times,
        impossible=impossible,
        unserved=len(jobs) - len(ran),
    )


def _possible(trace: Trace, cluster: Cluster) -> tuple[list[Job], dict[str, int]]:
    """Return the jobs that the empty cluster has something for, and how many it has nothing for, by reason."""
    known: dict[tuple[int, str, str, bool], str] = {}
    jobs: list[Job] = []
    impossible: Counter[str] = Counter()
    for job in trace.jobs:
        key = (job.gpus, job.gpu_type, job.pool, job.priority == BEST_EFFORT)
        if key not in known:
            known[key] = _why_not(job, cluster)
        if known[key]:
            impossible[known[key]] += 1
        else:
            jobs.append(job)
    return jobs, dict(impossible)


def _why_not(job: Job, cluster: Cluster) -> str:
    """Return why a job can never run, in words that follow how many there are; "" when it can."""
    pools = {pool.name: pool for pool in cluster.pools}
    machines = [machine for machine in cluster.machines if job.pool and machine.pool == job.pool]
    if not machines:  # a pool that this cluster does not have is as good as none
        lowest = job.priority == BEST_EFFORT
        closed = {pool.name for pool in pools.values() if pool.reserved and not (pool.lends and lowest)}
        machines = [machine for machine in cluster.machines if machine.pool not in closed]
    if not machines:
        return "that name no reserved pool, and there is no other"
    if job.gpu_type:
        machines = [machine for machine in machines if matches(job.gpu_type, machine.gpu_type)]
    if not machines:
        return f"that need {job.gpu_type}, of which there is none"
    room = Nodes(msgspec.structs.replace(cluster, machines=tuple(machines)))
    return "" if room.take(job.gpus) is not None else "that need more than there is"


def _spans(jobs: list[Job], cluster: Cluster, policy: str, told: Settings, progress: Progress | None) -> Spans:
    if policy == "ours":
        drive = Drive(jobs, cluster, told.scheduling, durations=told.durations, progress=progress)
        return drive.run()
    if policy in KEYS:
        return placed_again(jobs, cluster, KEYS[policy])
    if policy in POLICIES:
        return in_order(jobs, cluster, strict=policy == "fifo")
    raise InvalidValue(f"there is no policy {policy!r}", hint=f"one of {', '.join(POLICIES)}")
