"""F36: the database's disk is full. No new runs come; those that are there are stopped, heard of and ended."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu import Run
from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import RunCancelled, ServerStorageFull, ServerUnavailable
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.http.routing import problem_response
from serverless_gpu.wire.access import PrincipalRequest, TokenMade
from serverless_gpu.wire.nodes import NodeList
from serverless_gpu.wire.server_status import Health
from tests.support.crash.machine import FAKES, WAIT_S, Machine
from tests.support.crash.scenarios import LARGE_BYTES, executions, submitted, work
from tests.support.golden import golden
from tests.support.homes import use_home
from tests.support.local.observe import wait_for
from tests.support.server.postgres import cluster
from tests.support.small_disks import fill, small_disk

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root"),
]
SOON = "db.disk_reserve.EVERY_S=0.5"
TRIES = 400


@pytest.fixture
def disk() -> Iterator[Path]:
    """Yield a small disk, in memory."""
    with small_disk("256m", options="mode=1777") as place:
        yield place


@pytest.fixture(params=["sqlite", "postgresql"])
def machine(request: pytest.FixtureRequest, disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Yield a machine with a server and a node, and the database on the small disk."""
    home = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    use_home(monkeypatch, home, FAKES)
    with contextlib.ExitStack() as stack:
        url = f"sqlite:///{disk}/server.db"
        if request.param == "postgresql":
            running = stack.enter_context(cluster(within=disk))
            url = running.url(running.new_database())
        machine = Machine(home, url)
        try:
            machine.start(SOON)
            yield machine
        finally:
            (disk / "filler").unlink(missing_ok=True)
            machine.close()
            shutil.rmtree(home)


def fill_up(disk: Path) -> None:
    """Leave nothing of a disk, of which a database may give something back meanwhile."""
    wait_for(lambda: is_full(disk), "nothing is left of the disk")


def is_full(disk: Path) -> bool:
    """Fill a disk, and return whether there is no room for another byte."""
    fill(disk)
    try:
        (disk / "more").write_bytes(b"x")
    except OSError as error:
        assert error.errno == errno.ENOSPC
        return True
    finally:
        (disk / "more").unlink(missing_ok=True)
    return False


def begun(machine: Machine, where: Path) -> Run[bytes]:
    """Return a run that has begun, and waits."""
    where.mkdir()
    run = submitted(machine, where, -LARGE_BYTES)
    wait_for(lambda: executions(where) == 1, "the run has begun", limit_s=WAIT_S)
    return run


def until_full(machine: Machine) -> None:
    """Have people ask for changes until what is kept back has been given back."""
    with contextlib.closing(machine.connection()) as connection:
        for number in range(TRIES):
            with contextlib.suppress(ServerStorageFull, ServerUnavailable):
                connection.ask("POST", "/users", PrincipalRequest(name=f"user-{number}"), answer=TokenMade)
            if "is released" in machine.log():
                return
    raise AssertionError("the disk is full, and nothing noticed")


def test_F36_on_a_full_disk_runs_are_stopped_and_end_and_no_new_ones_come(
    machine: Machine, disk: Path, tmp_path: Path
) -> None:
    stopped, ending = begun(machine, tmp_path / "one"), begun(machine, tmp_path / "two")
    wait_for(lambda: reserved(machine, disk), "room is kept back", limit_s=WAIT_S)
    fill_up(disk)
    until_full(machine)
    with pytest.raises(ServerStorageFull, match=re.escape(golden("crash.full_database.new-runs-taken"))) as raised:
        work.submit(str(tmp_path), 1)
    assert problem_response(raised.value).status_code == 503
    with contextlib.closing(machine.connection()) as connection:
        with pytest.raises(ServerUnavailable, match="full"):
            connection.ask("GET", "/health", answer=Health)
        stopped.cancel()
        with pytest.raises(RunCancelled):
            stopped.results(timeout=WAIT_S)
        (tmp_path / "two" / "go").touch()
        assert ending.results(timeout=WAIT_S) == [b"x" * LARGE_BYTES]

        def states() -> list[str]:
            return [node.state for node in connection.ask("GET", "/nodes", answer=NodeList).nodes]

        wait_for(lambda: states() == ["UP"], "the node is heard of", limit_s=WAIT_S)
    (disk / "filler").unlink()
    wait_for(lambda: taken_again(machine, tmp_path), "new runs are taken", limit_s=WAIT_S)
    wait_for(lambda: golden("crash.full_database.room-database-disk") in machine.log(), "it is said")
    assert executions(tmp_path / "one") == executions(tmp_path / "two") == 1
    machine.check()


def test_F36_a_server_killed_as_it_gives_back_what_it_kept_goes_on_on_the_full_disk(
    machine: Machine, disk: Path, tmp_path: Path
) -> None:
    place = "after_reserve_is_given_back"
    ending = begun(machine, tmp_path / "one")
    wait_for(lambda: reserved(machine, disk), "room is kept back", limit_s=WAIT_S)
    machine.arm(place)
    fill(disk)
    names = itertools.count()
    with contextlib.closing(machine.connection()) as connection:
        while machine.is_armed():
            with contextlib.suppress(ServerStorageFull, ServerUnavailable):
                request = PrincipalRequest(name=f"user-{next(names)}")
                connection.ask("POST", "/users", request, answer=TokenMade)
    machine.recover(SOON)
    (tmp_path / "one" / "go").touch()
    assert ending.results(timeout=WAIT_S) == [b"x" * LARGE_BYTES]
    (disk / "filler").unlink()
    wait_for(lambda: reserved(machine, disk), "room is kept back again", limit_s=WAIT_S)
    wait_for(lambda: taken_again(machine, tmp_path), "new runs are taken", limit_s=WAIT_S)
    assert executions(tmp_path / "one") == 1
    machine.check()


def test_F36_postgresql_that_ended_on_a_full_disk_starts_with_what_is_kept_back(disk: Path) -> None:
    """At its start it empties tables that no log is kept of."""
    with cluster(within=disk) as running:
        url = running.url(running.new_database())
        database = Database(url, clock=SystemClock())
        database.migrate()
        database.reserve.tend()
        database.close()
        fill_up(disk)
        running.stop()
        running.start()
        assert os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize >= 4 << 20


def reserved(machine: Machine, disk: Path) -> bool:
    """Return whether room is kept back."""
    if machine.database.startswith("sqlite"):
        return (disk / "server.db.reserve").stat().st_size == 16 << 20
    size = "SELECT pg_total_relation_size('sgpu_reserve')"
    with contextlib.suppress(Exception):
        return machine.read(lambda connection: int(connection.exec_driver_sql(size).scalar() or 0)) >= 16 << 20
    return False


def taken_again(machine: Machine, where: Path) -> bool:
    """Return whether a new run is taken, and returns what it returns."""
    try:
        return submitted(machine, where, 1).results(timeout=WAIT_S) == [b"x"]
    except ServerStorageFull:
        return False


@pytest.mark.parametrize("left_bytes", [0, 20_000, 40_000])
def test_F36_a_database_that_is_made_on_a_full_disk_says_that_it_is_full(left_bytes: int) -> None:
    with small_disk("1m") as place:
        filler = fill(place)
        os.truncate(filler, filler.stat().st_size - left_bytes)
        with pytest.raises(ServerStorageFull):
            database = Database(f"sqlite:///{place}/server.db", clock=SystemClock())
            try:
                database.migrate()
            finally:
                database.close()
