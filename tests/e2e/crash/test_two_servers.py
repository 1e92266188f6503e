"""F38: a server stands still for longer than its claim lasts, another takes over, and the first one goes on."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink import start_stop
from serverless_gpu.node.uplink.server import read_profile, write_profile
from serverless_gpu.server.db import tables
from serverless_gpu.wire.access import PrincipalRequest, TokenMade
from serverless_gpu.wire.runs import RunView
from tests.support.crash.machine import FAKES, WAIT_S, Machine
from tests.support.crash.scenarios import executions, rows, submitted
from tests.support.golden import golden
from tests.support.homes import use_home
from tests.support.local.observe import wait_for
from tests.support.server.postgres import cluster

pytestmark = pytest.mark.slow
SHORT = ("db.leader_lock.TTL_S=3", "db.leader_lock.REFUSED_S=3")


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Machine, Machine]]:
    """Yield two machines of one PostgreSQL database, the second with a copy of the first one's key, once it has one."""
    homes = [Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp")) for _ in range(2)]
    with cluster() as running:
        url = running.url(running.new_database())
        first, second = (Machine(home, url) for home in homes)
        use_home(monkeypatch, first.home, FAKES)
        try:
            yield first, second
        finally:
            second.close()
            with contextlib.suppress(ProcessLookupError, AssertionError):
                first.send(signal.SIGCONT)
            first.close()
    for home in homes:
        shutil.rmtree(home)


class People:
    """Somebody who makes one user after another, and remembers which were acknowledged."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.made: set[str] = set()
        self.ended = threading.Event()
        self._connection = machine.connection()
        self._name = name

    def work(self) -> None:
        """Make users until told to stop; what is refused is left."""
        number = 0
        while not self.ended.is_set():
            number += 1
            name = f"{self._name}-{number}"
            with contextlib.suppress(ServerlessGpuError):
                self._connection.ask("POST", "/users", PrincipalRequest(name=name), answer=TokenMade)
                self.made.add(name)
        self._connection.close()


def users(machine: Machine) -> set[str]:
    return {row["name"] for row in rows(machine, tables.principals)}


def audited(machine: Machine) -> list[int]:
    return sorted(row["seq"] for row in rows(machine, tables.audit))


@contextlib.contextmanager
def busy(*people: People) -> Iterator[list[Future[None]]]:
    """Have people at work until the end."""
    with ThreadPoolExecutor(len(people)) as pool:
        try:
            yield [pool.submit(one.work) for one in people]
        finally:
            for one in people:
                one.ended.set()


def take_over(first: Machine, second: Machine) -> None:
    """Start the second server, which is refused for as long as the first one's claim lasts, and give it the node."""
    (second.home / "server").mkdir(mode=0o700)
    for name in ("key", "token", "node.token"):
        shutil.copy2(first.home / "server" / name, second.home / "server" / name)
    second.start("node=false", *SHORT)
    profile = first.home / "server" / "node.json"
    known = read_profile(profile)
    token = (second.home / "server" / "node.token").read_text(encoding="ascii").strip()
    write_profile(profile, type(known)(url=second.url, token=token, name=known.name, upload_s=known.upload_s))
    start_stop.stop_all(Home(first.home))
    start_stop.start(Home(first.home), profile, {"SERVERLESS_GPU_FAKE": FAKES})


def test_F38_of_two_servers_the_one_that_stood_still_writes_nothing_and_ends(
    two: tuple[Machine, Machine], tmp_path: Path
) -> None:
    first, second = two
    first.start(*SHORT)
    run = submitted(first, tmp_path, -1)
    wait_for(lambda: executions(tmp_path) == 1, "the run has begun", limit_s=WAIT_S)
    people = [People(first, f"p{number}") for number in range(6)]
    with busy(*people):
        wait_for(lambda: all(one.made for one in people), "everybody is at work", limit_s=WAIT_S)
        first.send(signal.SIGSTOP)
        take_over(first, second)
        there, written = users(second), audited(second)
        with contextlib.closing(second.connection()) as connection:
            connection.ask("POST", "/users", PrincipalRequest(name="of-the-second"), answer=TokenMade)
        (tmp_path / "go").touch()
        wait_for(
            lambda: state(second, run.id) == "SUCCEEDED", "the run has ended, for the second server", limit_s=WAIT_S
        )
        theirs = audited(second)
        first.send(signal.SIGCONT)
        assert first.ended() not in (0, -signal.SIGKILL)
    assert set().union(*(one.made for one in people)) <= there
    assert users(second) == there | {"of-the-second"}
    assert len(theirs) > len(written) and audited(second) == theirs
    assert golden("crash.two_servers.another-server-taken") in first.log()
    assert executions(tmp_path) == 1
    second.acknowledged = first.acknowledged
    second.check()


def share_directory(first: Machine, second: Machine) -> None:
    """Lay both homes out as a pair that replaces each other: one directory of files, one database."""
    (second.home / "server").symlink_to(first.home / "server")


def make_user(machine: Machine, name: str) -> None:
    with contextlib.closing(machine.connection()) as connection:
        connection.ask("POST", "/users", PrincipalRequest(name=name), answer=TokenMade)


def test_22B8_servers_of_one_database_replace_each_other_in_a_shared_directory(two: tuple[Machine, Machine]) -> None:
    first, second = two
    first.start("node=false", *SHORT)
    make_user(first, "of-the-first")
    share_directory(first, second)
    second.spawn("node=false", *SHORT, "db.leader_lock.WAIT_S=1")
    assert second.line() == "" and second.ended() == 1, "a server that works is not replaced"
    assert golden("crash.two_servers.another-server-uses") in (second.home / "server.stderr").read_text()
    first.send(signal.SIGSTOP)
    second.start("node=false", *SHORT)
    make_user(second, "of-the-second")
    first.send(signal.SIGCONT)
    assert first.ended() not in (0, -signal.SIGKILL)
    assert {"of-the-first", "of-the-second"} <= users(second)
    second.send(signal.SIGKILL)
    assert second.ended() == -signal.SIGKILL
    first.start("node=false", *SHORT)
    make_user(first, "of-the-first-again")
    first.check()


def test_22B7_a_server_whose_successor_is_gone_ends_and_writes_nothing(two: tuple[Machine, Machine]) -> None:
    first, second = two
    first.start("node=false", *SHORT)
    share_directory(first, second)
    first.send(signal.SIGSTOP)
    second.start("node=false", *SHORT)
    make_user(second, "of-the-second")
    second.send(signal.SIGKILL)
    assert second.ended() == -signal.SIGKILL
    written = audited(first)
    first.send(signal.SIGCONT)
    assert first.ended() not in (0, -signal.SIGKILL)
    assert golden("crash.two_servers.another-server-taken") in first.log()
    assert audited(first) == written


def state(machine: Machine, run_id: str) -> str:
    """Return the state of a run, as a server says."""
    with contextlib.closing(machine.connection()) as connection:
        return connection.ask("GET", f"/runs/{run_id}", answer=RunView).state


def test_F38_sqlite_is_not_taken_over_and_the_one_that_stood_still_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One machine: a second server is refused for as long as the first one's process is there."""
    homes = [tmp_path / "one", tmp_path / "two"]
    url = f"sqlite:///{tmp_path}/server.db"
    first, second = (Machine(home, url) for home in homes)
    for home in homes:
        home.mkdir()
    use_home(monkeypatch, first.home, FAKES)
    first.start("node=false")
    try:
        first.send(signal.SIGSTOP)
        second.spawn("node=false")
        assert second.line() == "" and second.ended() == 1
        first.send(signal.SIGCONT)
        with contextlib.closing(first.connection()) as connection:
            connection.ask("POST", "/users", PrincipalRequest(name="after"), answer=TokenMade)
    finally:
        first.stop()
