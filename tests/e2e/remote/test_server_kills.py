"""The real server, uplink and agent, killed at named places and started again; user code runs once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serverless_gpu import faults
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink import start_stop
from tests.e2e.remote.calling import WAIT_S, answer, called, go, runs_of
from tests.support.local.observe import wait_for

pytestmark = pytest.mark.slow


class Server:
    """`sgpu up` of a home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.process: subprocess.Popen[str] | None = None

    def start(self, fault: str = "") -> None:
        """Start it, with a fault point or without, and wait until it answers."""
        environ = {**os.environ, "SERVERLESS_GPU_FAKE": "H100:2"}
        if fault:
            environ[faults.VARIABLE] = fault
        self.process = subprocess.Popen(
            [sys.executable, "-m", "serverless_gpu.cli", "up"], stdout=subprocess.PIPE, text=True, env=environ
        )
        assert self.process.stdout is not None
        assert " at http://" in self.process.stdout.readline()

    def wait_killed(self) -> None:
        """Wait until the fault point has ended it."""
        assert self.process is not None and self.process.stdout is not None
        assert self.process.wait(WAIT_S) == -signal.SIGKILL
        self.process.stdout.close()

    def stop(self, number: int = signal.SIGKILL) -> None:
        """End it."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(WAIT_S)
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def server(home: Path) -> Iterator[Server]:
    """Yield a server of a home of its own, not started yet."""
    server = Server(home)
    try:
        yield server
    finally:
        server.stop()
        start_stop.stop_all(Home(home))


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Callable[[float], subprocess.Popen[str]]]:
    """Yield what makes a remote call from a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(seconds: float) -> subprocess.Popen[str]:
        started.append(called(tmp_path / "ran", seconds))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.long
def test_F31_F33_a_server_killed_and_started_again_returns_the_result_of_one_execution_to_a_script(
    server: Server, call: Callable[[float], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """At one place, with the command and a script as people have them; all places: tests/crash."""
    server.start(fault="after_upload_before_state")
    caller = call(0.2)
    server.wait_killed()
    server.start()
    assert answer(caller) == "done"
    assert runs_of(tmp_path / "ran") == 1


def test_F32_an_uplink_killed_after_the_launch_before_the_ack_finds_the_attempt_again(
    server: Server, call: Callable[[float], subprocess.Popen[str]], tmp_path: Path, home: Path
) -> None:
    server.start(fault="after_launch_before_ack")
    profile = home / "server" / "node.json"
    wait_for(lambda: start_stop.running(Home(home), profile) is not None, "there is an uplink", WAIT_S)
    first = start_stop.running(Home(home), profile)
    caller = call(90)
    wait_for(lambda: start_stop.running(Home(home), profile) not in (None, first), "there is another uplink", WAIT_S)
    server.stop(signal.SIGTERM)  # it starts uplinks that die at the same place
    start_stop.stop_all(Home(home))
    server.start()
    go(tmp_path / "ran")
    assert answer(caller) == "done"
    assert runs_of(tmp_path / "ran") == 1


def test_a_server_killed_in_the_middle_of_a_run_costs_the_caller_one_line(
    server: Server, call: Callable[[float], subprocess.Popen[str]], tmp_path: Path
) -> None:
    server.start()
    caller = call(90)
    wait_for(lambda: runs_of(tmp_path / "ran") == 1, "the run has begun", WAIT_S)
    server.stop()
    server.start()
    go(tmp_path / "ran")
    assert answer(caller) == "done"
    assert runs_of(tmp_path / "ran") == 1
