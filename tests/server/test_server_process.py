"""A real server process: killed at any moment it comes back as it was; told to stop, it stops, and streams with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.errors import ServerUnavailable
from serverless_gpu.model.attempt import State
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.runs import AcceptedMessage, RunView, StreamMessage
from serverless_gpu.wire.state import Health
from tests.local.observe import wait_for
from tests.server.test_runs_api import Reader, request

_PROGRAM = """
import sys
import time
from pathlib import Path
from serverless_gpu.server.serving import serve
from serverless_gpu.server.settings import read_settings
settings = read_settings(Path(sys.argv[1]), {"node": False})
serve(settings, ready=lambda url, running: print(url, time.process_time(), flush=True))
"""


class Process:
    """A server in a process of its own.

    Attributes:
        url: its address.
        ready_s: processor time until it answered; what a clock says depends on what else runs here.
    """

    def __init__(self, home: Path) -> None:
        program = [sys.executable, "-c", _PROGRAM, str(home)]
        self._process = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url, ready_s = self._process.stdout.readline().split()
        self.ready_s = float(ready_s)
        self.token = (home / "server" / "token").read_text().strip()
        self.connection = Connection(self.url, self.token, patience_s=60)

    def end(self, number: signal.Signals) -> int:
        """Send a signal, wait, and return the exit status."""
        self.connection.close()
        if self._process.poll() is None:
            os.kill(self._process.pid, number)
        status = self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status


@pytest.fixture
def processes(home: Path) -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.end(signal.SIGKILL)


def test_it_answers_in_less_than_two_seconds(home: Path, processes: list[Process]) -> None:
    processes.append(Process(home))
    processes[0].end(signal.SIGTERM)
    processes.append(Process(home))  # files are in the cache now, as on a machine that is used
    assert processes[1].ready_s < 2


def test_told_to_stop_it_stops_in_order_and_its_streams_end(home: Path, processes: list[Process]) -> None:
    processes.append(Process(home))
    connection = processes[0].connection
    run = connection.ask("POST", "/runs", request(), answer=RunView)
    reader = Reader(connection.stream("GET", f"/runs/{run.id}/events", answer=StreamMessage))
    reader.until(AcceptedMessage)
    os.kill(processes[0]._process.pid, signal.SIGTERM)
    reader.all()
    assert processes[0].end(signal.SIGTERM) == 0
    log = (home / "server" / "server.log").read_text()
    assert "has stopped" in log and "Traceback" not in log and "cut off" not in log


def test_told_to_read_a_certificate_again_that_it_does_not_have_it_goes_on(
    home: Path, processes: list[Process]
) -> None:
    processes.append(Process(home))
    os.kill(processes[0]._process.pid, signal.SIGHUP)
    log = home / "server" / "server.log"
    wait_for(lambda: "no certificate to be read again" in log.read_text(), "it is said")
    assert processes[0].connection.ask("GET", "/health", answer=Health).ok
    assert processes[0].end(signal.SIGTERM) == 0


def test_killed_it_comes_back_with_every_run_it_said_yes_to(home: Path, processes: list[Process]) -> None:
    acknowledged: list[str] = []
    for _ in range(3):
        processes.append(Process(home))
        server = processes[-1]
        assert server.url == processes[0].url
        for run_id in acknowledged:
            assert server.connection.ask("GET", f"/runs/{run_id}", answer=RunView).state is State.QUEUED
        for _ in range(5):
            acknowledged.append(server.connection.ask("POST", "/runs", request(), answer=RunView).id)
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
    with pytest.raises(ServerUnavailable):
        Connection(processes[0].url, processes[0].token).ask("GET", "/runs", answer=RunView)
