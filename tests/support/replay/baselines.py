"""Helpers of the tests of baselines that other tests use as well."""

from __future__ import annotations

from hypothesis import strategies as st

from serverless_gpu.replay import Job, cluster_of, trace_of


def made(*rows: tuple[float, float, int]) -> list[Job]:
    """Return jobs of (arrival, duration, GPUs)."""
    jobs = (
        Job(job_id=str(place), submit_s=submit, duration_s=duration, gpus=gpus)
        for place, (submit, duration, gpus) in enumerate(rows)
    )
    return list(trace_of(jobs).jobs)


# Eight GPUs: six are taken until 100; eight are wanted, then two for 200 s, then one for 5 s.
BLOCKED = made((0, 100, 6), (1, 50, 8), (2, 200, 2), (3, 5, 1))
JOBS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(1, 16)), min_size=1, max_size=25).map(
    lambda rows: made(*rows)
)
CLUSTERS = st.sampled_from([cluster_of(1, 16), cluster_of(4, 4), cluster_of(2, 8), cluster_of(2, 8).as_sum()])
