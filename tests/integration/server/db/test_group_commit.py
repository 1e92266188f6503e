"""SQLite's writer when the disk is full, when another process has the lock, and when it is killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import ServerStorageFull, ServerUnavailable
from serverless_gpu.server.db import database as database_module
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.db.tables import audit, teams

WAIT_S = 60


@pytest.fixture
def sqlite(tmp_path: Path) -> Database:
    database = Database(f"sqlite:///{tmp_path}/server.db", clock=SystemClock())
    database.migrate()
    return database


def add(name: str, size: int = 1) -> Callable[[sa.Connection], None]:
    def work(connection: sa.Connection) -> None:
        connection.execute(sa.insert(teams).values(name=name, created_ns=1))
        values = {"at_ns": 1, "principal": "p", "action": "a", "subject": name, "detail_json": "x" * size}
        connection.execute(sa.insert(audit).values(**values))

    return work


def names(connection: sa.Connection) -> list[str]:
    return list(connection.scalars(sa.select(teams.c.name).order_by(teams.c.name)))


def subjects(connection: sa.Connection) -> list[str]:
    return list(connection.scalars(sa.select(audit.c.subject).order_by(audit.c.subject)))


def together(database: Database, threads: ThreadPoolExecutor, works: list[Callable[[sa.Connection], None]]) -> object:
    """Have works done in one transaction: the first to come holds the writer until all others wait."""
    waiting, go = threading.Event(), threading.Event()

    def hold(connection: sa.Connection) -> None:
        waiting.set()
        assert go.wait(WAIT_S)

    held = threads.submit(database.write, hold)
    assert waiting.wait(WAIT_S)
    futures: list[Future[None]] = [threads.submit(database.write, work) for work in works]
    go.set()
    held.result(WAIT_S)
    return [type(future.exception(WAIT_S)) for future in futures]


@pytest.fixture
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let every SQLite database of this process grow by 22 pages of 4 KiB beyond what an empty one of ours has."""
    empty = tmp_path_factory.mktemp("empty") / "server.db"
    made = Database(f"sqlite:///{empty}", clock=SystemClock())
    made.migrate()
    made.close()
    pages = empty.stat().st_size // 4096 + 22

    def limit(connection: sqlite3.Connection, _record: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages}")

    sa.event.listen(sa.Engine, "connect", limit)
    yield
    sa.event.remove(sa.Engine, "connect", limit)


def test_a_full_disk_fails_the_one_that_does_not_fit_and_keeps_the_others(small_disk: None, sqlite: Database) -> None:
    with ThreadPoolExecutor(8) as threads:
        said = together(sqlite, threads, [add("one"), add("two", 1 << 20), add("three")])
    assert said == [type(None), ServerStorageFull, type(None)]
    assert sqlite.read(names) == ["one", "three"] and sqlite.read(subjects) == ["one", "three"]
    sqlite.write(add("four"))
    sqlite.close()


def test_a_transaction_that_sqlite_gave_up_is_done_again_one_by_one(sqlite: Database) -> None:
    """As after an I/O error: SQLite rolls back by itself, with what others had done in the same transaction."""

    def give_up(connection: sa.Connection) -> None:
        add("given up")(connection)
        connection.exec_driver_sql("ROLLBACK")
        raise OSError("the disk")

    with ThreadPoolExecutor(8) as threads:
        said = together(sqlite, threads, [add("before"), give_up, add("after")])
    assert said == [type(None), OSError, type(None)]
    assert sqlite.read(names) == ["after", "before"]
    sqlite.close()


def test_another_process_that_has_the_lock_is_waited_for_and_then_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "WAIT_S", 0.05)
    database = Database(f"sqlite:///{tmp_path}/server.db", clock=SystemClock())
    database.migrate()
    other = sqlite3.connect(tmp_path / "server.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ServerUnavailable, match="does not answer"):
        database.write(add("one"))
    assert database.read(names) == []
    other.execute("ROLLBACK")
    other.close()
    database.write(add("one"))
    assert database.read(names) == ["one"]
    database.close()


def test_closing_finishes_what_waits(sqlite: Database, tmp_path: Path) -> None:
    waiting, go = threading.Event(), threading.Event()

    def hold(connection: sa.Connection) -> None:
        waiting.set()
        assert go.wait(WAIT_S)

    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(sqlite.write, hold)]
        assert waiting.wait(WAIT_S)
        futures += [threads.submit(sqlite.write, add(f"{number}")) for number in range(5)]
        closing = threads.submit(sqlite.close)
        go.set()
        closing.result(WAIT_S)
        ended = [type(future.exception(WAIT_S)) for future in futures]
    # Those that came before the end are done; one that came after it was told so.
    assert set(ended) <= {type(None), ServerUnavailable}
    found = sqlite3.connect(tmp_path / "server.db")
    there = found.execute("SELECT count(*) FROM teams").fetchone()[0]
    found.close()
    assert there == ended[1:].count(type(None))


_WRITER = """
import sys, threading
import sqlalchemy as sa
from serverless_gpu.ambient import SystemClock
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.db.tables import audit, teams

database = Database(sys.argv[1], clock=SystemClock())
database.migrate()

def add(name):
    def work(connection):
        connection.execute(sa.insert(teams).values(name=name, created_ns=1))
        values = {"at_ns": 1, "principal": "p", "action": "a", "subject": name, "detail_json": ""}
        connection.execute(sa.insert(audit).values(**values))
    return work

def write(thread):
    for number in range(10**6):
        name = f"{thread}-{number}"
        database.write(add(name))
        sys.stdout.write(name + "\\n")
        sys.stdout.flush()

for thread in range(6):
    threading.Thread(target=write, args=(thread,)).start()
"""


def test_what_was_said_to_be_written_is_there_after_a_kill_and_nothing_is_half(database_url: str) -> None:
    command = [sys.executable, "-c", _WRITER, database_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(60)]
        process.send_signal(signal.SIGKILL)
        said += process.stdout.readlines()
    told = {line.decode().strip() for line in said if line.endswith(b"\n")}
    database = Database(database_url, clock=SystemClock())
    database.migrate()
    found = database.read(names)
    assert told <= set(found)
    assert database.read(subjects) == found
    database.close()
