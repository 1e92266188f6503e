"""One server uses a database: a second one is refused, and one that lost it writes nothing more."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.errors import ServerProblem, ServerUnavailable
from serverless_gpu.server.db import leader_lock as leader_lock_module
from serverless_gpu.server.db import migrations
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.db.tables import teams
from serverless_gpu.server.operations.systemd import TAKEN_OVER
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.server_status import Health, Version
from tests.support.golden import golden
from tests.support.server.postgres import Cluster
from tests.support.server.served import Served, served

KEY = migrations.LOCK + 1
WAIT_S = 60


def add(name: str) -> Callable[[sa.Connection], None]:
    def work(connection: sa.Connection) -> None:
        connection.execute(sa.insert(teams).values(name=name, created_ns=1))

    return work


def names(connection: sa.Connection) -> list[str]:
    return list(connection.scalars(sa.select(teams.c.name).order_by(teams.c.name)))


def end_session(url: str) -> None:
    """Break the session that has the lock, as a restart or a network does."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted")


@contextlib.contextmanager
def taken_over(url: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """Have somebody else wait for the lock, and get it before its holder can have it again."""
    with psycopg.connect(url, autocommit=True) as other, ThreadPoolExecutor(1) as pool:
        got = pool.submit(other.execute, "SELECT pg_advisory_lock(%s)", (KEY,))
        with psycopg.connect(url, autocommit=True) as looking:
            waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            while looking.execute(waiting).fetchone() != (1,):
                threading.Event().wait(0.01)
        end_session(url)
        got.result(WAIT_S)
        yield other


@pytest.fixture
def postgres_url(postgres: Cluster, postgres_template: str) -> Iterator[str]:
    """Yield the url of a PostgreSQL database that has the tables."""
    name = postgres.new_database(postgres_template)
    yield postgres.url(name)
    postgres.drop_database(name)


def test_a_database_has_one_server_and_the_next_one_gets_it_when_that_ends(
    database: Database, open_again: Callable[[], Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_lock_module, "WAIT_S", 1)
    database.acquire()
    database.write(add("first"))
    second = open_again()
    with pytest.raises(ServerProblem, match=re.escape(golden("crash.two_servers.another-server-uses"))):
        second.acquire()
    database.close()
    second.acquire()
    second.write(add("second"))
    assert second.read(names) == ["first", "second"]


def test_a_server_of_another_home_does_not_start_on_the_same_database(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_lock_module, "WAIT_S", 1)
    with served(tmp_path / "one", database=database_url) as first:
        with pytest.raises(ServerProblem, match="another server"), served(tmp_path / "two", database=database_url):
            pass
        assert first.connection().ask("GET", "/health", answer=Health).ok
    with served(tmp_path / "two", database=database_url):
        pass


def test_a_session_that_breaks_is_made_again_before_anything_is_written(postgres_url: str) -> None:
    database = Database(postgres_url, clock=SystemClock())
    database.acquire()
    end_session(postgres_url)
    database.leader_lock.doubt()
    database.write(add("after"))
    with psycopg.connect(postgres_url, autocommit=True) as other:
        assert other.execute("SELECT pg_try_advisory_lock(%s)", (KEY,)).fetchone() == (False,)
    database.close()


def test_who_lost_the_database_to_another_server_writes_nothing_more_and_ends(postgres_url: str) -> None:
    clock = FakeClock()
    database = Database(postgres_url, clock=clock)
    database.acquire()
    told: list[str] = []
    database.leader_lock.on_gone = lambda: told.append("gone")
    with taken_over(postgres_url):
        assert not database.leader_lock.look()
        with pytest.raises(ServerUnavailable):
            database.write(add("two at once"))
        assert not told
        clock.advance(leader_lock_module.REFUSED_S)
        assert not database.leader_lock.look()
    assert not database.leader_lock.look()
    with pytest.raises(ServerUnavailable):
        database.write(add("later"))
    assert database.read(names) == []
    assert told == ["gone"]
    database.close()


def numbered(url: str, clock: Clock | None = None) -> Database:
    """Return a database as a server has it that has started."""
    database = Database(url, clock=clock or SystemClock())
    database.acquire()
    database.number(now_ns=1)
    return database


def test_22B7_a_server_that_was_replaced_ends_also_where_the_lock_is_free_again(postgres_url: str) -> None:
    first = numbered(postgres_url)
    told: list[str] = []
    first.leader_lock.on_gone = lambda: told.append("gone")
    end_session(postgres_url)
    second = numbered(postgres_url)
    second.write(add("of the second"))
    second.close()
    assert not first.leader_lock.look() and first.leader_lock.is_gone and told == ["gone"]
    with psycopg.connect(postgres_url, autocommit=True) as other:
        assert other.execute("SELECT pg_try_advisory_lock(%s)", (KEY,)).fetchone() == (True,), "it kept the lock"
    with pytest.raises(ServerUnavailable):
        first.write(add("two at once"))
    first.close()


def test_22B7_a_lock_that_is_free_when_postgresql_starts_again_goes_to_the_server_of_the_last_generation(
    postgres_url: str,
) -> None:
    """The one that stood still looks first and gets the lock: it leaves it to the one that lives."""
    first = numbered(postgres_url)
    end_session(postgres_url)
    second = numbered(postgres_url)
    end_session(postgres_url)
    assert not first.leader_lock.look() and first.leader_lock.is_gone
    assert second.leader_lock.look() and not second.leader_lock.is_gone
    second.write(add("of the living one"))
    assert second.read(names) == [golden("server.claim.living-one")]
    first.close()
    second.close()


def test_22B7_a_server_process_that_goes_on_after_its_successor_ends_with_3(home: Path, postgres_url: str) -> None:
    """`sgpu up` stands still, another server takes its database and ends; nothing but the database says so."""
    command = [sys.executable, "-m", "serverless_gpu.cli", "up", "--no-node", "--no-mlflow", "--port", "0"]
    with subprocess.Popen(
        [*command, "--database", postgres_url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        assert " at http://" in server.stdout.readline()
        server.send_signal(signal.SIGSTOP)
        end_session(postgres_url)
        successor = numbered(postgres_url)
        successor.write(add("of the successor"))
        successor.close()
        server.send_signal(signal.SIGCONT)
        assert server.wait(WAIT_S) == TAKEN_OVER == 3
        assert golden("crash.two_servers.another-server-taken") in server.stderr.read()


def test_22B7_no_transaction_of_an_older_generation_commits(
    database: Database, open_again: Callable[[], Database]
) -> None:
    """Even where the lock failed: a lock file that was deleted, a session that PostgreSQL had not ended yet."""
    database.number(now_ns=1)
    database.write(add("first"))
    second = open_again()
    second.number(now_ns=2)
    with pytest.raises(ServerUnavailable, match=re.escape(golden("crash.two_servers.another-server-taken"))):
        database.write(add("two at once"))
    assert database.leader_lock.is_gone
    second.write(add("second"))
    assert second.read(names) == ["first", "second"]


def test_22B7_a_claim_waits_for_the_write_that_is_under_way(
    database: Database, open_again: Callable[[], Database]
) -> None:
    database.number(now_ns=1)
    second = open_again()
    is_writing, may_end = threading.Event(), threading.Event()

    def slowly(connection: sa.Connection) -> None:
        add("under way")(connection)
        is_writing.set()
        may_end.wait(WAIT_S)

    with ThreadPoolExecutor(2) as threads:
        writing = threads.submit(database.write, slowly)
        assert is_writing.wait(WAIT_S)
        claiming = threads.submit(second.number, now_ns=2)
        with pytest.raises(FutureTimeout):
            claiming.result(0.1)
        may_end.set()
        writing.result(WAIT_S)
        claiming.result(WAIT_S)
    assert second.read(names) == ["under way"]


def test_22B7_a_server_that_stood_still_looks_before_it_reads(postgres_url: str) -> None:
    clock = FakeClock()
    first = numbered(postgres_url, clock)
    end_session(postgres_url)
    second = numbered(postgres_url)
    clock.advance(leader_lock_module.STALE_S + 1)
    with pytest.raises(ServerUnavailable):
        first.read(names)
    assert first.leader_lock.is_gone
    first.close()
    second.close()


def test_sessions_that_cannot_be_ended_leave_the_database_unclaimed(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server's session that goes on in the middle of a transaction, as behind a network that broke."""

    def stay(_claim: leader_lock_module.LeaderLock, _session: sa.Connection) -> None:
        raise ServerProblem("sessions of another server of this database did not end within 10 s")

    database = Database(postgres_url, clock=SystemClock())
    database.acquire()
    monkeypatch.setattr(leader_lock_module.LeaderLock, "end_others", stay)
    end_session(postgres_url)
    assert not database.leader_lock.look() and not database.leader_lock.is_held
    with pytest.raises(ServerUnavailable):
        database.write(add("two at once"))
    assert database.read(names) == []
    monkeypatch.undo()
    assert database.leader_lock.look()
    database.write(add("alone"))
    database.close()


def test_a_server_whose_database_was_taken_over_stops(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_lock_module, "REFUSED_S", 0.0)
    with (
        contextlib.ExitStack() as other,
        pytest.raises(ServerProblem, match=re.escape(golden("server.claim.taken-database-over"))),
        served(tmp_path, database=postgres_url) as server,
    ):
        other.enter_context(taken_over(postgres_url))
        wait_until_it_is_gone(server)


def wait_until_it_is_gone(server: Served) -> None:
    for _ in range(20 * WAIT_S):
        try:
            server.connection().ask("GET", "/version", answer=Version)
        except ServerUnavailable:
            return
        threading.Event().wait(0.05)
    raise AssertionError("the server goes on")
