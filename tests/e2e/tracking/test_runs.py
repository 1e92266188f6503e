"""Whole runs, from a driver's script to a real MLflow server: the surface page's usages 2, 3 and 6, and others."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.golden import golden
from tests.support.local.observe import cancel_all, wait_for
from tests.support.paths import REPOSITORY
from tests.support.tracking.mlflow_server import PYTHON, MlflowRun, MlflowServer, without_mlflow_variables

pytestmark = [pytest.mark.timeout(300), pytest.mark.torch]

LIMIT_S = 200
HEAD = """
import os, sys
import mlflow
import torch
import torch.distributed as dist
from serverless_gpu import distributed

"""


class Driver:
    """Runs scripts where MLflow is installed, as their user would.

    Args:
        server: of MLflow.
        directory: for the scripts.
        experiment: that runs belong to.
    """

    def __init__(self, server: MlflowServer, directory: Path, experiment: str) -> None:
        self.server = server
        self.experiment = experiment
        self._directory = directory

    def run(self, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a script and return what it printed."""
        script = self._directory / "driver.py"
        script.write_text(HEAD + textwrap.dedent(code))
        known = {"MLFLOW_TRACKING_URI": self.server.uri, "MLFLOW_EXPERIMENT_NAME": self.experiment}
        return subprocess.run(
            [str(PYTHON), str(script)],
            capture_output=True,
            text=True,
            env={**without_mlflow_variables(), **known, **environ},
            cwd=self._directory,
            check=False,
            timeout=LIMIT_S,
        )

    def ended(self, status: str) -> MlflowRun:
        """Wait until the experiment's one run has ended so, and has its receipt."""

        def look() -> MlflowRun | None:
            runs = self.server.runs(self.experiment)
            assert len(runs) <= 1, [vars(run) for run in runs]
            return runs[0] if runs and runs[0].status == status and self._has(runs[0].run_id, "receipt.json") else None

        found = wait_for(look, f"the run is {status} and has its receipt", limit_s=60)
        assert found is not None
        return found

    def _has(self, run_id: str, name: str) -> bool:
        files = self.server.get("artifacts/list", run_id=run_id).get("files", [])
        return any(file["path"].rpartition("/")[2] == name or file.get("is_dir") for file in files)


@pytest.fixture
def driver(
    mlflow_server: MlflowServer,
    home: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Driver]:
    """Yield what runs scripts in a home of its own, on fakes."""
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", "H100:8")
    yield Driver(mlflow_server, tmp_path, f"/tests/{request.node.name}")
    cancel_all(home)


def test_usage_2_every_rank_logs_without_start_run(driver: Driver) -> None:
    done = driver.run(
        """
        @distributed(gpus=8, gpu_type="H100")
        def train(num_epochs=1, batch_size=8):
            dist.init_process_group("gloo")
            for epoch in range(num_epochs):
                loss = torch.tensor([1.0 / (epoch + 1)])
                dist.all_reduce(loss)
                mlflow.log_metric("loss", loss.item(), step=epoch)
            dist.destroy_process_group()

        if __name__ == "__main__":
            print(train.distributed(num_epochs=3, batch_size=1))
        """
    )
    assert done.returncode == 0, done.stderr
    assert golden("tracking.runs.none-none-none") in done.stdout
    run = driver.ended("FINISHED")
    assert run.name.startswith("jobTaskRun-")
    assert {step for step, _ in driver.server.history(run.run_id, "loss")} == {0, 1, 2}
    assert run.params["sgpu.gpus"] == "8"
    assert f"/runs/{run.run_id}" in done.stdout + done.stderr, "the link is printed"
    assert any(key.startswith("system/node_0/") for key in run.metrics), run.metrics


@pytest.mark.spot
def test_usage_3_a_named_run_with_artifacts_on_all_ranks(driver: Driver) -> None:
    done = driver.run(
        """
        NUM_WORKERS = 2

        @distributed(gpus=NUM_WORKERS, gpu_type="H100")
        def train(num_workers=NUM_WORKERS):
            rank = int(os.environ.get("RANK", 0))
            os.makedirs(f"out{rank}", exist_ok=True)
            with open(f"out{rank}/shard-{rank}.txt", "w") as file:
                file.write("saved")
            with mlflow.start_run(run_name="fsdp_tutorial", log_system_metrics=True):
                mlflow.log_param("num_workers", num_workers)
                mlflow.log_metric("loss", 0.5, step=1)
                mlflow.log_artifacts(f"out{rank}", artifact_path="checkpoint")
            return {"losses": [0.5], "workers": num_workers, "name": "fsdp", "ok": True}

        if __name__ == "__main__":
            print(train.distributed()[0])
        """
    )
    assert done.returncode == 0, done.stderr
    assert golden("tracking.runs.text") in done.stdout
    run = driver.ended("FINISHED")
    assert (run.name, run.params["num_workers"]) == ("fsdp_tutorial", "2")
    files = driver.server.get("artifacts/list", run_id=run.run_id, path="checkpoint")["files"]
    assert [file["path"] for file in files] == ["checkpoint/shard-0.txt", "checkpoint/shard-1.txt"]


