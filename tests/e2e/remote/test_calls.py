"""Calls through a real server and its node, killed in the middle."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

import serverless_gpu
from serverless_gpu import distributed
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.errors import InvalidValue, RankCrashed, RunCancelled, UntrustedResult
from serverless_gpu.node.attempt.server_attempt_record import read_remote
from serverless_gpu.node.base.home import Home
from serverless_gpu.wire.access import PrincipalRequest, TokenMade
from serverless_gpu.wire.connection import Connection
from tests.support.golden import golden
from tests.support.local.observe import run_script, wait_for
from tests.support.remote.server_process import ServerProcess


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
    assert "verified free" in capsys.readouterr().err


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
    wait_for(lambda: found.status() == "RUNNING", "the server knows that they do")
    wait_for(lambda: "line 3" in found.logs(), "lines are there")
    found.cancel()
    with pytest.raises(RunCancelled):
        run.results()
    assert run.receipt().gate


def test_F31_F33_a_call_survives_the_kill_of_the_server(
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


def test_many_runs_wait_their_turn_and_come_as_they_end(served: Path) -> None:
    @distributed(gpus=4, gpu_type="H100", remote=True, quiet=True)
    def square(number: int) -> int:
        return number * number

    runs = square.map(range(6))
    assert sorted(run.result(3) for run in serverless_gpu.as_completed(runs, timeout=60)) == [0, 1, 4, 9, 16, 25]


def test_a_cell_goes_through_the_server(served: Path, tmp_path: Path) -> None:
    program = tmp_path / "cell.py"
    program.write_text(CELL)
    done = run_script(program)
    assert done.returncode == 0, done.stderr
    assert golden("remote.calls.rank-cell") in done.stdout and "values [5, 6]" in done.stdout


CELL = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_cell("%load_ext serverless_gpu")
shell.run_cell("y = 5")
line = "%%distributed --gpus 2 --gpu-type H100 --remote --quiet"
print("values", shell.run_cell(line + "\\nprint('in the cell', rank)\\ny + rank").result)
"""


def test_another_principal_sees_no_run_that_is_not_theirs_and_their_results_are_not_loaded(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = find_profile(served, {})
    with contextlib.closing(Connection(profile.url, profile.token)) as admin:
        made = admin.ask("POST", "/users", PrincipalRequest(name="bob"), answer=TokenMade)
    mine = answer.submit()
    assert mine.results() == [42]
    directory = Home(served).attempt(mine.id, 1)
    wait_for(lambda: (said := read_remote(directory)) and said.standing == "settled", "nothing of it writes any more")
    with monkeypatch.context() as as_bob:
        as_bob.setenv("SERVERLESS_GPU_SERVER", profile.url)
        as_bob.setenv("SERVERLESS_GPU_TOKEN", made.secret)
        shutil.rmtree(served / "remote" / mine.id)
        shutil.rmtree(served / "runs" / mine.id)
        with pytest.raises(InvalidValue, match=re.escape(golden("local.results.run"))):
            serverless_gpu.attach(mine.id)
        theirs = answer.submit()
        assert theirs.results() == [42]
    shutil.rmtree(served / "remote" / theirs.id)
    with pytest.raises(UntrustedResult, match="belongs to bob"):
        serverless_gpu.attach(theirs.id).results()
    assert serverless_gpu.attach(theirs.id, allow_pickle_from=["bob"]).results() == [42]


@distributed(gpus=1, gpu_type="H100", remote=True, quiet=True, env="live")
def answer() -> int:
    """Return a number."""
    return 42
