"""One trace, one cluster, one scheduler: what would have come of it."""

from __future__ import annotations

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.scheduling.values import Policy as Scheduling
from serverless_gpu.replay.baselines import KEYS, Nodes, Spans, in_order, placed_again
from serverless_gpu.replay.driving import Drive, Durations, Progress
from serverless_gpu.replay.figures import Figures, figures_of
from serverless_gpu.replay.values import Cluster, Job, Trace

POLICIES = ("fifo", "first-fit", *KEYS, "ours")
"""Schedulers by name; `ours` is the one that servers have, the others are in `baselines`."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What `ours` is told beyond the jobs.

    Attributes:
        durations: of how long jobs take it is told the truth (``"known"``), what earlier jobs of the same user and name
            took (``"learned"``), or nothing (``"unknown"``).
        preemption: whether every job may be stopped and go on later; else those of which the trace says so.
        scheduling: what the operator decides.
    """

    durations: Durations = "unknown"
    preemption: bool = False
    scheduling: Scheduling = Scheduling()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a replay.

    Attributes:
        policy: whose decisions these are.
        cluster: where.
        figures: the numbers.
        jobs: those that ran, in the order of their arrival; `spans` has when each had its GPUs.
        impossible: jobs that the empty cluster has no room for; they are left out.
        unserved: jobs that were never placed.
    """

    policy: str
    cluster: Cluster
    figures: Figures
    jobs: tuple[Job, ...]
    spans: Spans
    impossible: int = 0
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
    jobs = _possible(trace, cluster)
    if not jobs:
        biggest = max((job.gpus for job in trace.jobs), default=0)
        raise InvalidValue(f"no job of {trace.source or 'the trace'} fits {cluster.text()}; the largest has {biggest}")
    if told.preemption:
        jobs = [msgspec.structs.replace(job, preemptible=True) for job in jobs]
    spans = _spans(jobs, cluster, policy, told, progress)
    ran = [(job, had) for job, had in zip(jobs, spans, strict=True) if had and _is_whole(job, had)]
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
        impossible=len(trace.jobs) - len(jobs),
        unserved=len(jobs) - len(ran),
    )


def _possible(trace: Trace, cluster: Cluster) -> list[Job]:
    """Return the jobs that the empty cluster has room for."""
    nodes = Nodes(cluster)
    fits: dict[int, bool] = {}
    for job in trace.jobs:
        if job.gpus not in fits:
            nodes.empty()
            fits[job.gpus] = nodes.take(job.gpus) is not None
    return [job for job in trace.jobs if fits[job.gpus]]


def _spans(jobs: list[Job], cluster: Cluster, policy: str, told: Settings, progress: Progress | None) -> Spans:
    if policy == "ours":
        drive = Drive(jobs, cluster, told.scheduling, durations=told.durations, progress=progress)
        return drive.run()
    if policy in KEYS:
        return placed_again(jobs, cluster, KEYS[policy])
    if policy in POLICIES:
        return in_order(jobs, cluster, strict=policy == "fifo")
    raise InvalidValue(f"there is no policy {policy!r}", hint=f"one of {', '.join(POLICIES)}")


def _is_whole(job: Job, had: list[tuple[float, float]]) -> bool:
    """Return whether a job came to its end; one that was stopped for good did not."""
    return sum(ended - began for began, ended in had) > job.duration_s - 1e-3
