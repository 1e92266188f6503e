"""Simulates one scheduler on one trace and one cluster, and computes the resulting figures.

    jobs ─arrive─▶ Planner.apply · decide ─▶ placements: the job ends after its duration
                                         └─▶ preemptions: the job waits again with its remaining duration

The scheduler `ours` is the server's planner, driven by a trace with the same state, changes and decisions as on a
server. The clock of the replay begins at 0 with the first job. A preempted job stops at once and later continues where
it stopped. The planner gets true job durations, durations that a server would have learned from earlier jobs, or no
durations. A job without a GPU type gets the most frequent GPU type.

Failure case: A job that the planner never places, even on an idle cluster, counts as unserved.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.hardware import matches
from serverless_gpu.model.scheduling import duration_estimates
from serverless_gpu.model.scheduling.planner import Planner
from serverless_gpu.model.scheduling.values import (
    BEST_EFFORT,
    Arrived,
    Change,
    Decision,
    Gone,
    Node,
    NodeSeen,
    PoolSeen,
    QueuedRun,
    QueuePolicy,
)
from serverless_gpu.replay.baselines import KEYS, Nodes, Spans, in_order, placed_again
from serverless_gpu.replay.clusters import Cluster
from serverless_gpu.replay.figures import Figures, figures_of
from serverless_gpu.replay.traces import Job, Trace

Progress = Callable[[int, int], None]
"""A callback that regularly receives the number of ended jobs and the number of all jobs."""

Durations = Literal["unknown", "learned", "known"]
"""The kind of job durations that the planner gets."""

_NS = 1_000_000_000
_ROUNDS_MAX = 100  # Maximum number of decisions at one point in time, if every decision preempts a run.
_TELL_EVERY = 500


POLICIES = ("fifo", "first-fit", *KEYS, "ours")
"""Scheduler names. `ours` is the server's planner, and `baselines` defines all other schedulers."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the scheduler `ours`, besides the trace and the cluster."""

    # Job durations that the planner gets: true durations (``"known"``), durations of earlier jobs with the same user
    # and name (``"learned"``), or none (``"unknown"``).
    durations: Durations = "unknown"
    preemption: bool = False  # True makes every job preemptible. False uses each job's value from the trace.
    scheduling: QueuePolicy = QueuePolicy()  # The queue policy of the operator.


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay."""

    policy: str  # Name of the scheduler.
    cluster: Cluster
    figures: Figures
    # Jobs that ran, in the order of arrival. `spans` contains the periods in which each job had its GPUs.
    jobs: tuple[Job, ...]
    spans: Spans
    # Number of jobs that never fit the empty cluster, by reason. The replay leaves out jobs that never fit.
    impossible: Mapping[str, int] = {}
    unserved: int = 0  # Number of jobs that the scheduler never placed.


def simulate(
    trace: Trace,
    cluster: Cluster,
    policy: str = "ours",
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Replay a trace with one of `POLICIES`. Only the policy `ours` reports its progress.

    Raises InvalidValue for an unknown policy, or when no job fits the cluster.
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
        # A job that never resumed after a preemption has run for less than its duration.
        if had and sum(ended - began for began, ended in had) >= job.duration_s * (1 - 1e-9) - 1e-3
    ]
    if not ran:
        raise InvalidValue(f"{policy} cannot place any job of {trace.source or 'the trace'} on {cluster.text()}")
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
    """Return the jobs that fit the empty cluster, and the number of other jobs by reason."""
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
    """Return the reason why a job can never run, or "". Messages put a count before the reason."""
    pools = {pool.name: pool for pool in cluster.pools}
    machines = [machine for machine in cluster.machines if job.pool and machine.pool == job.pool]
    if not machines:  # A job in an unknown pool counts as a job without a pool.
        lowest = job.priority == BEST_EFFORT
        closed = {pool.name for pool in pools.values() if pool.reserved and not (pool.lends and lowest)}
        machines = [machine for machine in cluster.machines if machine.pool not in closed]
    if not machines:
        return "that name no reserved pool, and all pools are reserved"
    if job.gpu_type:
        machines = [machine for machine in machines if matches(job.gpu_type, machine.gpu_type)]
    if not machines:
        return f"that need {job.gpu_type}, which the cluster does not have"
    room = Nodes(msgspec.structs.replace(cluster, machines=tuple(machines)))
    return "" if room.take(job.gpus) is not None else "that need more GPUs than the cluster has"


def _spans(jobs: list[Job], cluster: Cluster, policy: str, told: Settings, progress: Progress | None) -> Spans:
    if policy == "ours":
        return PlannerReplay(jobs, cluster, told.scheduling, durations=told.durations, progress=progress).run()
    if policy in KEYS:
        return placed_again(jobs, cluster, KEYS[policy])
    if policy in POLICIES:
        return in_order(jobs, cluster, strict=policy == "fifo")
    raise InvalidValue(f"{policy!r} is not a valid policy", hint=f"one of {', '.join(POLICIES)}")


class PlannerReplay:
    """Replays jobs with the server's planner. The jobs are sorted by arrival and fit the empty cluster."""

    def __init__(
        self,
        jobs: Sequence[Job],
        cluster: Cluster,
        scheduling: QueuePolicy,
        *,
        durations: Durations,
        progress: Progress | None = None,
    ) -> None:
        self._jobs, self._progress = jobs, progress
        self._durations = durations
        self._past: dict[tuple[str, str], deque[float]] = {}
        self._whole = max(machine.gpus for machine in cluster.machines)
        self._pools = {machine.pool for machine in cluster.machines}
        types: Counter[str] = Counter()
        for machine in cluster.machines:
            types[machine.gpu_type] += machine.gpus
        self._usual_type = types.most_common(1)[0][0]
        self._zero_s = jobs[0].submit_s if jobs else 0.0
        self._left_ns = [round(job.duration_s * _NS) for job in jobs]
        self._wanted = [self._wanted_of(place, job) for place, job in enumerate(jobs)]
        self._since: dict[int, int] = {}
        # Pending ends of jobs: end time, job and start time. An entry with an outdated start time has no effect.
        self._ends: list[tuple[int, int, int]] = []
        self._spans: Spans = [[] for _ in jobs]
        self._ended = 0
        self._planner = Planner(_of_cluster(scheduling, cluster))
        self._planner.apply(_nodes_of(cluster))

    def run(self) -> Spans:
        """Replay all jobs and return the periods in which each job had its GPUs."""
        jobs, arrived = self._jobs, 0
        wake_ns: float = math.inf
        while True:
            arrival_ns = self._ns(jobs[arrived].submit_s) if arrived < len(jobs) else math.inf
            while self._ends and self._since.get(self._ends[0][1]) != self._ends[0][2]:
                heapq.heappop(self._ends)
            end_ns = self._ends[0][0] if self._ends else math.inf
            if min(arrival_ns, end_ns, wake_ns) == math.inf:
                return self._spans
            now_ns = int(min(arrival_ns, end_ns, wake_ns))
            changes: list[Change] = self._end(now_ns)
            while arrived < len(jobs) and self._ns(jobs[arrived].submit_s) <= now_ns:
                job = jobs[arrived]
                if self._durations == "learned" and (past := self._past.get((job.user, job.name))):
                    expected_s = duration_estimates.expected_s(tuple(past))
                    self._wanted[arrived] = msgspec.structs.replace(self._wanted[arrived], expected_s=expected_s)
                changes.append(Arrived(self._wanted[arrived]))
                arrived += 1
            decision = self._decide(changes, now_ns)
            idle = arrived == len(jobs) and not self._since
            # The remaining jobs will never run, because the planner's state can no longer change.
            wake_ns = math.inf if decision.wake_ns is None or idle else max(decision.wake_ns, now_ns + 1)

    def _decide(self, changes: list[Change], now_ns: int) -> Decision:
        """Let the planner decide until it preempts no more runs at this time."""
        for _ in range(_ROUNDS_MAX):
            self._planner.apply(changes)
            decision = self._planner.decide(now_ns)
            for placement in decision.placements:
                place = int(placement.run_id)
                self._since[place] = now_ns
                heapq.heappush(self._ends, (now_ns + self._left_ns[place], place, now_ns))
            if not decision.preemptions:
                break
            changes = [change for one in decision.preemptions for change in self._leave(int(one.run_id), now_ns)]
        return decision

    def _leave(self, place: int, now_ns: int) -> tuple[Change, ...]:
        self._left_ns[place] -= now_ns - self._since[place]
        self._had(place, now_ns)
        wanted = self._wanted[place]
        again = msgspec.structs.replace(wanted, preemptions=wanted.preemptions + 1)
        if self._durations == "known":
            left_s = self._left_ns[place] / _NS
            again = msgspec.structs.replace(again, limit_s=left_s, expected_s=left_s)
        self._wanted[place] = again
        return Gone(wanted.run_id), Arrived(again)

    def _end(self, now_ns: int) -> list[Change]:
        gone: list[Change] = []
        while self._ends and self._ends[0][0] <= now_ns:
            _, place, since_ns = heapq.heappop(self._ends)
            if self._since.get(place) == since_ns:
                self._had(place, now_ns)
                gone.append(Gone(self._wanted[place].run_id))
                job = self._jobs[place]
                if self._durations == "learned" and (job.user or job.name):
                    past = self._past.setdefault((job.user, job.name), deque(maxlen=duration_estimates.SAMPLES_MAX))
                    past.appendleft(job.duration_s)
                self._ended += 1
                if self._progress is not None and self._ended % _TELL_EVERY == 0:
                    self._progress(self._ended, len(self._jobs))
        return gone

    def _had(self, place: int, now_ns: int) -> None:
        began_ns = self._since.pop(place)
        self._spans[place].append((self._zero_s + began_ns / _NS, self._zero_s + now_ns / _NS))

    def _ns(self, at_s: float) -> int:
        return round((at_s - self._zero_s) * _NS)

    def _wanted_of(self, place: int, job: Job) -> QueuedRun:
        return QueuedRun(
            run_id=str(place),
            title=f"{job.user or job.team or 'job'}/{job.name or job.job_id}",
            owner=job.user,
            team=job.team,
            priority=job.priority,
            queued_ns=self._ns(job.submit_s),
            gpus=job.gpus,
            gpu_type=job.gpu_type or self._usual_type,
            several_nodes=job.gpus > self._whole,
            pool=job.pool if job.pool in self._pools else "",
            limit_s=job.duration_s if self._durations == "known" else None,
            expected_s=job.duration_s if self._durations == "known" else None,
            preemptible=job.preemptible,
        )


def _of_cluster(scheduling: QueuePolicy, cluster: Cluster) -> QueuePolicy:
    """Return the queue policy with the cluster's properties added: shares, and the size of a whole node."""
    told = {
        "team_weights": {**cluster.teams, **scheduling.team_weights},
        "user_weights": {**cluster.users, **scheduling.user_weights},
        "whole_node": scheduling.whole_node or (cluster.gang_gpus if cluster.counted else 0),
    }
    return msgspec.structs.replace(scheduling, **told)


def _nodes_of(cluster: Cluster) -> list[Change]:
    pools: list[Change] = [PoolSeen(pool) for pool in cluster.pools]
    nodes = [
        NodeSeen(Node(id=each.name, name=each.name, pool=each.pool, total={each.gpu_type: each.gpus}))
        for each in cluster.machines
    ]
    return pools + nodes
