"""The database of the simulated server: SQLite in memory, one transaction after the other, and what can go wrong.

Before each transaction others may go on (that is all concurrency there is: works are serial in SQLite, and PostgreSQL
makes them look so), the process may be killed, the disk may be full, the database may be away. After it, the process
may be killed, or the answer may be lost, though everything is durable.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import sqlalchemy as sa

from serverless_gpu.errors import ServerStorageFull, ServerUnavailable
from serverless_gpu.server.db import tables
from tests.e2e.simulation.timeline import Timeline

T = TypeVar("T")
Work = Callable[[sa.Connection], T]


class Killed(BaseException):
    """The server's process ends here; nothing of it may catch this."""


class Disk:
    """What outlives the server's process, and what is wrong with it now.

    Attributes:
        slow_s: how long a transaction may take; 0 for no time.
        full: whether nothing more can be written.
        away: whether the database does not answer.
        dies: (after how many writes from now, whether before or after the commit), or None.
        mixes: whether others may go on before any transaction.
    """

    def __init__(self, time: Timeline) -> None:
        self.time = time
        self.slow_s = 0.0
        self.full = self.away = self.mixes = False
        self.dies: tuple[int, Literal["before", "after", "unheard"]] | None = None
        self.engine = _engine()
        _clear(self.engine)

    def read(self, work: Work[T]) -> T:
        """Return what a work finds, whatever is wrong: for whoever looks from outside."""
        with self.engine.begin() as connection:
            return work(connection)


class Storage:
    """The database as one process has it.

    Args:
        disk: what outlives it.
        lives: whether the process does.
    """

    def __init__(self, disk: Disk, lives: Callable[[], bool]) -> None:
        self._disk, self._lives = disk, lives

    def read(self, work: Work[T]) -> T:
        """Return what a work finds."""
        self._before()
        return self._disk.read(work)

    def write(self, work: Work[T]) -> T:
        """Return what a work returns, once it is durable."""
        self._before()
        disk = self._disk
        if disk.full:
            raise ServerStorageFull("the database has no room on its disk")
        how = self._dies()
        if how == "before":
            raise Killed
        with disk.engine.begin() as connection:
            value = work(connection)
        if how == "after":
            raise Killed
        if how == "unheard":
            raise ServerUnavailable("the connection broke while committing")
        return value

    def _before(self) -> None:
        disk = self._disk
        if disk.slow_s:
            disk.time.pass_within(disk.time.rng.uniform(0, disk.slow_s))
        elif disk.mixes and disk.time.rng.random() < 0.2:
            disk.time.pass_within(disk.time.rng.uniform(0, 0.1))
        if not self._lives():
            raise Killed
        if disk.away:
            raise ServerUnavailable("the database does not answer")

    def _dies(self) -> str:
        disk = self._disk
        if disk.dies is None:
            return ""
        left, how = disk.dies
        disk.dies = (left - 1, how) if left > 0 else None
        return "" if left > 0 else how


@functools.cache
def _engine() -> sa.Engine:
    """Return the one engine of this process: what it has compiled is the same for every seed."""
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool, connect_args={"check_same_thread": False})

    @sa.event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys = ON")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


@functools.cache
def _template() -> sqlite3.Connection:
    empty = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    tables.metadata.create_all(empty)
    with empty.connect() as connection:
        driver = connection.connection.dbapi_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


def _clear(engine: sa.Engine) -> None:
    with engine.connect() as connection:
        driver = connection.connection.dbapi_connection
        assert isinstance(driver, sqlite3.Connection)
        connection.rollback()
        _template().backup(driver)
