"""Computes the cost of a reserved pool without on-demand GPUs, including a price of waiting.

    past uses ──▶ `first-fit` on a pool of that size, as one node ──▶ GPU-hours waited
    waiting costs      GPU-hours waited × price of one GPU-hour of waiting, which only the owner can estimate
    waiting is better  while that price is below   on-demand cost ÷ GPU-hours waited

A replay covers only the latest runs. The report mentions omitted earlier runs. All results cover the time from the
start of the first replayed run to the end of the last replayed run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.billing.advice import GpuRates, GpuUse, curve_of, micros_of, mix
from serverless_gpu.model.calendars import HOUR_NS
from serverless_gpu.replay.clusters import cluster_of
from serverless_gpu.replay.simulation import simulate
from serverless_gpu.replay.traces import Job, trace_of

RUNS_MAX = 20_000
SIZES_MAX = 6
_SECOND_NS = 1_000_000_000


class QueueOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result for a reserved pool without on-demand GPUs."""

    slots: int
    runs: int  # Number of replayed runs. `too_large` counts runs that never fit, which the replay leaves out.
    too_large: int
    waited_ns: int  # GPU-nanoseconds of waiting: wait multiplied by GPUs, summed over all runs.
    mean_wait_s: float  # Mean wait of a run in seconds. `p95_wait_s` is the 95th percentile.
    p95_wait_s: float
    avoided_micros: int  # On-demand cost of the GPUs beyond the pool.
    waiting_micros: int | None  # Cost of waiting; None without a price of waiting.
    # Waiting is cheaper than on-demand GPUs below this price of one GPU-hour of waiting. The price is None if no run
    # waited.
    worth_micros: int | None


def queues(
    uses: Sequence[GpuUse], rates: GpuRates, sizes: Iterable[int], *, waiting: int | None = None
) -> tuple[QueueOutcome, ...]:
    """Return the results for several pool sizes, without pools that are too small for every run.

    `waiting` is the price in micros of one GPU-hour of waiting, or None without a price. The result has at most the
    `SIZES_MAX` smallest pools.
    """
    latest = sorted(uses, key=lambda use: use.start_ns)[-RUNS_MAX:]
    wanted = sorted({size for size in sizes if size > 0})[:SIZES_MAX]
    found = (_queue(latest, rates, size, waiting) for size in wanted)
    return tuple(queue for queue in found if queue is not None)


def _queue(uses: Sequence[GpuUse], rates: GpuRates, slots: int, waiting: int | None) -> QueueOutcome | None:
    begin = uses[0].start_ns if uses else 0
    jobs = (
        Job(
            job_id=str(place),
            submit_s=(use.start_ns - begin) / _SECOND_NS,
            duration_s=(use.end_ns - use.start_ns) / _SECOND_NS,
            gpus=use.gpus,
        )
        for place, use in enumerate(uses)
        if use.end_ns > use.start_ns and 0 < use.gpus <= slots
    )
    trace = trace_of(jobs)
    if not trace.jobs:
        return None
    try:
        outcome = simulate(trace, cluster_of(1, slots), "first-fit")
    except InvalidValue:  # The pool has more GPUs than a replay supports.
        return None
    waits = [
        max(0, round((had[0][0] - job.submit_s) * _SECOND_NS))
        for job, had in zip(outcome.jobs, outcome.spans, strict=True)
    ]
    waited_ns = sum(wait * job.gpus for wait, job in zip(waits, outcome.jobs, strict=True))
    served = (use for use in uses if use.gpus <= slots)
    end = max(use.end_ns for use in uses)
    avoided = mix(curve_of(served, begin, end), rates, slots).on_demand_micros
    return QueueOutcome(
        slots=slots,
        runs=len(outcome.jobs),
        too_large=sum(use.gpus > slots for use in uses),
        waited_ns=waited_ns,
        mean_wait_s=outcome.figures.wait.mean,
        p95_wait_s=outcome.figures.wait.p95,
        avoided_micros=avoided,
        waiting_micros=None if waiting is None else micros_of(waited_ns, waiting),
        worth_micros=avoided * HOUR_NS // waited_ns if waited_ns else None,
    )
