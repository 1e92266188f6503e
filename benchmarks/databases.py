"""Rounds on databases: so many small transactions, from many threads, each of them durable when it returns.

One transaction is what a submission is: look for the run, write its row (5 kB), an event and an entry of the audit.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import sqlalchemy as sa

from serverless_gpu.ambient import SystemClock, new_run_id
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from tests.support.server.postgres import Cluster, cluster

WRITES = 512
THREADS = 32
_BYTES = b"x" * 4000
held = contextlib.ExitStack()
"""What a contestant's process keeps for all its rounds, and ends with itself."""
atexit.register(held.close)

RUN = {
    "owner": "ada",
    "team": "",
    "name": "",
    "pool": "",
    "priority": 1,
    "state": "QUEUED",
    "detail": "",
    "fence": 0,
    "retries_used": 0,
    "infra_retries_used": 0,
    "fault_retries_used": 0,
    "created_ns": 1,
    "queued_ns": 1,
    "events": 1,
    "request_sha256": "",
    "spec_json": "x" * 1000,
    "target_json": "{}",
    "tags_json": "{}",
    "snapshot": "",
    "context_sealed": _BYTES,
    "client_version": "",
    "tracked": "",
}
EVENT = {"seq": 1, "fence": 0, "at_ns": 1, "state": "QUEUED", "sentence": "", "node": ""}
AUDIT = {"at_ns": 1, "principal": "ada", "action": "run.create", "detail_json": "{}", "token": ""}


def ours_sqlite(directory: str) -> dict[str, object]:
    """Through `Database.write`, whose writers share a commit."""
    return _timed(_through(_home() / "ours.db"))


def raw_sqlite(directory: str) -> dict[str, object]:
    """The driver, one connection, every transaction with its own commit: one after another, as SQLite has it."""
    return _timed(_driver_sqlite(), threads=1)


def ours_postgresql(directory: str) -> dict[str, object]:
    """Through `Database.write`."""
    return _timed(_through(None))


def raw_postgresql(directory: str) -> dict[str, object]:
    """The driver, a connection per thread."""
    return _timed(_driver_postgresql())


def _timed(write: Callable[[str], None], *, threads: int = THREADS) -> dict[str, object]:
    names = [new_run_id() for _ in range(WRITES)]
    with ThreadPoolExecutor(threads) as pool:
        began_ns = time.perf_counter_ns()
        list(pool.map(write, names))
        return {"ms": (time.perf_counter_ns() - began_ns) / 1e6}


@functools.cache
def _through(path: Path | None) -> Callable[[str], None]:
    url = f"sqlite:///{path}" if path else new_postgresql()
    database = held.enter_context(contextlib.closing(Database(url, clock=SystemClock())))
    database.migrate()
    owner = sa.insert(tables.principals).values(name="ada", kind="user", role="member", created_ns=1)
    database.write(lambda connection: connection.execute(owner))

    def write(run_id: str) -> None:
        def work(connection: sa.Connection) -> None:
            if connection.execute(sa.select(tables.runs.c.id).where(tables.runs.c.id == run_id)).first():
                return
            connection.execute(sa.insert(tables.runs).values(id=run_id, **RUN))
            connection.execute(sa.insert(tables.events).values(run_id=run_id, **EVENT))
            connection.execute(sa.insert(tables.audit).values(subject=run_id, **AUDIT))

        database.write(work)

    return write


@functools.cache
def _driver_sqlite() -> Callable[[str], None]:
    path = _home() / "raw.db"
    _through(path)  # makes the tables
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.executescript("PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON")

    def write(run_id: str) -> None:
        connection.execute("BEGIN IMMEDIATE")
        for statement, values in _statements(run_id, "?"):
            connection.execute(statement, values)
        connection.execute("COMMIT")

    return write


@functools.cache
def _driver_postgresql() -> Callable[[str], None]:
    url = new_postgresql()
    database = Database(url, clock=SystemClock())
    database.migrate()
    owner = sa.insert(tables.principals).values(name="ada", kind="user", role="member", created_ns=1)
    database.write(lambda connection: connection.execute(owner))
    database.close()
    connections = [held.enter_context(psycopg.connect(url)) for _ in range(THREADS)]
    numbers = itertools.cycle(range(THREADS))
    mine = threading.local()

    def write(run_id: str) -> None:
        if not hasattr(mine, "connection"):
            mine.connection = connections[next(numbers)]
        connection = mine.connection
        for statement, values in _statements(run_id, "%s"):
            connection.execute(statement.encode(), values)
        connection.commit()

    return write


def _statements(run_id: str, mark: str) -> Iterable[tuple[str, Sequence[object]]]:
    yield f"SELECT id FROM runs WHERE id = {mark}", (run_id,)
    for table, row in (
        ("runs", {"id": run_id, **RUN}),
        ("events", {"run_id": run_id, **EVENT}),
        ("audit", {"subject": run_id, **AUDIT}),
    ):
        marks = ", ".join([mark] * len(row))
        yield f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values())


def new_postgresql() -> str:
    """Return the url of an empty database."""
    return _cluster().url(_cluster().new_database())


@functools.cache
def _cluster() -> Cluster:
    return held.enter_context(cluster(durable=True))


def _home() -> Path:
    return Path(os.environ["SERVERLESS_GPU_HOME"])
