"""PostgreSQL goes away under a real server while a run is under way, and comes back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from serverless_gpu import distributed
from serverless_gpu.ambient import new_run_id
from tests.e2e.conftest import FAKES
from tests.e2e.remote.conftest import end_node
from tests.support.golden import golden
from tests.support.local.observe import cancel_all, wait_for
from tests.support.remote.commands import spawn
from tests.support.remote.server_process import ServerProcess
from tests.support.server.postgres import cluster

pytestmark = pytest.mark.slow


@distributed(gpus=2, gpu_type="H100", remote=True, quiet=True)
def wait_for_go(directory: str) -> str:
    rank = os.environ["RANK"]
    with open(f"{directory}/began.{rank}", "a") as file:
        file.write("once\n")
    while not os.path.exists(f"{directory}/go"):
        time.sleep(0.05)
    return f"rank {rank}"


def test_F35_a_run_that_ends_while_the_database_is_away_is_not_lost_and_not_repeated(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", FAKES)
    began = [tmp_path / "began.0", tmp_path / "began.1"]
    with cluster() as postgres:
        server = ServerProcess(home, f"database={postgres.url(postgres.new_database())}")
        server.start()
        try:
            run = wait_for_go.submit(str(tmp_path))
            wait_for(lambda: all(path.exists() for path in began), "both ranks have begun", limit_s=60)
            postgres.stop()
            (tmp_path / "go").touch()
            results = home / "runs" / run.id / "1" / "results"
            wait_for(lambda: len(list(results.glob("*.pkl"))) == 2, "the node has both results", limit_s=60)
            postgres.start()
            assert run.results() == ["rank 0", "rank 1"]
            assert [path.read_text() for path in began] == ["once\n", "once\n"]
        finally:
            cancel_all(home)
            server.kill(signal.SIGTERM)
            end_node(home)


@pytest.mark.long
def test_22B9_commands_about_a_run_say_that_the_database_is_away_and_exit_with_75(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster() as postgres:
        server = ServerProcess(home, f"database={postgres.url(postgres.new_database())}", "node=false")
        server.start()
        try:
            run = wait_for_go.submit(str(tmp_path))
            postgres.stop()
            monkeypatch.setenv("SERVERLESS_GPU_PATIENCE", "0.5")
            for command in ("attach", "show", "result"):
                for run_id in (run.id, new_run_id()):
                    with spawn(command, run_id) as asking:
                        _, err = asking.communicate(timeout=60)
                    assert (asking.returncode, golden("local.results.run") in err) == (75, False), err
                    assert "database" in err
            postgres.start()
            monkeypatch.delenv("SERVERLESS_GPU_PATIENCE")
            with spawn("show", new_run_id()) as asking:
                _, err = asking.communicate(timeout=60)
            assert (asking.returncode, golden("local.results.run") in err) == (1, True), err
            run.cancel()
        finally:
            server.kill(signal.SIGTERM)
            end_node(home)