def test_usage_6_the_run_id_is_returned_by_a_rank(driver: Driver) -> None:
    done = driver.run(
        """
        @distributed(gpus=8, gpu_type="H100", remote=False)
        def train(config):
            if int(os.environ["RANK"]) != 0:
                return None
            mlflow.log_param("base_model", config["base_model"])
            run = mlflow.last_active_run()
            return run.info.run_id if run is not None else None

        if __name__ == "__main__":
            print("run", train.distributed({"base_model": "olmo"})[0])
        """
    )
    assert done.returncode == 0, done.stderr
    run = driver.ended("FINISHED")
    assert f"run {run.run_id}\n" in done.stdout
    assert run.params["base_model"] == "olmo"


def test_a_run_that_the_driver_has_made_is_resumed_by_ranks_and_ended_by_the_driver(driver: Driver) -> None:
    run_id = driver.server.new_run(driver.experiment, "the driver's")
    done = driver.run(
        """
        @distributed(gpus=2, gpu_type="H100")
        def train():
            with mlflow.start_run() as run:
                mlflow.log_metric("loss", 1.0, step=int(os.environ["RANK"]))
            return run.info.run_id

        if __name__ == "__main__":
            print(train.distributed())
            print(mlflow.get_run(os.environ["MLFLOW_RUN_ID"]).info.status)
        """,
        MLFLOW_RUN_ID=run_id,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(run_id) >= 2 and "RUNNING" in done.stdout
    assert {step for step, _ in driver.server.history(run_id, "loss")} == {0, 1}
    assert [run.run_id for run in driver.server.runs(driver.experiment)] == [run_id]


def test_a_run_below_the_drivers_active_one(driver: Driver) -> None:
    done = driver.run(
        """
        @distributed(gpus=2, gpu_type="H100")
        def train():
            mlflow.log_metric("loss", 1.0)
            return mlflow.active_run().info.run_id

        if __name__ == "__main__":
            with mlflow.start_run() as parent:
                child = train.distributed()[0]
            print("parent", parent.info.run_id, "child", child)
        """
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("parent ")[1].split()
    parent, child = words[0], words[2]
    assert parent != child
    assert driver.server.run(child).tags["mlflow.parentRunId"] == parent
    assert driver.server.run(parent).status == "FINISHED"


def test_a_failure_is_one_in_mlflow_with_its_last_point(driver: Driver) -> None:
    done = driver.run(
        """
        @distributed(gpus=2, gpu_type="H100")
        def train():
            mlflow.log_metric("loss", 3.0, step=7)
            if int(os.environ["RANK"]) == 1:
                raise ValueError("diverged")
            dist.init_process_group("gloo")

        if __name__ == "__main__":
            train.distributed()
        """
    )
    assert done.returncode == 1 and "ValueError: diverged" in done.stderr
    run = driver.ended("FAILED")
    assert (7, 3.0) in driver.server.history(run.run_id, "loss")


@pytest.fixture
def example(driver: Driver) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs the example, with variables."""

    def run(**environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(PYTHON), str(REPOSITORY / "examples" / "mlflow_digits.py")],
            capture_output=True,
            text=True,
            env={**without_mlflow_variables(), "SERVERLESS_GPU_FAKE": "CPU:2", "CUDA_VISIBLE_DEVICES": "", **environ},
            check=False,
            timeout=LIMIT_S,
        )

    return run


def test_mlflow_digits_registers_a_model_and_loads_it_back(
    example: Callable[..., subprocess.CompletedProcess[str]], mlflow_server: MlflowServer
) -> None:
    done = example(MLFLOW_TRACKING_URI=mlflow_server.uri)
    assert done.returncode == 0, done.stdout + done.stderr
    assert golden("tracking.runs.digits-version-loaded") in done.stdout


def test_mlflow_digits_needs_no_server(example: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Against the home's own store, behind the server that is started for it."""
    done = example()
    assert done.returncode == 0, done.stdout + done.stderr
    assert golden("tracking.runs.digits-version-loaded") in done.stdout
