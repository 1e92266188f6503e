"""Runs transactions on the database, with the same interface for SQLite and PostgreSQL.

                    read                                     write
    SQLite          a connection per thread, a snapshot      one thread; waiting callers share a commit (`group_commit`)
    PostgreSQL      a connection from the pool, a snapshot   a connection from the pool, REPEATABLE READ, retried

A transaction function receives a connection and runs as one transaction. `write` makes either all changes of the
function durable, or none. The function reads a snapshot of the database. If another transaction changes the same row at
the same time, `write` runs the function again. A transaction function must therefore use only the database: no clock,
no file, no network and no engine.

Failure cases:

* The database is unreachable or too busy: callers receive `ServerUnavailable`. Usually the database has written
  nothing. If the connection broke during the commit, all changes may be durable. Callers can safely repeat their
  request.

* The disk is full: the server releases the disk reserve and runs the function again (`disk_reserve`). Without a
  reserve, callers receive `ServerStorageFull`, and reads continue.

* A value does not fit into its column: callers receive `InvalidValue`. The database checks values after the server has
  validated the request body.

* The database file is damaged or not a database: callers receive `ServerProblem`, and the operator restores a backup.

* A transaction function starts another transaction: `Database` refuses the inner transaction, because it would wait for
  the outer one.

* Another server uses the database, or the leader lock's session broke: the server writes nothing (`leader_lock`).
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.errors import (
    InvalidValue,
    ServerlessGpuError,
    ServerProblem,
    ServerStorageFull,
    ServerUnavailable,
)
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.db import leader_lock, migrations, tables
from serverless_gpu.server.db.disk_reserve import DiskReserve, FileReserve, NoReserve, TableReserve
from serverless_gpu.server.db.group_commit import GroupCommit, WriterClosed
from serverless_gpu.server.db.leader_lock import DatabasePosition, LeaderLock

T = TypeVar("T")
_log = logging.getLogger(__name__)

READERS_MAX = 40
POSTGRES_POOL = 16
WAIT_S = 10
"""Seconds that a caller waits for a pooled connection, or for SQLite's lock held by another process."""
CONNECT_S = 5
TRIES = 6
AT_ONCE = 500
"""Maximum number of values in one ``IN (…)`` list. Databases limit a statement's parameters."""
TOLD_EVERY_NS = 5_000_000_000
PROBE_NS = 10_000_000_000
"""Nanoseconds without a write after which a health check writes."""
DAMAGED = "the database file is damaged or not a database"
DAMAGED_HINT = "stop the server, rename its directory server/, and restore a backup with `sgpu server restore`"
OLDEST = {"postgresql": (15,), "sqlite": (3, 35)}
_CHANGED_MEANWHILE = frozenset({"40001", "40P01"})  # PostgreSQL error codes for serialisation failure and deadlock
_UNIQUE = "23505"
_FULL = "53100"
# SQLite reports SHMSIZE when the log's index does not fit on the disk.
_SQLITE_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE})
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_FAILING = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY})
_READ_ONLY = frozenset({"25006", "58030"})  # PostgreSQL error codes: read-only transaction, disk error
UNWRITABLE = "the database cannot be written: its disk is read-only or failing"


_KINDS = "write sqlite:///path/to/server.db or postgresql://user:password@host/name"
# A failed machine does not close its connections. The server therefore treats a connection as broken after half a
# minute of silence.
_KEEPALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 4, "tcp_user_timeout": 30_000}


