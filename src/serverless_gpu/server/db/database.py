"""Runs database transactions with one interface for SQLite and PostgreSQL.

                    read                                     write
    SQLite          a connection per thread, a snapshot      one thread; waiting callers share a commit (`group_commit`)
    PostgreSQL      a connection from the pool, a snapshot   a connection from the pool, REPEATABLE READ, retried

A transaction function receives a connection and reads one snapshot of the database. `write` commits either all changes
of the transaction function or none. If a concurrent transaction changes the same row, `write` runs the transaction
function again. A transaction function must therefore not use the clock, files, the network or engines.

Failure cases:

* The database is unreachable or too busy. Callers receive `ServerUnavailable` and can safely repeat their request. If
  the connection broke during the commit, the changes may already be durable.

* The disk is full. The server releases the disk reserve and runs the transaction function again (`disk_reserve`). If
  the reserve is already used up, callers receive `ServerStorageFull`. Reads continue to work.

* A value does not fit into its database column. Callers receive `InvalidValue`.

* The database file is damaged or not a database. Callers receive `ServerProblem` until the operator restores a backup.

* A transaction function starts another transaction. `Database` refuses the inner transaction to prevent a deadlock.

* Another server uses the database, or the leader lock's session broke. A server without the leader lock writes nothing
  (`leader_lock`).
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
"""Maximum wait in seconds for a pooled connection or for SQLite's file lock."""
CONNECT_S = 5
TRIES = 6
AT_ONCE = 500
"""Maximum number of values in one ``IN (…)`` list, because databases limit statement parameters."""
TOLD_EVERY_NS = 5_000_000_000
PROBE_NS = 10_000_000_000
"""Nanoseconds without a successful write after which the health check also writes."""
DAMAGED = "the database file is damaged or not a database"
DAMAGED_HINT = "stop the server, rename its directory server/, and restore a backup with `sgpu server restore`"
OLDEST = {"postgresql": (15,), "sqlite": (3, 35)}
_CHANGED_MEANWHILE = frozenset({"40001", "40P01"})  # PostgreSQL error codes for serialisation failure and deadlock.
_UNIQUE = "23505"
_FULL = "53100"
# SQLite reports SHMSIZE if the disk has no space for the write-ahead log's index.
_SQLITE_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE})
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_FAILING = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY})
_READ_ONLY = frozenset({"25006", "58030"})  # PostgreSQL error codes for read-only transactions and disk errors.
UNWRITABLE = "the database cannot be written: its disk is read-only or failing"


_KINDS = "write a URL such as sqlite:///path/to/server.db or postgresql://user:password@host/name"
# A crashed database machine does not close its connections. Keepalives detect such a dead connection within half a
# minute.
_KEEPALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 4, "tcp_user_timeout": 30_000}


