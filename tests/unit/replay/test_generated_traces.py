"""Made-up traces have the figures that they say they have."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from serverless_gpu.errors import InvalidValue
from serverless_gpu.replay import Job, Trace, generate
from tests.support.golden import golden

WEEK_S = 7 * 86_400


@pytest.fixture(scope="module", params=[0, 1, 2])
def trace(request: pytest.FixtureRequest) -> Trace:
    return generate(20_000, gpus=512, load=0.9, seed=request.param)


def _parts(trace: Trace, chosen: Callable[[Job], bool]) -> tuple[float, float]:
    """Return which part of the jobs and of the GPU time some have."""
    of_them = [job for job in trace.jobs if chosen(job)]
    return len(of_them) / len(trace.jobs), sum(job.gpus * job.duration_s for job in of_them) / trace.gpu_seconds()


def test_sizes_have_their_part_of_jobs_and_time(trace: Trace) -> None:
    assert _parts(trace, lambda job: job.gpus == 1) == pytest.approx((0.83, 0.13), abs=0.02)
    assert _parts(trace, lambda job: 5 <= job.gpus <= 8) == pytest.approx((0.10, 0.49), abs=0.06)


def test_a_few_jobs_of_more_than_a_week_have_much_of_the_time(trace: Trace) -> None:
    jobs, time = _parts(trace, lambda job: job.duration_s > WEEK_S)
    assert 0.001 <= jobs <= 0.003
    assert 0.08 <= time <= 0.28


def test_jobs_come_in_bursts(trace: Trace) -> None:
    gaps = [later.submit_s - earlier.submit_s for earlier, later in pairwise(trace.jobs)]
    assert 3 <= statistics.pstdev(gaps) / statistics.mean(gaps) <= 13
    hours = Counter(int(job.submit_s // 3600) for job in trace.jobs)
    assert 8 <= max(hours.values()) / (len(trace.jobs) / (trace.span_s() / 3600)) <= 15


def test_the_load_is_what_was_asked_for(trace: Trace) -> None:
    assert trace.gpu_seconds() / (512 * trace.span_s()) == pytest.approx(0.9, rel=0.02)


def test_the_same_seed_gives_the_same_trace() -> None:
    assert generate(500, gpus=64, seed=3) == generate(500, gpus=64, seed=3)
    assert generate(500, gpus=64, seed=3) != generate(500, gpus=64, seed=4)


def test_no_job_is_larger_than_the_cluster() -> None:
    assert max(job.gpus for job in generate(2_000, gpus=8).jobs) == 8
    assert {job.gpus for job in generate(50, gpus=1).jobs} == {1}


@pytest.mark.parametrize(("jobs", "load"), [(0, 0.9), (2_000_000, 0.9), (10, 0.0), (10, 11.0), (10, float("nan"))])
def test_what_cannot_be_made_up(jobs: int, load: float) -> None:
    with pytest.raises(InvalidValue, match=re.escape(golden("replay.generating.cannot-made-up"))):
        generate(jobs, gpus=8, load=load)
