"""Writes to an SQLite database in one thread, with one commit for all waiting transactions.

    thread A ── work ─▶┐            BEGIN IMMEDIATE
    thread B ── work ─▶├─ queue ─▶  A's work · SAVEPOINT B's work · SAVEPOINT C's work
    thread C ── work ─▶┘            COMMIT, one fsync ─▶ A, B and C get their results

SQLite allows only one writing connection at a time. Each durable commit costs one fsync. Callers therefore queue their
transaction functions instead of competing for SQLite's lock. Transaction functions that arrive during one fsync share
the next fsync.

Failure cases:

* A transaction function raises an exception. The writer thread rolls back to the function's savepoint. Only the
  function's caller receives the exception.

* The shared transaction fails, for example because the disk is full. After the failure, the writer thread runs each
  transaction function in a separate transaction. Only the callers of failing transaction functions receive an error.

* The server process dies. Uncommitted changes are lost. No caller has received a result for a lost change.

* Another server has claimed the database. The writer thread commits nothing. Each caller receives `Superseded`.
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
"""Maximum number of transaction functions per commit, and maximum collecting time of a commit (ns)."""


class WriterClosed(Exception):
    """Signals that the writer thread accepts no more transactions."""


class _TransactionLost(Exception):
    """Signals that SQLite has rolled back the shared transaction."""


class _Waiting:
    """A transaction function with the future on which its caller waits."""

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
    """Runs queued transaction functions in order, and commits them together.

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
        """Run a transaction function, and return its result after the commit.

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
        """Finish queued transactions, and end the writer thread."""
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
        """Run and commit queued transaction functions together, and return True on closing."""
        taken.append(first)
        with self._engine.connect() as connection:
            transaction = connection.begin()
            before = _changes(connection)
            try:
                # The first transaction function needs no savepoint, because a rollback affects no other function.
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
                connection.invalidate()  # Closing the connection rolls back the transaction.
                raise
            faults.reach("before_commit")
            with transaction:  # Commit the transaction, or roll back after a failed commit.
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
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises the error
            waiting.error = error

    def _count(self, connection: sa.Connection, before: int) -> int:
        """Return a transaction's commit number, or 0 for an unchanged database."""
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
    except BaseException as error:  # noqa: BLE001 - the caller's thread raises the error
        waiting.error = error


def _in_savepoint(waiting: _Waiting, connection: sa.Connection) -> None:
    """Run a transaction function in a savepoint of the driver, because SQLAlchemy's savepoints are slow."""
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
        raise TypeError(f"{type(driver).__name__} is not an SQLite connection")
    return driver


def _changes(connection: sa.Connection) -> int:
    """Return the number of rows that this connection has changed."""
    return _driver(connection).total_changes
