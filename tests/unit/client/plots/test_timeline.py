"""What a picture of a run shows, from its metrics: lanes, holes, means, cells; and marks from its attempts."""

from __future__ import annotations

import math

import pytest

from serverless_gpu.client.runs import timeline
from serverless_gpu.client.runs.timeline import AttemptTimes, CurveMark, marks
from serverless_gpu.model.lifecycle.attempt import Reason, State

GPU = "system/node_0/gpu_3_"


def test_lanes_are_gpus_by_node_and_number_and_know_their_memory() -> None:
    made = timeline.lanes(
        {
            "system/node_1/gpu_0_utilization_percentage": ([1.0], [50.0]),
            f"{GPU}utilization_percentage": ([1.0, 2.0], [10.0, 20.0]),
            f"{GPU}memory_usage_megabytes": ([1.0, 2.0], [20 * 2**30 / 1e6, 40 * 2**30 / 1e6]),
            "system/node_0/rank_0_cpu_utilization_percentage": ([1.0], [99.0]),
            "system/node_0/cpu_utilization_percentage": ([1.0], [7.0]),
            "system/node_0/gpu_4_utilization_percentage": ([], []),
            "loss": ([1.0], [0.3]),
        },
        {(0, 3): 80 * 2**30, (5, 0): 1},
    )
    assert [(lane.node, lane.label, lane.memory_total) for lane in made] == [(0, "GPU 3", 80.0), (1, "GPU 0", None)]
    assert list(made[0].memory[1]) == pytest.approx([20.0, 40.0]), "GiB, as nvidia-smi has it"
    assert timeline.span(made) == (1.0, 2.0)
    assert timeline.samples(made) == 2


def test_without_gpus_lanes_are_ranks() -> None:
    made = timeline.lanes(
        {
            "system/node_0/rank_10_cpu_utilization_percentage": ([1.0], [99.0]),
            "system/node_0/rank_2_memory_usage_megabytes": ([1.0], [1500.0]),
        }
    )
    assert [(lane.label, lane.busy[1], lane.memory[1]) for lane in made] == [
        ("rank 2", (), [1.5]),
        ("rank 10", [99.0], []),
    ]
    assert timeline.span([]) is None


@pytest.mark.parametrize(
    ("places", "apart"),
    [
        ([], []),
        ([3.0], [3.0]),
        ([1.0, 9.0], [1.0, 9.0]),
        ([5.0, 5.0], [4.5, 5.5]),
        ([5.0, 5.5, 5.7], [4.4, 5.4, 6.4]),
        ([0.0, 0.1, 1.0, 9.0], [-0.63, 0.37, 1.37, 9.0]),
        ([7.5, 9.0, 9.0, 9.1], [6.5, 7.5, 8.5, 9.5]),
    ],
)
def test_what_would_be_drawn_over_each_other_is_spread(places: list[float], apart: list[float]) -> None:
    assert timeline.spread(places, 1.0, 9.5) == pytest.approx(apart, abs=0.01)


def test_a_hole_is_a_break_of_the_line() -> None:
    times, values = timeline.line(([0, 1, 2, 60, 61], [1, 2, 3, 4, 5]))
    assert times[:3] == [0, 1, 2] and math.isnan(times[3]) and times[4:] == [60, 61]
    assert values[:3] == [1, 2, 3] and math.isnan(values[3]) and values[4:] == [4, 5]


@pytest.mark.parametrize("steps", [[1.0] * 5 + [2.0] * 5 + [4.0] * 5, [64.0, 65.0, 63.0], [2.0], [1, 1.4, 0.6]])
def test_intervals_that_grow_are_no_holes(steps: list[float]) -> None:
    times = [sum(steps[:place]) for place in range(len(steps) + 1)]
    assert timeline.line((times, times)) == (times, times)


def test_long_curves_are_thinned_to_means_and_keep_their_holes() -> None:
    times = [*range(3000), *range(4000, 7000)]
    drawn_times, drawn = timeline.line((times, [10.0] * 3000 + [30.0] * 3000))
    assert len(drawn) <= timeline.POINTS_MAX + 2
    assert set(drawn[: drawn_times.index(4000) - 1]) == {10.0}
    assert math.isnan(drawn[drawn_times.index(4000) - 1])
    assert set(drawn[drawn_times.index(4000) :]) == {30.0}


def test_cells_are_means_and_late_samples_hold_until_the_next() -> None:
    assert timeline.cells(([0, 1, 2, 3], [10, 20, 30, 40]), 0, 4, 2) == [15, 35]
    assert timeline.cells(([0, 4, 8], [10, 20, 30]), 0, 10, 10) == [
        10,
        10,
        10,
        10,
        20,
        20,
        20,
        20,
        30,
        pytest.approx(math.nan, nan_ok=True),
    ]
    row = timeline.cells(([0, 1, 2, 30, 31], [5] * 5), 0, 32, 16)
    assert row[:2] == [5, 5] and all(math.isnan(cell) for cell in row[2:15]) and row[15] == 5
    assert timeline.cells(([5], [1]), 5, 5, 3)[0] == 1, "a span of nothing"


def test_means_count_time_not_samples_and_leave_holes_out() -> None:
    assert timeline.mean(([0, 1, 2, 5], [0, 0, 0, 60])) == 30
    assert timeline.mean(([0, 1, 2, 1002, 1003], [0, 0, 0, 90, 90])) == 22.5
    assert timeline.mean(([0, 1, 2, 3], [84, 73, 1, 2])) == 40, "as the receipt of a short run says"
    assert timeline.mean(([7], [42])) == 42
    assert timeline.mean(([], [])) is None
    assert timeline.peak(([], [])) is None


def test_the_unit_of_time_fits_the_run() -> None:
    assert [timeline.unit_of(seconds)[1] for seconds in (5, 600, 36_000, 864_000)] == [
        "seconds",
        "minutes",
        "hours",
        "days",
    ]


def test_marks_tell_failures_stops_and_attempts() -> None:
    failed = AttemptTimes(
        fence=1,
        state=State.FAILED,
        reason=Reason.RANK_RAISED,
        began_ns=0,
        ended_ns=9 * 10**9,
        failed_ns=7 * 10**9,
        rank=3,
    )
    stopped = AttemptTimes(
        fence=2,
        state=State.CANCELLED,
        reason=Reason.CANCELLED,
        began_ns=12 * 10**9,
        ended_ns=30 * 10**9,
        asked_ns=28 * 10**9,
        asked="cancel",
    )
    assert marks([failed, stopped]) == [
        CurveMark(7.0, "failure", "FAILED (rank_raised, rank 3): a rank raised an exception"),
        CurveMark(12.0, "attempt", "attempt 2 began"),
        CurveMark(28.0, "stop", "attempt 2: stop requested: cancel"),
    ]


def test_a_server_tells_when_an_attempt_ended_but_not_when_it_was_asked_to() -> None:
    assert (
        marks([AttemptTimes(fence=1, state=State.CANCELLED, reason=Reason.PREEMPTED, ended_ns=5 * 10**9)])[0].kind
        == "stop"
    )
    assert marks([AttemptTimes(fence=1, state=State.SUCCEEDED, reason=Reason.COMPLETED, ended_ns=5 * 10**9)]) == []
    assert marks([AttemptTimes(fence=1)]) == []
