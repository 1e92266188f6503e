"""A real server process: killed at any moment it comes back as it was; told to stop, it stops, and streams with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.errors import ServerUnavailable
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.runs import AcceptedMessage, RunView, StreamMessage
from serverless_gpu.wire.server_status import Health
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.server.runs_api import Reader, request
from tests.support.server.server_process import Process


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
    wait_for(lambda: golden("server.server_process.certificate-read-again") in log.read_text(), "it is said")
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
