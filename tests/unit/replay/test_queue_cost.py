"""What waiting costs in a reserved pool that sends nobody on demand."""

from __future__ import annotations

import pytest

from serverless_gpu.model.billing.advice import GpuRates, GpuUse
from serverless_gpu.model.calendars import HOUR_NS
from serverless_gpu.replay import queue_cost
from serverless_gpu.replay.queue_cost import QueueOutcome, queues

RATES = GpuRates(reserved=1_000_000, on_demand=2_000_000)


def use(start: int, end: int, gpus: int) -> GpuUse:
    return GpuUse(start_ns=start * HOUR_NS, end_ns=end * HOUR_NS, gpus=gpus)


def test_one_small_example() -> None:
    """Two runs of 2 GPUs and 4 hours at once, on 2 GPUs: the second waits 4 hours with its 2 GPUs."""
    uses = [use(10, 14, 2), use(10, 14, 2)]
    (found,) = queues(uses, RATES, [2], waiting=500_000)
    assert found == QueueOutcome(
        slots=2,
        runs=2,
        too_large=0,
        waited_ns=8 * HOUR_NS,
        mean_wait_s=2 * 3600,
        p95_wait_s=0.95 * 4 * 3600,
        avoided_micros=16_000_000,
        waiting_micros=4_000_000,
        worth_micros=2_000_000,
    )


def test_nobody_waits_where_there_is_enough() -> None:
    uses = [use(0, 4, 2), use(0, 4, 2)]
    (found,) = queues(uses, RATES, [4])
    assert (found.waited_ns, found.avoided_micros, found.waiting_micros, found.worth_micros) == (0, 0, None, None)


def test_runs_that_need_more_are_left_out_and_counted() -> None:
    uses = [use(0, 4, 8), use(0, 4, 1)]
    (found,) = queues(uses, RATES, [2])
    assert (found.runs, found.too_large, found.avoided_micros) == (1, 1, 0)


def test_sizes_that_nothing_can_come_of_are_left_out() -> None:
    uses = [use(0, 4, 8)]
    assert queues(uses, RATES, [0, 4]) == ()
    assert queues([], RATES, [4]) == ()
    assert queues(uses, RATES, [10**6]) == ()
    assert [each.slots for each in queues(uses, RATES, range(100))] == []
    assert [each.slots for each in queues(uses, RATES, [9, 9, 8])] == [8, 9]


def test_of_many_runs_the_latest_are_replayed_and_all_numbers_are_of_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue_cost, "RUNS_MAX", 2)
    uses = [use(start, start + 1, 1) for start in (0, 0, 5, 5)]
    (found,) = queues(uses, RATES, [1])
    assert (found.runs, found.waited_ns) == (2, HOUR_NS)
    assert found.avoided_micros == RATES.on_demand  # what waited in the same time, and not in that of the others
