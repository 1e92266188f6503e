"""A disk turns read-only under a server and its node, as one with errors does: named, and settled afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.client.remote.server import close_all
from serverless_gpu.errors import ServerUnavailable
from serverless_gpu.node.attempt.server_attempt_record import open_attempts
from serverless_gpu.node.base.home import Home
from serverless_gpu.server.db import database
from serverless_gpu.wire.access import PrincipalRequest, TokenMade
from serverless_gpu.wire.nodes import NodeList
from serverless_gpu.wire.runs import RunView
from tests.support.crash.machine import FAKES, WAIT_S, Machine
from tests.support.crash.scenarios import executions, submitted
from tests.support.homes import use_home
from tests.support.local.observe import processes_of, wait_for
from tests.support.small_disks import FailingDisk, failing_disk

pytestmark = pytest.mark.slow
SOON = "db.database.PROBE_NS=100000000"


@pytest.fixture
def disk() -> Iterator[FailingDisk]:
    """Yield a disk that can fail."""
    with failing_disk() as made:
        yield made


@pytest.fixture
def machine(disk: FailingDisk, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Yield a server with a node, both on the disk."""
    home = disk.path / "h"
    home.mkdir()
    made = Machine(home, f"sqlite:///{home}/server/server.db")
    use_home(monkeypatch, home, FAKES)
    made.start(SOON)
    try:
        yield made
    finally:
        kill_all(made)


def kill_all(machine: Machine) -> None:
    """End every process of a home at once, ranks first to last."""
    close_all()
    with contextlib.suppress(AssertionError):
        machine.send(signal.SIGKILL)
        machine.ended()

    def none_left() -> bool:
        for line in processes_of(machine.home):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.partition(":")[0]), signal.SIGKILL)
        return not processes_of(machine.home)

    wait_for(none_left, "no process of the home is left", limit_s=WAIT_S)


def health(machine: Machine) -> dict[str, str]:
    """Return what is wrong, by part."""
    with contextlib.closing(machine.connection()) as connection:
        found = connection.health()
    return {check.name: check.problem for check in found.checks if not check.ok}


def view(machine: Machine, run_id: str) -> RunView:
    with contextlib.closing(machine.connection()) as connection:
        return connection.ask("GET", f"/runs/{run_id}", answer=RunView)


def test_22B4_a_disk_that_turns_read_only_is_said_and_what_it_emptied_is_settled(
    machine: Machine, disk: FailingDisk, tmp_path: Path
) -> None:
    run = submitted(machine, tmp_path, -1)
    wait_for(lambda: executions(tmp_path) == 1, "user code has begun", limit_s=WAIT_S)
    wait_for(lambda: view(machine, run.id).state == "RUNNING", "it runs", limit_s=WAIT_S)
    disk.fail()
    wait_for(lambda: health(machine).get("database") == database.UNWRITABLE, "health says so", limit_s=WAIT_S)
    assert database.UNWRITABLE in view(machine, run.id).sentence
    with contextlib.closing(machine.connection()) as connection, pytest.raises(ServerUnavailable) as caught:
        connection.ask("POST", "/users", PrincipalRequest(name="one"), answer=TokenMade)
    assert caught.value.message == database.UNWRITABLE and "dmesg" in caught.value.hint
    (tmp_path / "go").touch()
    kill_all(machine)
    disk.repair()

    for path in (machine.home / "runs" / run.id / "1").iterdir():
        if path.is_file():
            os.truncate(path, 0)  # as the disk leaves what was not flushed; some of it may have been
    machine.start(SOON)
    wait_for(lambda: view(machine, run.id).state in ("LOST", "FAILED"), "the run has ended", limit_s=WAIT_S)
    assert view(machine, run.id).reason == "supervisor_killed", "it may have begun, so it is not repeated"
    assert executions(tmp_path) == 1
    second = tmp_path / "second"
    second.mkdir()
    assert submitted(machine, second, 1).results() == [b"x"]
    wait_for(lambda: not busy(machine), "the devices are free", limit_s=WAIT_S)
    machine.check()


def busy(machine: Machine) -> int:
    """Return how many devices are leased."""
    with contextlib.closing(machine.connection()) as connection:
        return sum(node.busy for node in connection.ask("GET", "/nodes", answer=NodeList).nodes)


@pytest.mark.parametrize("content", [b"", b"\0" * 300, b'{"run_id": "01'])
def test_22B4_an_attempt_whose_file_was_damaged_is_gone_on_with(tmp_path: Path, content: bytes) -> None:
    home = Home(tmp_path)
    directory = home.make_attempt("01kaz5w8000000000000000000", 2)
    (directory / "remote.json").write_bytes(content)
    ((found, remote),) = open_attempts(home.runs, "/profile")
    assert found == directory and remote.gang == "01kaz5w8000000000000000000:2" and remote.recovered
