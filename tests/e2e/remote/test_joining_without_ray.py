"""`sgpu join` without a host: a node of a server that uses no Ray, as the unit of `sgpu node unit` starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.errors import ServerUnavailable
from serverless_gpu.node.attempt.server_attempt_record import open_attempts
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink import start_stop
from serverless_gpu.node.uplink.presence import NodePresence
from serverless_gpu.testing import stop_agent
from tests.support.local.observe import processes_of, wait_for
from tests.support.remote.commands import sgpu, start
from tests.support.remote.server_process import ServerProcess

pytestmark = pytest.mark.slow


@pytest.fixture
def node_home() -> Iterator[Path]:
    """Yield the home of a second machine. End its processes afterwards."""
    with tempfile.TemporaryDirectory(prefix="sg-", dir="/tmp") as place:
        yield Path(place)
        start_stop.stop_all(Home(Path(place)))
        stop_agent(Path(place))
        wait_for(lambda: not processes_of(Path(place)), "no process of the node is left")


class Joined:
    """A process of `sgpu join`."""

    def __init__(self, home: Path, file: Path) -> None:
        environ = {**os.environ, "SERVERLESS_GPU_HOME": str(home), "SERVERLESS_GPU_FAKE": "H100:1"}
        command = [sys.executable, "-m", "serverless_gpu.cli", "join", "--token-file", str(file), "--name", "gpu 2"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ, text=True
        )

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def stop(self) -> str:
        self._process.send_signal(signal.SIGTERM)
        return self._process.communicate(timeout=30)[0]


def test_a_machine_joins_without_ray_and_its_run_survives_a_restart_of_the_command(
    home: Path, node_home: Path, tmp_path: Path
) -> None:
    server = ServerProcess(home, "node=false")
    server.start()
    try:
        file = tmp_path / "join.json"
        sgpu("node", "invite", "--out", str(file))
        first = Joined(node_home, file)
        assert first.line().endswith(server.url)
        run = start(
            "sh",
            "-c",
            f"touch {tmp_path}/begun; until [ -e {tmp_path}/go ]; do sleep 0.02; done; echo done",
            environment="live",
        )
        wait_for((tmp_path / "begun").exists, "the run has begun")
        assert "1 run continues" in first.stop()
        assert NodePresence(Home(node_home)).offer(()).draining != ""
        # The join file is used up, so the machine joins again with its own token.
        again = Joined(node_home, file)
        assert again.line().endswith(server.url)
        (tmp_path / "go").touch()
        assert run.receipt(60).state == "SUCCEEDED"
        wait_for(
            lambda: not list(open_attempts(Home(node_home).runs, str(node_home / "node/profile.json"))), "reported"
        )
        assert "No runs were" in again.stop()
        assert start_stop.running(Home(node_home), node_home / "node" / "profile.json") is None
    finally:
        server.kill(signal.SIGTERM)


def test_ray_options_need_the_host_of_a_ray_pool(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "join.json"
    file.write_text('{"server": "http://127.0.0.1:1", "token": "sgpu_x"}')
    file.chmod(0o600)
    refused = sgpu("join", "--token-file", str(file), "--ray-port", "8100")
    assert (refused.exit_code, "need HOST" in refused.stderr) == (2, True)
    with pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1"):
        sgpu("join", "--token-file", str(file))
