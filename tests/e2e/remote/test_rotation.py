"""A machine's own node goes on after its server's key and tokens were rotated."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.remote.calling import WAIT_S, answer, called, go, runs_of
from tests.support.local.observe import wait_for
from tests.support.remote.server_process import ServerProcess


@pytest.mark.long
def test_22A1_runs_go_on_over_a_rotation_and_new_ones_start(own_server: ServerProcess, tmp_path: Path) -> None:
    going = called(tmp_path / "going", 90)
    wait_for(lambda: runs_of(tmp_path / "going") == 1, "the run has begun", WAIT_S)
    own_server.kill(signal.SIGTERM)
    rotated = subprocess.run(
        [sys.executable, "-m", "serverless_gpu.cli", "server", "rotate", "--yes"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert rotated.returncode == 0, rotated.stderr
    own_server.start()
    later = called(tmp_path / "later", 0)
    assert answer(later) == "done"
    go(tmp_path / "going")
    assert answer(going) == "done"
    assert (runs_of(tmp_path / "going"), runs_of(tmp_path / "later")) == (1, 1)
