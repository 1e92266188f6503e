"""The one writer of an SQLite database: a thread that commits what waits together.

    thread A ── work ─▶┐            BEGIN IMMEDIATE
    thread B ── work ─▶├─ queue ─▶  A's work · SAVEPOINT B's work · SAVEPOINT C's work
    thread C ── work ─▶┘            COMMIT, one fsync ─▶ A, B and C get what their work returned

SQLite lets one connection write at a time, and a commit that survives a power cut costs one fsync.
So writers do not fight for the lock: they queue, and those that came while the disk was busy share the next fsync.

What can go wrong:

- A work raises: its savepoint is rolled back, its caller gets the exception, the others do not notice.
- The transaction as a whole fails (disk full, I/O error, another process has the lock): nothing of it is there, and
  each work is done again in a transaction of its own, so that only those get an error whose own work fails.
- The process dies: what was committed is there, the rest is not; no caller returned otherwise.
- Another server has claimed the database: nothing is committed, and each caller gets `Superseded`.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.db import leader_lock
from serverless_gpu.server.db.leader_lock import Superseded

T = TypeVar("T")
Work = Callable[[sa.Connection], Any]

TOGETHER_MAX = 256
TOGETHER_NS = 20_000_000
"""A transaction takes no further work when it holds so much, or is so old: the first to come waits for the last."""


class WriterClosed(Exception):
    """The writer takes no work any more."""


class _TransactionLost(Exception):
    """SQLite rolled the whole transaction back by itself."""


class _Waiting:
    """A work, and the one who waits for what it returns."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.future: Future[Any] = Future()
        self.value: Any = None
        self.error: BaseException | None = None

    def tell(self) -> None:
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.value)


class GroupCommit:
    """Does works one after another, in the order they came, and commits those that wait together.

    Args:
        engine: whose connections begin with ``BEGIN IMMEDIATE``.
        clock: bounds how long a transaction takes further work.
        measures: where commits are counted.

    Attributes:
        holder: `LeaderLock.name`, once it has a generation; commits are counted in the database then.
        on_commit: called with the number of each commit, before its writers return.
    """

    def __init__(self, engine: sa.Engine, *, clock: Clock, measures: ServerMetrics | None = None) -> None:
        self.holder = ""
        self.on_commit: Callable[[int], None] = lambda _number: None
        self._engine = engine
        self._clock = clock
        self._measures = measures or ServerMetrics()
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="database-writer", daemon=True)
        self._thread.start()

    def do(self, work: Callable[[sa.Connection], T]) -> T:
        """Return what a work returns, once it is durable.

        Raises:
            WriterClosed: the writer was closed before.
            Exception: what the work raised, or why its transaction failed.
        """
        waiting = _Waiting(work)
        with self._lock:
            if self._closed:
                raise WriterClosed
            self._queue.put(waiting)
        value: T = waiting.future.result()
        return value

    def close(self) -> None:
        """Finish what waits, and end the thread."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            taken: list[_Waiting] = []
            try:
                over = self._together(first, taken)
            except (sa.exc.SQLAlchemyError, _TransactionLost):
                over = False
                self._measures.retries.inc(len(taken))
                for waiting in taken:
                    self._alone(waiting)
            faults.reach("after_commit_before_told")
            for waiting in taken:
                waiting.tell()
            if over:
                return

    def _together(self, first: _Waiting, taken: list[_Waiting]) -> bool:
        """Do a work and those that come meanwhile in one transaction; return whether the writer is to end."""
        taken.append(first)
        with self._engine.connect() as connection:
            transaction = connection.begin()
            before = _changes(connection)
            try:
                # The first needs no savepoint: when it fails there is nothing else to keep.
                _attempt(first, connection)
                if first.error is not None:
                    transaction.rollback()
                    return False
                over = self._followers(connection, taken)
                try:
                    number = self._count(connection, before)
                except Superseded as error:
                    transaction.rollback()
                    for waiting in taken:
                        waiting.error = error
                    return over
            except BaseException:
                connection.invalidate()  # in an unknown state; closing it rolls back
                raise
            faults.reach("before_commit")
            with transaction:  # whose end commits, or rolls back what cannot be committed
                pass
            self._committed(len(taken), number)
            return over

    def _followers(self, connection: sa.Connection, taken: list[_Waiting]) -> bool:
        enough_ns = self._clock.boottime_ns() + TOGETHER_NS
        while len(taken) < TOGETHER_MAX and self._clock.boottime_ns() < enough_ns:
            try:
                waiting = self._queue.get_nowait()
            except queue.Empty:
                return False
            if waiting is None:
                return True
            taken.append(waiting)
            _in_savepoint(waiting, connection)
        return False

    def _alone(self, waiting: _Waiting) -> None:
        waiting.error = None
        try:
            with self._engine.begin() as connection:
                before = _changes(connection)
                waiting.value = waiting.work(connection)
                number = self._count(connection, before)
            self._committed(1, number)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits, which raises it
            waiting.error = error

    def _count(self, connection: sa.Connection, before: int) -> int:
        """Count a transaction that changed something, in itself; return its number, 0 where nothing is counted."""
        if not self.holder or _changes(connection) == before:
            return 0
        return leader_lock.count_commit(_driver(connection), self.holder)

    def _committed(self, works: int, number: int) -> None:
        if number:
            self.on_commit(number)
        self._measures.commits.inc()
        self._measures.commit_works.observe(works)


def _attempt(waiting: _Waiting, connection: sa.Connection) -> None:
    try:
        waiting.value = waiting.work(connection)
    except BaseException as error:  # noqa: BLE001 - handed to the thread that waits, which raises it
        waiting.error = error


def _in_savepoint(waiting: _Waiting, connection: sa.Connection) -> None:
    """Do a work, and roll it back when it fails; by the driver, as SQLAlchemy's savepoints cost more than it."""
    driver = _driver(connection)
    try:
        driver.execute("SAVEPOINT work")
        _attempt(waiting, connection)
        if not driver.in_transaction:
            raise _TransactionLost
        if waiting.error is not None:
            driver.execute("ROLLBACK TO work")
        driver.execute("RELEASE work")
    except sqlite3.Error as error:
        raise _TransactionLost from error


def _driver(connection: sa.Connection) -> sqlite3.Connection:
    driver = connection.connection.dbapi_connection
    if not isinstance(driver, sqlite3.Connection):
        raise TypeError(f"{type(driver).__name__} is not a connection of SQLite")
    return driver


def _changes(connection: sa.Connection) -> int:
    """Return how many rows this connection has changed since it was opened."""
    return _driver(connection).total_changes
