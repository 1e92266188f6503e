"""A gang on two nodes is one MLflow run, with what both nodes and all of their GPUs did."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.tracking.two_nodes import GPUS, RUN_S, run_on_two_nodes
from tests.support.tracking.mlflow_server import MlflowServer


def test_a_gang_on_two_nodes_is_one_run_with_the_metrics_of_both(tmp_path: Path, mlflow_server: MlflowServer) -> None:
    run_on_two_nodes(tmp_path, mlflow_server.uri, "/tests/two nodes")

    (run,) = mlflow_server.runs("/tests/two nodes")
    assert run.status == "FINISHED"
    for node in (0, 1):
        assert f"system/node_{node}/cpu_utilization_percentage" in run.metrics
        for gpu in range(GPUS):
            history = mlflow_server.history(run.run_id, f"system/node_{node}/gpu_{gpu}_utilization_percentage")
            assert history[-1][0] >= RUN_S - 2 and len(history) >= 10, (node, gpu, history)
