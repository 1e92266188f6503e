"""Runs with a Ray cluster through a server: their one result, how a lost head is told, and another attempt for it.

Ray itself is the fake of tests/support/local/fake_ray.py; with the real one it is tests/e2e/ray.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from serverless_gpu import attach
from serverless_gpu.errors import EngineHeadLost
from serverless_gpu.ray import ray_launch
from tests.support.golden import golden
from tests.support.local import fake_ray
from tests.support.local.observe import Process, wait_for
from tests.support.local.ranks import wait_for_file


@pytest.fixture(autouse=True)
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a Ray in the caller's environment."""
    site = fake_ray.install(tmp_path)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))


def drive(where: str) -> tuple[str, str]:
    """Say which attempt this is, wait until it may go on, and say what it was told."""
    Path(where, f"attempt{os.environ['SGPU_FENCE']}").touch()
    wait_for_file(where, f"go{os.environ['SGPU_FENCE']}")
    return os.environ["CUDA_VISIBLE_DEVICES"], os.environ["RAY_ADDRESS"]


def lose_head(home: Path, run_id: str, where: Path, fence: int) -> str:
    """End the head of one attempt's cluster once its driver is there; return the cluster's directory."""
    wait_for((where / f"attempt{fence}").exists, f"the driver of attempt {fence} is there")
    directory = (home / "runs" / run_id / str(fence) / "ray" / "directory").read_text().strip()
    Process(fake_ray.pids(directory)["gcs_server"][0]).kill()
    return directory


def test_the_drivers_value_is_the_one_result_and_ray_is_named(
    served: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def is_said() -> bool:  # while it runs: who is gone before that is told has not waited for it
        said.append(capfd.readouterr().err)
        return "Ray 2.60.0: 1 node, 2 H100" in "".join(said)

    def end_it() -> None:
        with contextlib.suppress(AssertionError):
            wait_for(is_said, "it is said")
        (tmp_path / "go1").touch()

    watching = threading.Thread(target=end_it, daemon=True)
    watching.start()
    [[devices, address]] = ray_launch(gpus=2, gpu_type="H100", remote=True)(drive).distributed(str(tmp_path))
    watching.join(60)
    assert devices == "0,1" and address.startswith("127.0.0.1:")
    assert is_said(), said


def test_F45_a_lost_head_is_told_by_whoever_asks(served: Path, tmp_path: Path) -> None:
    run = ray_launch(gpus=2, gpu_type="H100", remote=True, quiet=True)(drive).submit(str(tmp_path))
    directory = lose_head(served, run.id, tmp_path, 1)
    for handle in (run, attach(run.id)):
        with pytest.raises(EngineHeadLost) as caught:
            handle.results(60)
        error = caught.value
        assert (error.reason, error.rank) == ("engine_head_lost", 0)
        assert "gcs_server" in error.message and os.uname().nodename in error.message
        assert golden("remote.ray_runs.ray-wrote-node") in error.hint
    assert not os.path.lexists(directory)
    assert run.status() == "FAILED"


@pytest.mark.long
def test_F45_another_attempt_is_made_where_it_was_asked_for(served: Path, tmp_path: Path) -> None:
    run = ray_launch(gpus=2, gpu_type="H100", remote=True, retries=1, quiet=True)(drive).submit(str(tmp_path))
    directory = lose_head(served, run.id, tmp_path, 1)
    (tmp_path / "go2").touch()
    assert [devices for devices, _ in run.results(60)] == ["0,1"]
    assert not os.path.lexists(directory) and (tmp_path / "attempt2").exists()
