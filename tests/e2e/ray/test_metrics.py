"""What a real Ray tells of itself is in the series of its run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY
from tests.support.ray.node_tasks import PYTHON

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(300)]
_CALLER = Path(__file__).with_name("metrics_caller.py")


def test_a_run_has_the_series_of_its_cluster(home: Path) -> None:
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_"))},
        "SERVERLESS_GPU_FAKE": "H100:2",
        "SERVERLESS_GPU_TRACKING": "0",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)]),
    }
    ended = subprocess.run([str(PYTHON), str(_CALLER)], env=environ, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    series = json.loads(ended.stdout.splitlines()[-1])
    told = {name.removeprefix("ray/node_0/"): value for name, value in series.items() if name.startswith("ray/")}
    assert (told["gpus"], told["gpus_used"]) == (2, 1)
    assert told["tasks_finished"] >= 7  # with those of the actor
    assert told["actors"] == 1
    assert told["workers"] >= 1
    assert told["object_store_usage_megabytes"] >= 20
    assert told["memory_usage_megabytes"] > 0
    assert "system/node_0/cpu_utilization_percentage" in series
    assert not list(home.glob("runs/*/*/ray/*.new"))
