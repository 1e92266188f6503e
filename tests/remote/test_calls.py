"""Calls through a real server and its node, killed in the middle."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import serverless_gpu
from serverless_gpu import distributed
from serverless_gpu.errors import RankCrashed, RunCancelled
from tests.local.observe import wait_for
from tests.remote.server_process import ServerProcess


@distributed(gpus=2, gpu_type="H100", remote=True)
def count(where: str, rank: int = 0) -> int:
    """Say lines until a file appears; the first user byte leaves a mark."""
    Path(where, f"began-{rank}-{os.getpid()}").touch()
    line = 0
    while not Path(where, "go").exists():
        print("line", line, flush=True)
        line += 1
        time.sleep(0.05)
    return rank


def began(where: Path) -> list[str]:
    """Return the processes that ran user code."""
    return sorted(path.name for path in where.glob("began-*"))


def test_a_call_returns_results_and_shows_lines(
    served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "go").touch()
    assert count.distributed(str(tmp_path)) == [0, 1]
    assert "2 GPUs verified free" in capsys.readouterr().err


def test_an_exception_arrives_as_its_own_type(served: Path) -> None:
    @distributed(gpus=2, gpu_type="H100", remote=True, quiet=True)
    def fail(rank: int = 0) -> None:
        if rank == 1:
            raise KeyError("rank 1")

    with pytest.raises(KeyError, match="rank 1") as caught:
        fail.distributed()
    assert "rank 1 on host" in caught.value.__notes__[0] and "`sgpu logs" in caught.value.__notes__[0]
    assert 'raise KeyError("rank 1")' in str(caught.value.__cause__)


def test_a_rank_that_is_killed_is_named(served: Path) -> None:
    @distributed(gpus=2, gpu_type="H100", remote=True, quiet=True)
    def die(rank: int = 0) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(RankCrashed) as caught:
        die.distributed()
    assert caught.value.rank == 1


def test_a_large_argument_and_a_large_result_come_back_the_same(served: Path) -> None:
    data = os.urandom(3_000_000)

    @distributed(gpus=2, gpu_type="H100", remote=True, quiet=True)
    def twice(given: bytes) -> bytes:
        return given + given

    assert twice.distributed(data) == [data + data] * 2


def test_a_run_is_found_from_its_id_and_cancelled(served: Path, tmp_path: Path) -> None:
    run = count.submit(str(tmp_path))
    wait_for(lambda: len(began(tmp_path)) == 2, "both ranks run")
    found = serverless_gpu.attach(run.id)
    assert found.status() == "RUNNING"
    wait_for(lambda: "line 3" in found.logs(), "lines are there")
    found.cancel()
    with pytest.raises(RunCancelled):
        run.results()
    assert run.receipt().gate


def test_F22_a_call_survives_the_kill_of_the_server(
    own_server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = count.submit(str(tmp_path))
    wait_for(lambda: len(began(tmp_path)) == 2, "both ranks run")
    wait_for(lambda: "line 3" in run.logs(), "lines are there")
    own_server.kill()
    mark = began(tmp_path)
    (tmp_path / "go").touch()
    own_server.start()
    assert run.follow() is None and run.results() == [0, 1]
    assert began(tmp_path) == mark, "user code ran once"
    out = capsys.readouterr().out.splitlines()
    assert out == [f"[rank 0] line {number}" for number in range(len(out))] and len(out) > 3