class Transactions(Protocol):
    """Interface for reads and writes of the database. `Database` implements it."""

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` on one snapshot of the database, and return its result. Blocks."""
        ...

    def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Return the result of `work` once its changes are durable. `work` may run twice. Blocks."""
        ...


def in_chunks(values: Sequence[T], size: int = AT_ONCE) -> Iterator[Sequence[T]]:
    """Yield values in order, in chunks that fit into ``IN (…)``."""
    return (values[start : start + size] for start in range(0, len(values), size))


class Database:
    """The database of one server.

    Args:
        url: ``sqlite:///path``, ``sqlite://`` (in memory, for tests) or ``postgresql://…``.
        clock: limits how long one commit collects transactions.
        measures: metrics that count transactions.

    Attributes:
        leader_lock: lock of the server that owns this database, acquired by `acquire`.
        reserve: disk space reserve, which the loop `reserve` maintains.
    """

    def __init__(self, url: str, *, clock: Clock, measures: ServerMetrics | None = None) -> None:
        self._measures = measures or ServerMetrics()
        self._working = threading.local()
        self._closed = False
        self._clock = clock
        self._served = False  # True after the start. Errors then reach remote callers instead of the operator.
        self._told_ns = -TOLD_EVERY_NS
        self._is_numbered = False
        self._write_problem = ""
        self._written_ns = clock.boottime_ns()
        self._writer: GroupCommit | None = None
        parsed = _parse(url)
        self.kind = parsed.get_backend_name()
        self._where = f"{parsed.database}: " if self.kind == "sqlite" and parsed.database else ""
        self._file = Path(parsed.database) if self.kind == "sqlite" and parsed.database else None
        self.reserve: DiskReserve = NoReserve()
        self.leader_lock = LeaderLock(
            parsed, lambda: _postgres_alone(parsed, self.leader_lock.name).connect(), clock=clock
        )
        if self.kind == "postgresql":
            self._readers = self._engine = _postgres(parsed, self.leader_lock)
            self._turns = _Turns()
            self.reserve = TableReserve(lambda: _postgres_alone(parsed, self.leader_lock.name).connect())
            return
        memory = not parsed.database
        if not memory:
            # Create the file before SQLite does, readable only by its owner. SQLite's other files copy its mode.
            path = Path(str(parsed.database))
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self.reserve = FileReserve(path)
        self._engine = _sqlite(parsed, begin="BEGIN IMMEDIATE", readers=False)
        # A database in memory exists only in one connection, so the writer also reads.
        self._readers = self._engine if memory else _sqlite(parsed, begin="BEGIN", readers=True)
        self._writer = GroupCommit(self._engine, clock=clock, measures=self._measures)

    def acquire(self) -> None:
        """Make this server the only server of the database until the database is closed.

        Raises:
            ServerProblem: another server uses the database.
            ServerUnavailable: the database does not answer.
        """
        with self._told():
            self.leader_lock.take()

    def number(self, *, now_ns: int) -> DatabasePosition:
        """Assign this server a new generation, so that no older server can commit.

        Returns:
            The current position of the database.
        """
        name = self.leader_lock.name
        found = self.write(lambda connection: leader_lock.begin(connection, holder=name, now_ns=now_ns))
        if self._writer is not None:
            self._writer.holder = name
        self._is_numbered = True
        self.leader_lock.numbered()
        return found

    def on_commit(self, told: Callable[[int], None]) -> None:
        """Call a function with each commit's number before its `write` returns. PostgreSQL counts no commits."""
        if self._writer is not None:
            self._writer.on_commit = told

    def checkpoint(self) -> None:
        """Copy SQLite's log into the database file without waiting for a lock, to limit the loss of a log."""
        if self._file is None:
            return
        try:
            with contextlib.closing(sqlite3.connect(self._file, timeout=0)) as connection:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:
            self._tell_operator(
                f"the server could not copy SQLite's log into the database file: {error}", logging.WARNING
            )

    def migrate(self) -> None:
        """Migrate the tables to this version. If the tables are current, the call takes a few milliseconds."""
        is_current = self.read(migrations.is_current)
        # The driver knows the server version after the first connection.
        version = tuple(self._readers.dialect.server_version_info or ())
        if version < OLDEST[self.kind]:
            there, least = (".".join(map(str, numbers)) for numbers in (version, OLDEST[self.kind]))
            raise ServerProblem(f"the database is {self.kind} {there}", hint=f"use {self.kind} {least} or newer")
        if not is_current:
            self._migrate()
        self._served = True

    def _migrate(self) -> None:
        if self._writer is not None:
            self.write(migrations.bring)
            return
        with self._told(), self._engine.connect() as connection:
            # The transaction waits for the lock before it reads, and must then see changes committed during the wait.
            committed = connection.execution_options(isolation_level="READ COMMITTED")
            with committed.begin():
                # Another server may migrate for minutes, so this statement waits for the lock without a timeout.
                committed.execute(sa.text("SET LOCAL lock_timeout = 0"))
                committed.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": migrations.LOCK})
                migrations.bring(committed)

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Return the result of `work`, which reads one snapshot of the database and must not write."""
        if self.leader_lock.is_stale:
            self.leader_lock.require()
        with self._measured("read"), self._told(), self._one_at_a_time():
            if self._writer is not None and self._readers is self._engine:
                return self._writer.do(work)
            with self._readers.connect() as connection:
                if self.kind == "postgresql":
                    connection = connection.execution_options(postgresql_readonly=True)
                with connection.begin():
                    return work(connection)

    def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Return the result of `work`, once all its changes are durable.

        Raises:
            ServerUnavailable: the database is unreachable or closed.
            ServerStorageFull: its disk is full.
            Exception: any exception of `work`, after which the database contains none of its changes.
        """
        self.leader_lock.require()
        with self._noted(), self._measured("write"), self._told(), self._one_at_a_time():
            try:
                return self._written(work)
            except sa.exc.DBAPIError as error:
                if not _is_full(error) or not self.reserve.give_back():
                    raise
            return self._written(work)

    @property
    def write_problem(self) -> str:
        """Return why the database refused the last write, or ""."""
        return self._write_problem

    def problem(self, *, now_ns: int) -> str:
        """Return the database's problem, or "". The check reads, and sometimes writes too.

        A database whose disk turned read-only still answers reads, so a successful read does not prove that writes
        work.
        """
        try:
            self.read(lambda connection: connection.scalar(sa.select(tables.principals.c.name).limit(1)))
            boot_ns = self._clock.boottime_ns()
            if self._is_numbered and (self._write_problem or boot_ns - self._written_ns > PROBE_NS):
                self.write(lambda connection: leader_lock.probe(connection, now_ns=now_ns))
        except ServerProblem as error:
            return error.message
        return ""

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Record whether the database accepts writes."""
        try:
            yield
        except (ServerUnavailable, ServerStorageFull) as error:
            self._write_problem = error.message
            raise
        self._write_problem = ""
        self._written_ns = self._clock.boottime_ns()

    def _written(self, work: Callable[[sa.Connection], T]) -> T:
        return self._write_postgres(work) if self._writer is None else self._writer.do(self._marked(work))

    def close(self) -> None:
        """Finish waiting transactions and close all connections."""
        self._closed = True
        if self._writer is not None:
            self._writer.close()
        self._readers.dispose()
        self._engine.dispose()
        self.leader_lock.close()

    def _write_postgres(self, work: Callable[[sa.Connection], T]) -> T:
        for tried in range(1, TRIES + 1):
            turn = self._turns.together() if tried == 1 else self._turns.alone()
            try:
                with turn, self._engine.begin() as connection:
                    # The pool may open a new connection after another server has terminated the previous connection.
                    self.leader_lock.require()
                    if self._is_numbered:
                        leader_lock.require_postgres(connection, self.leader_lock.name)
                    done = work(connection)
                    faults.reach("before_commit")
                faults.reach("after_commit_before_told")
                return done
            except sa.exc.DBAPIError as error:
                state = getattr(error.orig, "sqlstate", None)
                # Another transaction wrote this row after `work` had searched for the row. The next call of `work` will
                # find the row.
                # row.
                again = state in _CHANGED_MEANWHILE or (state == _UNIQUE and tried == 1)
                if not again or tried == TRIES:
                    raise
                self._measures.retries.inc()
        raise AssertionError("unreachable")

    def _marked(self, work: Callable[[sa.Connection], T]) -> Callable[[sa.Connection], T]:
        """Return a function that marks its writer thread as busy and logs in its caller's context."""
        context = contextvars.copy_context()

        def marked(connection: sa.Connection) -> T:
            with self._one_at_a_time():
                return context.run(work, connection)

        return marked

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if getattr(self._working, "now", False):
            raise RuntimeError(
                "a transaction function must not start another transaction; pass its connection on instead"
            )
        if self._closed:
            raise WriterClosed
        self._working.now = True
        try:
            yield
        finally:
            self._working.now = False

    @contextlib.contextmanager
    def _measured(self, kind: str) -> Iterator[None]:
        try:
            with self._measures.transactions.labels(kind).time():
                yield
        except (
            ServerUnavailable,
            ServerStorageFull,
        ):  # Exceptions of the transaction function are not failures of the database.
            self._measures.transaction_failures.labels(kind).inc()
            raise

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Translate a driver's errors into the server's errors."""
        try:
            yield
        except WriterClosed as error:
            raise ServerUnavailable("the server is stopping, and its database is closed") from error
        except leader_lock.Superseded as error:
            self.leader_lock.lose()
            raise ServerUnavailable(
                "another server has taken the database over",
                hint="send the request again; the new server will answer it",
            ) from error
        except OverflowError as error:  # SQLite's driver checks values before it sends them.
            raise InvalidValue(f"a value does not fit into the database: {error}") from error
        except sa.exc.TimeoutError as error:
            raise ServerUnavailable(f"no connection to the database was free within {WAIT_S} s") from error
        except sa.exc.DBAPIError as error:
            said = str(error.orig).strip().partition("\n")[0]
            problem = _problem(error, said)
            if problem is None:
                raise
            if isinstance(problem, ServerUnavailable):
                self.leader_lock.doubt()
            if isinstance(problem, ServerProblem):
                why = f"{problem.message}: {self._where}{said}"
                self._tell_operator(why, logging.WARNING if problem.retryable else logging.ERROR)
                if not self._served:
                    problem.message = why
            raise problem from error

    def _tell_operator(self, line: str, level: int) -> None:
        """Log an error with hosts and paths, which clients must not see, at most once every five seconds."""
        now_ns = self._clock.boottime_ns()
        if now_ns - self._told_ns >= TOLD_EVERY_NS:
            self._told_ns = now_ns
            _log.log(level, "%s", line)


class _Turns:
    """Coordinates writes to PostgreSQL: many transactions together, or one retry alone.

    Concurrent transactions that change the same row make each other fail. A failed transaction runs again alone, so its
    second run succeeds unless another process also writes.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._together = 0
        self._alone = False
        self._want_alone = 0

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._want_alone)
            self._together += 1
        try:
            yield
        finally:
            with self._changed:
                self._together -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._want_alone += 1
            self._changed.wait_for(lambda: not self._alone and not self._together)
            self._want_alone -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


def _parse(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise InvalidValue("the url of the database is not valid", hint=_KINDS) from error
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "postgresql+psycopg"):
        raise InvalidValue(f"the server cannot use databases of type {parsed.drivername}", hint=_KINDS)
    return parsed


def _sqlite(url: sa.URL, *, begin: str, readers: bool) -> sa.Engine:
    pool: dict[str, Any] = {"pool_size": READERS_MAX, "max_overflow": 0, "pool_timeout": WAIT_S}
    if not readers:
        # One connection, which only the writer's thread uses.
        pool = {"poolclass": sa.StaticPool, "connect_args": {"check_same_thread": False}}
    engine = sa.create_engine(url, hide_parameters=True, **pool)

    @sa.event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # The driver must not begin transactions by itself.
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {WAIT_S * 1000}")
        cursor.execute("PRAGMA foreign_keys = ON")
        if readers:
            cursor.execute("PRAGMA query_only = ON")
        else:
            cursor.execute("PRAGMA journal_mode = WAL")
            cursor.execute("PRAGMA synchronous = FULL")
        cursor.close()

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        driver = connection.connection.dbapi_connection
        if readers and isinstance(driver, sqlite3.Connection):
            driver.execute(begin)  # BEGIN acquires no lock and thus cannot fail, so no error needs a translation.
        else:
            connection.exec_driver_sql(begin)

    return engine


def _postgres(url: sa.URL, leader: LeaderLock) -> sa.Engine:
    engine = sa.create_engine(
        url,
        isolation_level="REPEATABLE READ",
        hide_parameters=True,  # Parameters may be callers' secrets, and errors go into the log.
        pool_pre_ping=True,
        pool_size=POSTGRES_POOL,
        max_overflow=0,
        pool_timeout=WAIT_S,
        connect_args=_how_to_connect(leader.name),
    )

    @sa.event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: object) -> None:
        with connection.cursor() as cursor:
            # The session's settings override the configuration of the database. A forgotten session must not block the
            # server, and acknowledged changes must be on disk.
            cursor.execute(f"SET lock_timeout = '{WAIT_S}s'")
            cursor.execute(
                "SELECT set_config('synchronous_commit', 'on', false)"
                " WHERE current_setting('synchronous_commit') = 'off'"
            )
        connection.commit()
        leader.doubt()

    return engine


def _postgres_alone(url: sa.URL, name: str) -> sa.Engine:
    """Return an engine without a connection pool that commits after each statement."""
    return sa.create_engine(
        url,
        isolation_level="AUTOCOMMIT",
        hide_parameters=True,
        poolclass=sa.NullPool,
        connect_args=_how_to_connect(name),
    )


def _how_to_connect(name: str) -> dict[str, Any]:
    return {"application_name": name, "connect_timeout": CONNECT_S, **_KEEPALIVE}


def _is_full(error: sa.exc.DBAPIError) -> bool:
    code, state = getattr(error.orig, "sqlite_errorcode", None), getattr(error.orig, "sqlstate", None)
    return code in _SQLITE_FULL or state == _FULL


def _problem(error: sa.exc.DBAPIError, said: str) -> ServerlessGpuError | None:
    """Translate a driver's error for the caller, or return None for a mistake in the server's own SQL."""
    state = getattr(error.orig, "sqlstate", None) or ""
    if _is_full(error):
        return ServerStorageFull("the database's disk is full", hint="free disk space, then send the request again")
    if getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
        return ServerProblem(DAMAGED, hint=DAMAGED_HINT)
    if getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in _FAILING or state in _READ_ONLY:
        hint = "read the kernel's log (dmesg) for the cause; remount or replace the disk, then restart the server"
        return ServerUnavailable(UNWRITABLE, hint=hint)
    if state in _CHANGED_MEANWHILE:
        return ServerUnavailable("the database is busy: other requests change the same rows", hint="try again later")
    # The text is too long or has a zero byte. Only PostgreSQL refuses such text.
    if isinstance(error, sa.exc.DataError):
        return InvalidValue(f"a value does not fit into the database: {said}")
    if getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR:  # Example: a missing table.
        return None
    if isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError) or error.connection_invalidated:
        return ServerUnavailable("the database does not answer", hint="try again later; the server's log has details")
    return None
