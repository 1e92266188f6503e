"""The cost of a reserved pool without on-demand GPUs: runs wait there, and their wait has a price.

    uses of the past ─▶ `first-fit` on so many GPUs, as one sum ─▶ GPU-hours waited
    waiting costs   GPU-hours waited × price of waiting one hour for one GPU: a number that only its owner knows
    it is worth it  while that price is below   what on demand would have cost ÷ GPU-hours waited

Bounded: of many runs the latest are replayed, and that is said. All numbers are of those runs, in the time from the
first of them to the end of the last.
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
    """The outcome of a reserved pool without on-demand GPUs."""

    slots: int
    runs: int  # that were replayed; `too_large` those that it can never run, which are left out
    too_large: int
    waited_ns: int  # GPU-nanoseconds for which runs waited: each as long as it waited, times its GPUs
    mean_wait_s: float  # of the runs, in seconds; `p95_wait_s` what 95 % of them waited less than
    p95_wait_s: float
    avoided_micros: int  # what the GPUs that were missing would have cost on demand
    waiting_micros: int | None  # what waiting cost; None where it has no price
    # The price of waiting one hour for one GPU below which it costs less than on demand; None where no run waited.
    worth_micros: int | None


def queues(
    uses: Sequence[GpuUse], rates: GpuRates, sizes: Iterable[int], *, waiting: int | None = None
) -> tuple[QueueOutcome, ...]:
    """Return the outcome of pools of some sizes, as far as a run fits into them.

    `waiting` is micros for one hour of one GPU; None for unpriced. Looks at the `SIZES_MAX` smallest pools.
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
    except InvalidValue:  # more GPUs than a replay takes
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
