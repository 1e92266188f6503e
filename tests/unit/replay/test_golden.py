"""The replay gives the figures that others measured, on the traces that they measured them on."""

from __future__ import annotations

import math

import pyarrow.parquet
import pytest

from serverless_gpu.replay import Cluster, Job, Trace, cluster_of, read_trace, simulate, trace_of
from tests.support.replay.real import TRACES, needs_traces

pytestmark = needs_traces

ITP = "microsoft_itp_2021.parquet"


@pytest.mark.parametrize(
    ("policy", "mean"), [("fifo", 1556.4833), ("first-fit", 715.2667), ("srtf", 519.8667), ("srsf", 563.3833)]
)
@pytest.mark.parametrize("cluster", [cluster_of(1, 8), cluster_of(2, 4).as_sum()], ids=["one node", "count"])
def test_the_mean_completion_of_the_60_jobs_of_tiresias(policy: str, mean: float, cluster: Cluster) -> None:
    outcome = simulate(read_trace(TRACES / "tiresias_60job.parquet"), cluster, policy)
    assert math.isclose(outcome.figures.completion.mean, mean, rel_tol=1e-6, abs_tol=5e-5)


def test_the_mean_completion_of_the_60_jobs_of_tiresias_where_equals_keep_their_order() -> None:
    outcome = simulate(read_trace(TRACES / "tiresias_60job.parquet"), cluster_of(4, 4), "srsf")
    assert math.isclose(outcome.figures.completion.mean, 195.9, rel_tol=1e-6)  # 194.9833 in the order of arrival


@pytest.mark.parametrize(("policy", "mean"), [("srtf", 190377.3774), ("srsf", 183965.9780)])
def test_the_mean_completion_of_a_trace_of_muri_on_8_nodes_of_8(policy: str, mean: float) -> None:
    outcome = simulate(_muri("trace3"), cluster_of(8, 8), policy)
    assert math.isclose(outcome.figures.completion.mean, mean, rel_tol=1e-6, abs_tol=5e-5)


def _muri(name: str) -> Trace:
    """Return a trace as Muri's simulator reads it: each iteration takes 1.5 % longer, which is its profiling."""
    rows = pyarrow.parquet.read_table(TRACES / "muri_philly_vcs.parquet").to_pylist()
    return trace_of(
        Job(
            job_id=str(row["job_id"]),
            submit_s=row["submit_time_s"],
            duration_s=row["iterations"] * (row["iteration_time_ms"] * 1.015 / 1000),
            gpus=row["num_gpus"],
        )
        for row in rows
        if row["trace"] == name
    )


@pytest.mark.parametrize(
    ("name", "gpus", "fifo", "first_fit"),
    [("cluster04", 600, 8_885, 4_986), ("cluster04", 512, 128_334, 41_267), ("cluster02", 128, 151_069, 26_408)],
)
def test_the_mean_wait_of_two_clusters_of_itp(name: str, gpus: int, fifo: int, first_fit: int) -> None:
    trace, cluster = read_trace(TRACES / ITP, {"cluster": name}), cluster_of(gpus // 8, 8).as_sum()
    waits = [simulate(trace, cluster, policy).figures.wait.mean for policy in ("fifo", "first-fit")]
    assert [round(wait) for wait in waits] == [fifo, first_fit]