class Transactions(Protocol):
    """Interface for database reads and writes. `Database` implements this interface."""

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` on one database snapshot, and return its result."""
        ...

    def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in a transaction, possibly twice, and return its result after the commit."""
        ...


def in_chunks(values: Sequence[T], size: int = AT_ONCE) -> Iterator[Sequence[T]]:
    """Split values into chunks that fit into an ``IN (…)`` list."""
    return (values[start : start + size] for start in range(0, len(values), size))


class Database:
    """A server's database connections and transactions.

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
        self._served = False  # True after the server's start, when errors reach remote callers.
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
            # Create the database file readable only by its owner. SQLite's other files copy the file mode.
            path = Path(str(parsed.database))
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self.reserve = FileReserve(path)
        self._engine = _sqlite(parsed, begin="BEGIN IMMEDIATE", readers=False)
        # The writer thread also reads, because an in-memory database exists only in one connection.
        self._readers = self._engine if memory else _sqlite(parsed, begin="BEGIN", readers=True)
        self._writer = GroupCommit(self._engine, clock=clock, measures=self._measures)

    def acquire(self) -> None:
        """Acquire the leader lock, so that no other server uses the database.

        Raises:
            ServerProblem: another server uses the database.
            ServerUnavailable: the database does not answer.
        """
        with self._told():
            self.leader_lock.take()

    def number(self, *, now_ns: int) -> DatabasePosition:
        """Assign this server a new generation, so that older servers can no longer commit.

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
        """Register a callback that receives the number of each SQLite commit before `write` returns."""
        if self._writer is not None:
            self._writer.on_commit = told

    def checkpoint(self) -> None:
        """Copy SQLite's write-ahead log into the database file without waiting for locks."""
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
        """Migrate the database tables to this version. Current tables need no migration."""
        is_current = self.read(migrations.is_current)
        # The database driver knows the database version only after the first connection.
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
            # READ COMMITTED shows changes that other servers committed while this transaction waited for the lock.
            committed = connection.execution_options(isolation_level="READ COMMITTED")
            with committed.begin():
                # Wait for the lock without a timeout, because another server's migration may take minutes.
                committed.execute(sa.text("SET LOCAL lock_timeout = 0"))
                committed.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": migrations.LOCK})
                migrations.bring(committed)

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` on one database snapshot, and return its result. `work` must not write."""
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
        """Run `work` in a write transaction, and return its result after the commit.

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
        """Return the error message of the last failed write, or "" after a successful write."""
        return self._write_problem

    def problem(self, *, now_ns: int) -> str:
        """Test whether the database accepts reads and writes, and return an error message or "".

        The health check must also write, because a database on a read-only disk still answers reads.
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
                    # Check the lock again, because another server may have terminated the previous connection.
                    self.leader_lock.require()
                    if self._is_numbered:
                        leader_lock.require_postgres(connection, self.leader_lock.name)
                    done = work(connection)
                    faults.reach("before_commit")
                faults.reach("after_commit_before_told")
                return done
            except sa.exc.DBAPIError as error:
                state = getattr(error.orig, "sqlstate", None)
                # A concurrent transaction inserted the same row. The next call of `work` finds this row.
                again = state in _CHANGED_MEANWHILE or (state == _UNIQUE and tried == 1)
                if not again or tried == TRIES:
                    raise
                self._measures.retries.inc()
        raise AssertionError("unreachable")

    def _marked(self, work: Callable[[sa.Connection], T]) -> Callable[[sa.Connection], T]:
        """Wrap a transaction function for the writer thread, with its caller's logging context."""
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
        ):  # Exceptions of the transaction function are not database failures.
            self._measures.transaction_failures.labels(kind).inc()
            raise

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Translate driver errors into server errors."""
        try:
            yield
        except WriterClosed as error:
            raise ServerUnavailable("the server is stopping, and its database is closed") from error
        except leader_lock.Superseded as error:
            self.leader_lock.lose()
            raise ServerUnavailable(
                "another server has taken the database over",
                hint="send the request again to the new server",
            ) from error
        except OverflowError as error:  # SQLite's driver refuses oversized values itself.
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
        """Log an error for operators, at most once every five seconds."""
        now_ns = self._clock.boottime_ns()
        if now_ns - self._told_ns >= TOLD_EVERY_NS:
            self._told_ns = now_ns
            _log.log(level, "%s", line)


class _Turns:
    """Runs PostgreSQL write transactions concurrently, and retries of failed transactions exclusively."""

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
        raise InvalidValue("the database URL is not valid", hint=_KINDS) from error
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "postgresql+psycopg"):
        raise InvalidValue(f"the server cannot use databases of type {parsed.drivername}", hint=_KINDS)
    return parsed


def _sqlite(url: sa.URL, *, begin: str, readers: bool) -> sa.Engine:
    pool: dict[str, Any] = {"pool_size": READERS_MAX, "max_overflow": 0, "pool_timeout": WAIT_S}
    if not readers:
        # Only the writer thread uses this single connection.
        pool = {"poolclass": sa.StaticPool, "connect_args": {"check_same_thread": False}}
    engine = sa.create_engine(url, hide_parameters=True, **pool)

    @sa.event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # Prevent the driver from starting transactions.
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
            driver.execute(begin)  # A plain BEGIN acquires no lock and therefore cannot fail.
        else:
            connection.exec_driver_sql(begin)

    return engine


def _postgres(url: sa.URL, leader: LeaderLock) -> sa.Engine:
    engine = sa.create_engine(
        url,
        isolation_level="REPEATABLE READ",
        hide_parameters=True,  # Keep callers' secrets out of logged errors.
        pool_pre_ping=True,
        pool_size=POSTGRES_POOL,
        max_overflow=0,
        pool_timeout=WAIT_S,
        connect_args=_how_to_connect(leader.name),
    )

    @sa.event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: object) -> None:
        with connection.cursor() as cursor:
            # Override the database's configuration. A forgotten session must not block the server. Acknowledged changes
            # must be durable.
            cursor.execute(f"SET lock_timeout = '{WAIT_S}s'")
            cursor.execute(
                "SELECT set_config('synchronous_commit', 'on', false)"
                " WHERE current_setting('synchronous_commit') = 'off'"
            )
        connection.commit()
        leader.doubt()

    return engine


def _postgres_alone(url: sa.URL, name: str) -> sa.Engine:
    """Return an unpooled SQLAlchemy engine in autocommit mode."""
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
    """Translate a driver error for the caller, or return None for a bug in the server's SQL."""
    state = getattr(error.orig, "sqlstate", None) or ""
    if _is_full(error):
        return ServerStorageFull("the database's disk is full", hint="free disk space, then send the request again")
    if getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
        return ServerProblem(DAMAGED, hint=DAMAGED_HINT)
    if getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in _FAILING or state in _READ_ONLY:
        hint = "find the cause in the kernel's log (dmesg), remount or replace the disk, then restart the server"
        return ServerUnavailable(UNWRITABLE, hint=hint)
    if state in _CHANGED_MEANWHILE:
        return ServerUnavailable("the database is busy: other requests change the same rows", hint="try again later")
    # PostgreSQL refuses text that is too long or contains a zero byte.
    if isinstance(error, sa.exc.DataError):
        return InvalidValue(f"a value does not fit into the database: {said}")
    if getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR:  # Example: a missing table.
        return None
    if isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError) or error.connection_invalidated:
        return ServerUnavailable("the database does not answer", hint="try again later; the server's log has details")
    return None
