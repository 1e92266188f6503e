"""Who gets how much: two teams under a week of overload, and newcomers behind a thousand runs of one user."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from benchmarks.report import Row, Timing
from serverless_gpu.replay import Cluster, Job, Outcome, cluster_of, simulate, trace_of

_WEEK_S = 7 * 86_400.0
_OFF_MAX = 0.02
_SEEDS = (1, 2, 3)


def shares(quick: bool) -> Row:
    """Let two teams with shares of 70 and 30 have more than enough to do for a week, and see who gets what."""
    took_ms, found, first_fit = [], [], []
    for seed in _SEEDS[: 1 if quick else None]:
        began = time.perf_counter()
        found.append(_part(_overload(seed, "ours")))
        took_ms.append(1000 * (time.perf_counter() - began))
        began = time.perf_counter()
        _overload(seed, "first-fit")
        first_fit.append(1000 * (time.perf_counter() - began))
    told = ", ".join(f"{100 * part:.1f} %" for part in found)
    return Row(
        name="a week of two teams that have shares of 70 and 30, 64 GPUs, overload, gangs of 1 to 8",
        ours=Timing("replay", tuple(took_ms)),
        against=(Timing("first-fit, the same jobs", tuple(first_fit)),),
        bar="70 ± 2 % of the GPU time",
        met=all(abs(part - 0.7) <= _OFF_MAX for part in found),
        value=f"the first gets {told}",
    )


def burst(quick: bool) -> Row:
    """Let newcomers each ask for a first run while a thousand runs of one user are served."""
    waits: dict[str, list[float]] = {"ours": [], "first-fit": []}
    for seed in _SEEDS[: 1 if quick else None]:
        jobs, length_s = _burst(seed)
        for policy, found in waits.items():
            outcome = simulate(trace_of(jobs), cluster_of(8, 8), policy)
            found.append(max(_first_waits(outcome)) / length_s)
    late, late_first_fit = max(waits["ours"]), max(waits["first-fit"])
    return Row(
        name="the longest wait of a newcomer behind 1,000 runs of one user, 64 GPUs, in median runs (as seconds)",
        ours=Timing("ours", tuple(1000 * wait for wait in waits["ours"])),
        against=(Timing("first-fit", tuple(1000 * wait for wait in waits["first-fit"])),),
        bar="≤ 1 median run",
        met=late <= 1,
        value=f"{late:.2f} median runs, first-fit {late_first_fit:.1f}",
    )


def _overload(seed: int, policy: str) -> Outcome:
    """Replay a backlog of each team that all GPUs together could not do in a week."""
    chance = random.Random(seed)
    jobs = []
    for team, users in (("search", 2), ("speech", 3)):
        gpu_s, number = 0.0, 0
        while gpu_s < 1.2 * 64 * _WEEK_S:
            length_s, gpus = chance.lognormvariate(8.6, 1.0), chance.choice([1, 1, 1, 2, 4, 8])
            user = f"{team}-{number % users}"
            jobs.append(Job(job_id=f"{team}{number}", submit_s=0, duration_s=length_s, gpus=gpus, team=team, user=user))
            gpu_s, number = gpu_s + gpus * length_s, number + 1
    weights = {"search": 70.0, "speech": 30.0}
    cluster: Cluster = msgspec.structs.replace(cluster_of(8, 8), teams=weights)
    return simulate(trace_of(jobs), cluster, policy)


def _part(outcome: Outcome) -> float:
    """Return which part of the first week's GPU time the first team had."""
    used = {"search": 0.0, "speech": 0.0}
    for job, spans in zip(outcome.jobs, outcome.spans, strict=True):
        used[job.team] += job.gpus * sum(max(0.0, min(end, _WEEK_S) - began) for began, end in spans)
    return used["search"] / sum(used.values())


def _burst(seed: int) -> tuple[list[Job], float]:
    chance = random.Random(seed)
    lengths = [chance.lognormvariate(7.0, 1.0) for _ in range(1000)]
    jobs = [
        Job(job_id=f"burst{number}", submit_s=0, duration_s=length_s, gpus=1, user="greedy")
        for number, length_s in enumerate(lengths)
    ]
    for number in range(12):
        at_s, length_s = chance.uniform(0.0, 6 * median(lengths)), chance.choice(lengths)
        jobs.append(Job(job_id=f"first{number}", submit_s=at_s, duration_s=length_s, gpus=1, user=f"new{number}"))
    return jobs, median(lengths)


def _first_waits(outcome: Outcome) -> Sequence[float]:
    rows = zip(outcome.jobs, outcome.spans, strict=True)
    return [spans[0][0] - job.submit_s for job, spans in rows if job.user != "greedy"]


ROWS: dict[str, Callable[[bool], Row]] = {"shares": shares, "burst": burst}
