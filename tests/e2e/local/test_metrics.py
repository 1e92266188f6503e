"""Samples of real runs: `Run.metrics()`, `Run.plot()`, `sgpu top` and `sgpu show`, from the monitor of this node."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import serverless_gpu
from serverless_gpu import Run, distributed
from serverless_gpu.testing import stop_agent
from tests.support.golden import golden
from tests.support.local.observe import wait_for

GPU = "system/node_0/gpu_1_utilization_percentage"


@distributed(gpus=2, gpu_type="H100", quiet=True)
def compute(where: str) -> None:
    while not Path(where, "go").exists():
        sum(range(10_000))
        time.sleep(0.001)


def sgpu(*arguments: str) -> str:
    command = [sys.executable, "-m", "serverless_gpu.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture
def run(warm: Path, tmp_path: Path) -> Run[None]:
    """Return a run that goes on until there is a file `go`, and has been sampled three times."""
    started = compute.submit(str(tmp_path))
    wait_for(lambda: len(started.metrics().get(GPU, ([], []))[0]) >= 3, "three samples of a GPU")
    return started


def test_a_run_is_sampled_while_it_goes_on_and_after_it(run: Run[None], tmp_path: Path) -> None:
    assert run.metrics()["system/node_0/rank_1_memory_usage_megabytes"].values[-1] > 1
    (tmp_path / "go").touch()
    run.results()
    run.receipt()  # the last sample comes before it
    ended = run.metrics()[GPU]
    assert len(ended.times) >= 3 and ended.times == sorted(ended.times)
    assert abs(ended.times[-1] - time.time()) < 60
    assert serverless_gpu.attach(run.id).metrics()[GPU] == ended
    assert len(run.receipt().uses) == 2
    figure = run.plot(tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 5_000
    assert any("2 H100 (fake)" in text.get_text() for text in figure.texts)
    shown = sgpu("show", run.id)
    assert golden("local.metrics.devices-busy-peak") in shown and "FAKE-H100-1" in shown


def test_top_shows_who_has_what(run: Run[None], tmp_path: Path) -> None:
    value = json.loads(sgpu("top", "--json"))
    owners = [row["owner"] for row in value["devices"] if row["kind"] == "fake"]
    assert [owner and (owner["run_id"], owner["rank"], owner["name"]) for owner in owners] == [
        (run.id, 0, "compute"),
        (run.id, 1, "compute"),
        *[None] * 6,
    ]
    assert [rank["rank"] for rank in value["runs"][0]["ranks"]] == [0, 1]
    assert golden("local.metrics.h100-fake-lent") in sgpu("top", "--once")
    assert "devices so far:" in sgpu("show", run.id)
    (tmp_path / "go").touch()
    run.results()


def test_top_starts_the_monitor_where_there_is_none(own: Path) -> None:
    command = [sys.executable, "-m", "serverless_gpu.cli", "top", "--once"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == golden("local.metrics.sgpu-monitor-runs")
    assert golden("local.metrics.h100-fake-lent-free") in done.stdout and "no runs" in done.stdout
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stderr == ""
    stop_agent(own)  # and the monitor, without which there is nothing here to end
