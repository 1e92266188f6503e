"""Replays a trace through a scheduler with the function `simulate`.

    traces.py      a file, or a seed → jobs        clusters.py    "8x8", or a file → nodes
    simulation.py  the planner, driven by the jobs baselines.py   schedulers to compare with
    figures.py     times of jobs → numbers         queue_cost.py  cost of waiting in a reserved pool
    charts.py      charts with Matplotlib; `sgpu simulate` and `sgpu advise` load it on demand

Example:

    from serverless_gpu.replay import read_cluster, read_trace, simulate
    outcome = simulate(read_trace(Path("trace.parquet")), read_cluster("8x8"), "ours")
    print(outcome.figures.wait.p95)
"""

from __future__ import annotations

from serverless_gpu.replay.clusters import Cluster, Machine, cluster_of, read_cluster
from serverless_gpu.replay.simulation import POLICIES, Outcome, Settings, simulate
from serverless_gpu.replay.traces import Job, Trace, generate, read_trace, trace_of

__all__ = [
    "POLICIES",
    "Cluster",
    "Job",
    "Machine",
    "Outcome",
    "Settings",
    "Trace",
    "cluster_of",
    "generate",
    "read_cluster",
    "read_trace",
    "simulate",
    "trace_of",
]
