"""A real MLflow server for tests, and what it has got, read through its REST interface."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.local.observe import wait_for

PYTHON = Path(sys.prefix) / "mlflow" / "bin" / "python"
READY_S = 120.0


def without_mlflow_variables() -> dict[str, str]:
    """Return this process's variables, but those of MLflow."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}


class MlflowServer:
    """`mlflow server` on a directory of its own.

    Args:
        directory: for database, artifacts and log.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self._port = sock.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        argv = [
            *(str(PYTHON), "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self._port)),
            *("--workers", "1", "--backend-store-uri", f"sqlite:///{self._directory}/mlflow.db"),
            *("--artifacts-destination", str(self._directory / "artifacts")),
        ]
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with open(self._directory / "server.log", "wb") as log:
            self._process = subprocess.Popen(
                argv, stdout=log, stderr=log, env={**without_mlflow_variables(), **quiet}, start_new_session=True
            )
        wait_for(self._answers, "MLflow's server answers", limit_s=READY_S)

    def stop(self) -> None:
        """End it and what it started."""
        if self._process is not None:
            os.killpg(self._process.pid, 15)
            self._process.wait(50)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Have it stand still meanwhile: it is connected to, and answers nothing until afterwards."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def post(self, path: str, /, **body: object) -> dict[str, Any]:
        """Call its REST interface."""
        request = urllib.request.Request(
            f"{self.uri}/api/2.0/mlflow/{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return dict(json.load(answer))

    def get(self, path: str, /, **query: str) -> dict[str, Any]:
        """Ask its REST interface."""
        url = f"{self.uri}/api/2.0/mlflow/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return dict(json.load(answer))

    def experiment(self, name: str) -> str:
        """Return the number of an experiment, made if it is not there."""
        try:
            found = self.get("experiments/get-by-name", experiment_name=name)
            return str(found["experiment"]["experiment_id"])
        except urllib.error.HTTPError:
            return str(self.post("experiments/create", name=name)["experiment_id"])

    def new_run(self, experiment: str, name: str, tags: Mapping[str, str] | None = None) -> str:
        """Make a run and return its identifier."""
        body = [{"key": key, "value": value} for key, value in (tags or {}).items()]
        made = self.post(
            "runs/create", experiment_id=self.experiment(experiment), run_name=name, start_time=1, tags=body
        )
        return str(made["run"]["info"]["run_id"])

    def run(self, run_id: str) -> MlflowRun:
        """Return a run as it is now."""
        return MlflowRun(self.get("runs/get", run_id=run_id)["run"])

    def runs(self, experiment: str) -> list[MlflowRun]:
        """Return the runs of an experiment."""
        found = self.post("runs/search", experiment_ids=[self.experiment(experiment)], max_results=1000)
        return [MlflowRun(run) for run in found.get("runs", [])]

    def history(self, run_id: str, key: str) -> list[tuple[int, float]]:
        """Return step and value of all points of a series, in the order of steps."""
        found = self.get("metrics/get-history", run_id=run_id, metric_key=key)
        return sorted((int(point.get("step", 0)), float(point["value"])) for point in found.get("metrics", []))

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, (self._directory / "server.log").read_text()
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


class MlflowRun:
    """A run, as MLflow's REST interface has it."""

    def __init__(self, body: dict[str, Any]) -> None:
        info, data = body["info"], body.get("data", {})
        self.run_id = str(info["run_id"])
        self.name = str(info.get("run_name", ""))
        self.status = str(info["status"])
        self.experiment_id = str(info["experiment_id"])
        self.params = {each["key"]: each["value"] for each in data.get("params", [])}
        self.tags = {each["key"]: each["value"] for each in data.get("tags", [])}
        self.metrics = {each["key"]: float(each["value"]) for each in data.get("metrics", [])}
