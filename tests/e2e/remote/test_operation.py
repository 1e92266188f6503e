"""`sgpu up` as systemd runs it: told to stop and started again while a run goes on, drained meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink import start_stop
from tests.e2e.remote.calling import WAIT_S, answer, called, go, runs_of
from tests.support.golden import golden
from tests.support.local.observe import wait_for

pytestmark = pytest.mark.slow


class Unit:
    """What systemd does with the unit: starts a process, waits for its word, stops that process and no other.

    Args:
        place: of the socket.
    """

    def __init__(self, place: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._listener.bind(str(place))
        self._listener.settimeout(WAIT_S)
        self._place = place
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it says that it is ready."""
        environ = {**os.environ, "SERVERLESS_GPU_FAKE": "H100:2", "NOTIFY_SOCKET": str(self._place)}
        command = [sys.executable, "-m", "serverless_gpu.cli", "up"]
        self.process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
        assert self._listener.recv(100) == b"READY=1"

    def stop(self) -> None:
        """Stop it as KillMode=process does; it has to say so, and to end well."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self._listener.recv(100) == b"STOPPING=1"
        assert self.process.wait(WAIT_S) == 0

    def close(self) -> None:
        """End it, however it is."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        self._listener.close()


@pytest.fixture
def systemd_unit(home: Path) -> Iterator[Unit]:
    """Yield a unit of a home of its own."""
    unit = Unit(home / "notify")
    try:
        yield unit
    finally:
        unit.close()
        start_stop.stop_all(Home(home))


def sgpu(*words: str) -> str:
    """Return what a command says."""
    ran = subprocess.run(
        [sys.executable, "-m", "serverless_gpu.cli", *words], capture_output=True, text=True, timeout=WAIT_S
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_F53_a_restart_by_systemd_leaves_a_run_alone_and_a_drain_outlives_it(
    systemd_unit: Unit, tmp_path: Path
) -> None:
    systemd_unit.start()
    first = called(tmp_path / "first", 90)
    wait_for(lambda: runs_of(tmp_path / "first") == 1, "the run has begun", WAIT_S)
    assert sgpu("server", "drain", "--note", "new kernel") == golden("remote.operation.nothing-new-started")
    second = called(tmp_path / "second", 0)
    wait_for(lambda: "1 waiting" in sgpu("status"), "the second one waits", WAIT_S)
    systemd_unit.stop()
    systemd_unit.start()
    assert golden("remote.operation.new-kernel-nothing") in sgpu("status")
    go(tmp_path / "first")
    assert answer(first) == "done"
    assert (runs_of(tmp_path / "first"), runs_of(tmp_path / "second")) == (1, 0)
    sgpu("server", "drain", "--wait", "60s")
    assert sgpu("server", "resume") == golden("remote.operation.waits-started-again")
    out, said = second.communicate(timeout=WAIT_S)
    assert (second.returncode, out) == (0, "done\n"), said
    assert "drains it since" in said and "(new kernel)" in said
    assert runs_of(tmp_path / "second") == 1


@pytest.mark.long
def test_a_server_restored_from_a_backup_starts_nothing_again_and_its_machines_runs_go_on(
    systemd_unit: Unit, home: Path, tmp_path: Path
) -> None:
    systemd_unit.start()
    going = called(tmp_path / "going", 90)
    wait_for(lambda: runs_of(tmp_path / "going") == 1, "the run has begun", WAIT_S)
    sgpu("server", "drain")
    waiting = called(tmp_path / "waiting", 0)
    wait_for(lambda: "1 waiting" in sgpu("status"), "the other one waits", WAIT_S)
    sgpu("server", "backup", str(tmp_path / "backups"))
    sgpu("server", "resume")
    assert answer(waiting) == "done"  # since the backup, in which it waits
    systemd_unit.stop()
    (home / "server").rename(tmp_path / "lost")
    (backup,) = (tmp_path / "backups").glob("*Z")
    assert "is intact" in sgpu("server", "verify", str(backup))
    sgpu("server", "restore", str(backup))
    systemd_unit.start()
    go(tmp_path / "going")
    assert answer(going) == "done"
    assert "drained by" in sgpu("status")  # as it was in the backup
    sgpu("server", "resume")
    assert answer(called(tmp_path / "later", 0)) == "done"
    assert [runs_of(tmp_path / name) for name in ("going", "waiting", "later")] == [1, 1, 1]
    assert "server_restored" in sgpu("runs", "--json")
