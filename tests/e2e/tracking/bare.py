"""Ranks without a node: processes with MLflow in which `mlflow_hook` is installed, and a tracking.json made by hand.

BareRanks.run("two_starts", ranks=2) ──▶ 2 × python -m tests.e2e.tracking.bare_rank <directory> two_starts
"""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serverless_gpu.model.placement import TRACKED_PRESETS
from tests.support.tracking.mlflow_server import PYTHON, MlflowServer, without_mlflow_variables

LIMIT_S = 200
VALUE = "value: "


class Ended:
    """What ranks returned and wrote."""

    def __init__(self, outputs: list[tuple[int, str, str]]) -> None:
        self.codes = [code for code, _, _ in outputs]
        self.stdout = [out for _, out, _ in outputs]
        self.stderr = [err for _, _, err in outputs]
        self.values: list[Any] = [_value(out) if code == 0 else None for code, out, _ in outputs]
        self.said = [line for err in self.stderr for line in err.splitlines() if line.startswith("serverless-gpu: ")]


def _value(output: str) -> Any:
    """Return what the function returned; MLflow may have something to say at the end of the process."""
    return next(json.loads(line[len(VALUE) :]) for line in output.splitlines() if line.startswith(VALUE))


class BareRanks:
    """Starts ranks of one attempt.

    Args:
        directory: gets the attempt's directory.
        server: of MLflow.
        experiment: name of the experiment in which the job has its run.
    """

    def __init__(self, directory: Path, server: MlflowServer, experiment: str) -> None:
        self.server = server
        self.uri = server.uri
        self.experiment = experiment
        self.attempt = directory / "runs" / "a" / "1"
        self.attempt.mkdir(parents=True)
        self.work = directory / "work"
        self.work.mkdir()
        self.job = server.new_run(experiment, "jobTaskRun-a")
        self.say("ready")

    def environ(self) -> dict[str, str]:
        """Return what the monitor says of the job's run."""
        return {
            "MLFLOW_TRACKING_URI": self.uri,
            "MLFLOW_RUN_ID": self.job,
            "MLFLOW_EXPERIMENT_ID": self.server.experiment(self.experiment),
        }

    def say(self, state: str, sentence: str = "") -> None:
        """Write tracking.json as the monitor does."""
        said = {"state": state, "environ": self.environ() if state == "ready" else {}, "sentence": sentence}
        (self.attempt / "tracking.json.tmp").write_text(json.dumps(said))
        (self.attempt / "tracking.json.tmp").rename(self.attempt / "tracking.json")

    def start(
        self, name: str, *, ranks: int = 1, environ: Mapping[str, str] | None = None
    ) -> list[subprocess.Popen[str]]:
        """Start ranks that run a function of `user_code`."""
        with socket.create_server(("127.0.0.1", 0)) as sock:
            master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(sock.getsockname()[1])}
        return [
            subprocess.Popen(
                [str(PYTHON), "-m", "tests.e2e.tracking.bare_rank", str(self.attempt), name, str(self.work)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={
                    **without_mlflow_variables(),
                    **TRACKED_PRESETS,
                    **master,
                    **{
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(ranks),
                        "PYTHONWARNINGS": "ignore",
                    },
                    **(environ or {}),
                },
            )
            for rank in range(ranks)
        ]

    def run(self, name: str, *, ranks: int = 1, environ: Mapping[str, str] | None = None) -> Ended:
        """Run a function of `user_code` in ranks, until all have ended."""
        processes = self.start(name, ranks=ranks, environ=environ)
        outputs: dict[int, tuple[int, str, str]] = {}

        def collect(rank: int, process: subprocess.Popen[str]) -> None:
            try:
                out, err = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
            outputs[rank] = (process.returncode, out, err)

        threads = [threading.Thread(target=collect, args=item) for item in enumerate(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return Ended([outputs[rank] for rank in range(ranks)])
