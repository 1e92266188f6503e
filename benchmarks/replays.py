"""The scheduler on traces: how long a replay takes, and how long jobs wait, beside first-fit.

Real traces are read from the directory in `SGPU_TRACES`; without it, replays are of jobs that are made up, and the rows
of waits say what they lack.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.contestants import ContestantFailed
from benchmarks.report import Row, Timing
from serverless_gpu.replay import Cluster, Trace, cluster_of, generate, read_trace, simulate

REPLAY_S_MAX = 60.0
WAIT_RATIO_MAX = 1.25
_ITP = "microsoft_itp_2021.parquet"
_JOBS = 69_351
_GPUS = {"cluster02": 128, "cluster04": 600}
_LOAD = 0.9


def replay(quick: bool) -> Row:
    """Replay two months of ten clusters, one after another."""
    clusters = list(_clusters())
    rounds = range(1 if quick else 3)
    ours, first_fit = (
        tuple(1000 * sum(_took_s(trace, cluster, policy) for trace, cluster in clusters) for _ in rounds)
        for policy in ("ours", "first-fit")
    )
    jobs = sum(len(trace.jobs) for trace, _ in clusters)
    timing = Timing(f"{jobs:,} jobs on {len(clusters)} clusters", ours)
    return Row(
        name=f"replay: {'ITP, each cluster on its own' if _path() else 'jobs that are made up'}",
        ours=timing,
        against=(Timing("first-fit, the same jobs", first_fit),),
        bar=f"≤ {REPLAY_S_MAX:g} s",
        met=timing.median <= 1000 * REPLAY_S_MAX,
    )


def _took_s(trace: Trace, cluster: Cluster, policy: str) -> float:
    began = time.perf_counter()
    simulate(trace, cluster, policy)
    return time.perf_counter() - began


def _clusters() -> Iterator[tuple[Trace, Cluster]]:
    """Yield each cluster of the trace, with as many GPUs as it takes for the load, or for its largest job."""
    path = _path()
    if path is None:
        yield generate(_JOBS, gpus=600, load=_LOAD), cluster_of(75, 8)
        return
    for number in range(1, 11):
        name = f"cluster{number:02}"
        trace = read_trace(path, {"cluster": name})
        most = max(job.gpus for job in trace.jobs)
        gpus = _GPUS.get(name) or max(most, math.ceil(trace.gpu_seconds() / trace.span_s() / _LOAD))
        yield trace, cluster_of(math.ceil(gpus / 8), 8)


def _path() -> Path | None:
    path = Path(os.environ.get("SGPU_TRACES") or "/nonexistent", _ITP)
    return path if path.exists() else None


def _waits(name: str, gpus: int) -> Callable[[bool], Row]:
    def waits(quick: bool) -> Row:
        path = _path()
        if path is None:
            raise ContestantFailed(f"there is no {_ITP}: SGPU_TRACES names the directory that has it")
        trace, cluster = read_trace(path, {"cluster": name}), cluster_of(gpus // 8, 8).as_sum()
        ours, first_fit = (simulate(trace, cluster, policy).figures for policy in ("ours", "first-fit"))
        if ours.gang_wait is None or first_fit.gang_wait is None:
            raise ContestantFailed(f"{name} has no gangs")
        gangs = ours.gang_wait.mean / first_fit.gang_wait.mean, ours.gang_wait.p95 / first_fit.gang_wait.p95
        return Row(
            name=f"mean wait, ITP {name} on {gpus} GPUs, count placement",
            ours=Timing("ours", (1000 * ours.wait.mean,)),
            against=(Timing("first-fit", (1000 * first_fit.wait.mean,)),),
            bar=f"≤ {WAIT_RATIO_MAX:g}×; gangs' mean and p95 ≤ 1×",
            met=ours.wait.mean <= WAIT_RATIO_MAX * first_fit.wait.mean and max(gangs) <= 1,
            value=f"gangs {gangs[0]:.2f}×, p95 {gangs[1]:.2f}×",
        )

    return waits


ROWS: dict[str, Callable[[bool], Row]] = {
    "replay": replay,
    **{
        f"waits-{name}-{gpus}": _waits(name, gpus)
        for name, gpus in (("cluster04", 600), ("cluster04", 512), ("cluster02", 128))
    },
}
