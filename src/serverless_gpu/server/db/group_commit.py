"""Writes to an SQLite database with one thread, which commits waiting transactions together.

    thread A ── work ─▶┐            BEGIN IMMEDIATE
    thread B ── work ─▶├─ queue ─▶  A's work · SAVEPOINT B's work · SAVEPOINT C's work
    thread C ── work ─▶┘            COMMIT, one fsync ─▶ A, B and C get their results

SQLite lets one connection write at a time, and a durable commit costs one fsync. Therefore callers do not compete for
the lock. Callers queue transaction functions. Transaction functions that arrive during one fsync share the next fsync.

Failure cases:

* A transaction function raises: the writer rolls back to the function's savepoint, and the caller receives the
  exception. The failure does not affect other functions.

* The whole transaction fails (disk full, I/O error, lock held by another process): SQLite writes no change of the
  transaction. The writer then runs each function in a separate transaction, so that only callers of failing functions
  get an error.

* The process dies: committed changes remain, and uncommitted changes are lost. No caller has received a result for a
  lost change.

* Another server has claimed the database: the writer commits nothing, and each caller receives `Superseded`.
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
"""Maximum number of functions and maximum age (ns) of one commit."""


class WriterClosed(Exception):
    """The writer is closed and accepts no more transactions."""


class _TransactionLost(Exception):
    """SQLite has rolled back the whole transaction."""


class _Waiting:
    """A transaction function, and the future on which its caller waits."""

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
    """Runs transaction functions in the order of arrival, and commits waiting functions together.

    Args:
        engine: an engine whose connections begin with ``BEGIN IMMEDIATE``.
        clock: limits how long a commit accepts more transaction functions.
        measures: metrics that count commits.

    Attributes:
        holder: `LeaderLock.name`, once this server has a generation. The writer then counts commits in the database.
        on_commit: called with the number of each commit, before the commit's callers get their results.
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
        """Run a transaction function and return its result, once its changes are durable.

        Raises:
            WriterClosed: the writer is closed.
            Exception: the exception of the function, or the error of its commit.
        """
        waiting = _Waiting(work)
        with self._lock:
            if self._closed:
                raise WriterClosed
            self._queue.put(waiting)
        value: T = waiting.future.result()
        return value

    def close(self) -> None:
        """Finish waiting transactions, and end the writer thread."""
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
        """Commit a function with functions that arrive meanwhile. Return True when the writer closes."""
        taken.append(first)
        with self._engine.connect() as connection:
            transaction = connection.begin()
            before = _changes(connection)
            try:
                # The first function needs no savepoint: if it fails, the transaction contains nothing else.
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
                connection.invalidate()  # The transaction's state is unknown. Closing the connection rolls it back.
                raise
            faults.reach("before_commit")
            with transaction:  # The end of this block commits, or rolls back after a failed commit.
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
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            waiting.error = error

    def _count(self, connection: sa.Connection, before: int) -> int:
        """Count a transaction that changed rows, and return the transaction's number, or 0."""
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
    except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
        waiting.error = error


def _in_savepoint(waiting: _Waiting, connection: sa.Connection) -> None:
    """Run a function in a savepoint of the driver, because SQLAlchemy's savepoints are slow."""
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
    """Return the number of rows that this connection has changed since it was opened."""
    return _driver(connection).total_changes
