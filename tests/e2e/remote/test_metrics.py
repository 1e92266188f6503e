"""Samples of a run of a server: they lie with the server, and the client has the same picture of it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import serverless_gpu
from serverless_gpu import distributed
from tests.support.local.observe import wait_for

GPU = "system/node_0/gpu_1_utilization_percentage"


@distributed(gpus=2, gpu_type="H100", remote=True, quiet=True)
def compute(where: str) -> None:
    while not Path(where, "go").exists():
        sum(range(10_000))
        time.sleep(0.001)


def test_samples_come_while_it_goes_on_and_stay_with_the_server(served: Path, tmp_path: Path) -> None:
    run = compute.submit(str(tmp_path))
    wait_for(lambda: len(run.metrics().get(GPU, ([], []))[0]) >= 2, "samples at the server", limit_s=60)
    (tmp_path / "go").touch()
    run.results()
    run.receipt()
    again = serverless_gpu.attach(run.id)
    assert len(again.metrics()[GPU].times) >= 2
    assert not list(run.directory.glob("logs/*.telemetry")), "they are read from the server"
    figure = again.plot(tmp_path / "run.png")
    assert any("2 H100 (fake)" in text.get_text() for text in figure.texts)
    shown = subprocess.run(
        [sys.executable, "-m", "serverless_gpu.cli", "metrics", run.id], capture_output=True, text=True, timeout=60
    )
    assert GPU in shown.stdout


def test_a_cancelled_run_is_marked(served: Path, tmp_path: Path) -> None:
    run = compute.submit(str(tmp_path))
    wait_for(lambda: run.metrics().get(GPU) is not None, "a sample at the server", limit_s=60)
    run.cancel()
    run.wait()
    run.receipt()
    texts = [text.get_text() for text in run.plot().texts]
    assert any("CANCELLED (cancelled)" in text for text in texts)
