"""Figures of a replay: waiting, completion, GPU use, fragmentation and team shares.

    arrival ──waits──▶ has GPUs ──(preempted: waits again)──▶ end      wait = all waiting; completion = end − arrival

The figures for GPU use, idle GPUs and team shares cover the time from the first arrival to the last arrival. After the
last arrival, every scheduler only empties its queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from serverless_gpu.replay.baselines import Spans
from serverless_gpu.replay.traces import Job


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and interpolated percentiles of many jobs' durations, such as the wait, in seconds."""

    mean: float
    p50: float
    p95: float
    p99: float
    most: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Summary statistics of a complete replay."""

    jobs: int  # Number of jobs that ran.
    # Wait of all jobs. `gang_wait` covers only jobs of at least a whole node, and is None without such jobs.
    wait: Spread
    gang_wait: Spread | None
    completion: Spread
    utilisation: float  # Share of the GPU time in use.
    idle: float  # Share of the GPU time that was free while a job waited.
    # Share of the GPU time that was free although the free GPUs were enough for the smallest waiting job. Fragmented
    # GPUs are on several nodes, or the scheduler reserves the GPUs for another job.
    fragmented: float
    teams: dict[str, float]  # Each team's share of the GPU time in use.
    preemptions: int  # Number of preemptions.
    span_s: float  # Seconds from the first arrival to the end of the last job.


class ReplayState(NamedTuple):
    """The state of a replay from a given time until the next change."""

    at_s: float
    used: int
    waiting: int  # Number of waiting jobs.
    smallest: float  # Number of GPUs of the smallest waiting job, or infinity without waiting jobs.


def figures_of(jobs: Sequence[Job], spans: Spans, *, gpus: int, gang_gpus: int) -> Figures:
    """Return the figures of a replay."""
    completions = [had[-1][1] - job.submit_s for job, had in zip(jobs, spans, strict=True)]
    waits = [
        max(0.0, took - sum(ended - began for began, ended in had))
        for took, had in zip(completions, spans, strict=True)
    ]
    gangs = [wait for job, wait in zip(jobs, waits, strict=True) if job.gpus >= gang_gpus]
    begin = jobs[0].submit_s
    end = max(had[-1][1] for had in spans)
    window = (begin, jobs[-1].submit_s if jobs[-1].submit_s > begin else end)
    used, idle, fragmented = _areas(moments(jobs, spans), window, gpus)
    whole = gpus * (window[1] - window[0])
    return Figures(
        jobs=len(jobs),
        wait=spread(waits),
        gang_wait=spread(gangs) if gangs else None,
        completion=spread(completions),
        utilisation=used / whole,
        idle=idle / whole,
        fragmented=fragmented / whole,
        teams=_teams(jobs, spans, window),
        preemptions=sum(len(had) - 1 for had in spans),
        span_s=end - begin,
    )


def spread(values: Sequence[float]) -> Spread:
    """Return mean and percentiles of a non-empty list of values."""
    ordered = sorted(values)
    return Spread(
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 0.5),
        p95=percentile(ordered, 0.95),
        p99=percentile(ordered, 0.99),
        most=ordered[-1],
    )


def percentile(ordered: Sequence[float], part: float) -> float:
    """Return a percentile of sorted values, where `part` is from 0 to 1."""
    place = part * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def moments(jobs: Sequence[Job], spans: Spans) -> Iterator[ReplayState]:
    """Yield the replay state after each change."""
    changes: list[
        tuple[float, int, int]
        # Time, number of GPUs, and queue change: +1 when a job starts to wait, -1 when it gets GPUs, 0 when it frees
        # them.
    ] = []
    for job, had in zip(jobs, spans, strict=True):
        since = job.submit_s
        for began, ended in had:
            changes += ((since, job.gpus, 1), (began, job.gpus, -1), (ended, job.gpus, 0))
            since = ended
    changes.sort(key=lambda change: change[0])
    used = waiting = 0
    sizes: dict[int, int] = {}
    for place, (at_s, gpus, kind) in enumerate(changes):
        waiting += kind
        used += -gpus if kind == 0 else gpus if kind < 0 else 0
        sizes[gpus] = sizes.get(gpus, 0) + kind
        if place + 1 == len(changes) or changes[place + 1][0] > at_s:
            smallest = min((size for size, count in sizes.items() if count), default=math.inf) if waiting else math.inf
            yield ReplayState(at_s, used, waiting, smallest)


def _areas(shown: Iterator[ReplayState], window: tuple[float, float], gpus: int) -> tuple[float, float, float]:
    """Return three sums of GPU-seconds within a time window.

    The sums count GPUs in use, free GPUs while a job waited, and free GPUs that were enough for a waiting job.
    """
    used = idle = fragmented = 0.0
    before = next(shown)
    for moment in shown:
        length = min(moment.at_s, window[1]) - max(before.at_s, window[0])
        if length > 0:
            free = gpus - before.used
            used += length * before.used
            idle += length * free if before.waiting else 0.0
            fragmented += length * free if before.smallest <= free else 0.0
        before = moment
    return used, idle, fragmented


def _teams(jobs: Sequence[Job], spans: Spans, window: tuple[float, float]) -> dict[str, float]:
    teams: dict[str, float] = {}
    for job, had in zip(jobs, spans, strict=True):
        inside = sum(max(0.0, min(ended, window[1]) - max(began, window[0])) for began, ended in had)
        teams[job.team] = teams.get(job.team, 0.0) + job.gpus * inside
    total = math.fsum(teams.values()) or 1.0
    return {team: use / total for team, use in sorted(teams.items())} if any(teams) else {}
