"""Numbers of a replay, computed by hand beside it."""

from __future__ import annotations

import math

import pytest

from serverless_gpu.replay import Job, cluster_of, simulate, trace_of
from serverless_gpu.replay.figures import figures_of, moments, percentile, spread
from tests.support.replay.baselines import BLOCKED, made


def test_percentiles_lie_between_values_in_proportion() -> None:
    assert [percentile([0, 10, 20, 30], part) for part in (0, 0.5, 0.95, 1)] == pytest.approx([0, 15, 28.5, 30])
    assert percentile([7], 0.99) == 7
    assert spread([4, 0, 2]).p50 == 2
    assert spread([4, 0, 2]).mean == 2


def test_four_jobs_in_numbers() -> None:
    # As in test_baselines: 0–100 six GPUs, 2–202 two, 100–105 one, 202–252 eight, which waited from 1 on.
    figures = simulate(trace_of(BLOCKED), cluster_of(1, 8), "first-fit").figures
    assert (figures.jobs, figures.preemptions, figures.span_s) == (4, 0, 252)
    assert figures.wait.mean == (0 + 201 + 0 + 97) / 4
    assert figures.completion.mean == (100 + 251 + 200 + 102) / 4
    assert figures.gang_wait is not None
    assert figures.gang_wait.mean == 201
    # Counted until 3, when the last job came: six GPUs, and two more in the last second.
    assert figures.utilisation == (6 * 3 + 2) / 24
    assert figures.idle == 2 / 24  # from 1 to 2 somebody waited
    assert figures.fragmented == 0  # for more than there was
    assert figures.teams == {}


def test_what_is_free_and_would_be_enough_is_fragmented() -> None:
    # Two nodes of four. One GPU of each is taken, six are free, and four want to be together from 10 to 20.
    jobs = made((0, 20, 3), (0, 20, 3), (10, 5, 2), (25, 1, 1))
    figures = simulate(trace_of(jobs), cluster_of(2, 4), "first-fit").figures
    assert figures.fragmented == 10 * 2 / (8 * 25)
    assert figures.idle == figures.fragmented


def test_shares_of_teams_are_counted_while_jobs_arrive() -> None:
    jobs = [
        Job(job_id="a", submit_s=0, duration_s=100, gpus=3, team="search"),
        Job(job_id="b", submit_s=0, duration_s=10, gpus=1, team="vision"),
        Job(job_id="c", submit_s=20, duration_s=500, gpus=1, team="vision"),
    ]
    figures = simulate(trace_of(jobs), cluster_of(1, 4), "fifo").figures
    assert figures.teams == {"search": 60 / 70, "vision": 10 / 70}


def test_a_job_that_was_stopped_waits_again() -> None:
    jobs = made((0, 30, 2))
    figures = figures_of(jobs, [[(5, 15), (25, 45)]], gpus=2, gang_gpus=2)
    assert (figures.wait.mean, figures.completion.mean, figures.preemptions) == (15, 45, 1)
    shown = list(moments(jobs, [[(5, 15), (25, 45)]]))
    assert [(moment.at_s, moment.used, moment.waiting) for moment in shown] == [
        (0, 0, 1), (5, 2, 0), (15, 0, 1), (25, 2, 0), (45, 0, 0),
    ]  # fmt: skip
    assert [moment.smallest for moment in shown] == [2, math.inf, 2, math.inf, math.inf]
