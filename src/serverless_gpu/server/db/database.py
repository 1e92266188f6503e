"""The database: one way to read, one way to write, the same on SQLite and PostgreSQL.

                    read                                     write
    SQLite          a connection per thread, a snapshot      one thread; who waits shares a commit (`group_commit`)
    PostgreSQL      a connection from the pool, a snapshot   a connection from the pool, REPEATABLE READ, tried again

A piece of work is a function of a connection. It is one transaction: all of it is durable when `write` returns, or
nothing of it is there. It sees the database as of its start; where a row that it changes was changed by another one
meanwhile, it is done again. So it must be pure database work: no clock, no file, no network, no engine inside.

What can go wrong:

- The database is away, or too busy: `ServerUnavailable`; nothing was written, or, where the connection broke while
  committing, everything was. Callers repeat their request, and requests may be repeated.
- The disk is full: what is kept back is given back, and the work done again (`disk_reserve`); if there is nothing any
  more, `ServerStorageFull`, and reading goes on.
- A value does not fit: `InvalidValue`, the last resort behind the checks of each body.
- Its file is damaged, or none: `ServerProblem`; a backup is what helps.
- A work in a work would wait for itself: refused.
- Another server uses the database, or the session that says so broke: nothing is written (`leader_lock`).
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
"""How long a work waits for a connection of the pool, or for SQLite's lock when another process has it."""
CONNECT_S = 5
TRIES = 6
AT_ONCE = 500
"""How many values a portion of a long list for ``IN (…)`` has: a statement takes only so many."""
TOLD_EVERY_NS = 5_000_000_000
PROBE_NS = 10_000_000_000
"""After so long without a write, a health check writes."""
DAMAGED = "the database is damaged, or is none"
DAMAGED_HINT = "stop the server; `sgpu server restore` makes it anew from a backup, once server/ is moved away"
OLDEST = {"postgresql": (15,), "sqlite": (3, 35)}
_CHANGED_MEANWHILE = frozenset({"40001", "40P01"})  # serialisation failure, deadlock
_UNIQUE = "23505"
_FULL = "53100"
_SQLITE_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE})  # the latter: for the log's index
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_FAILING = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY})
_READ_ONLY = frozenset({"25006", "58030"})  # PostgreSQL: a transaction that may not write, an error of its disk
UNWRITABLE = "the database cannot be written: its disk is read-only, or fails"


_KINDS = "write sqlite:///path/to/server.db or postgresql://user:password@host/name"
# A machine that is gone sends no farewell: half a minute of silence, and the connection counts as broken.
_KEEPALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 4, "tcp_user_timeout": 30_000}


class Transactions(Protocol):
    """Reads and writes of the database; `Database` implements it."""

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Return what `work` returns, reading one state of the database; called in a thread."""
        ...

    def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Return what `work` returns once its changes are durable; called in a thread. `work` may run twice."""
        ...


def in_chunks(values: Sequence[T], size: int = AT_ONCE) -> Iterator[Sequence[T]]:
    """Yield values in their order, so many at a time, for ``IN (…)``."""
    return (values[start : start + size] for start in range(0, len(values), size))


class Database:
    """A database of a server.

    Args:
        url: ``sqlite:///path``, ``sqlite://`` (in memory, for tests) or ``postgresql://…``.
        clock: bounds how long writers are gathered for one commit.
        measures: where transactions are counted.

    Attributes:
        leader_lock: of the one server that uses it; taken by `acquire`.
        reserve: room that is kept back; the loop `reserve` tends it.
    """

    def __init__(self, url: str, *, clock: Clock, measures: ServerMetrics | None = None) -> None:
        self._measures = measures or ServerMetrics()
        self._working = threading.local()
        self._closed = False
        self._clock = clock
        self._served = False  # once it is, what goes wrong is read by those who ask, and not by who started it
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
            # Made before SQLite does: its owner alone may read it, and SQLite's other files take on its mode.
            path = Path(str(parsed.database))
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self.reserve = FileReserve(path)
        self._engine = _sqlite(parsed, begin="BEGIN IMMEDIATE", readers=False)
        # A database in memory belongs to its one connection, so its writer reads, too.
        self._readers = self._engine if memory else _sqlite(parsed, begin="BEGIN", readers=True)
        self._writer = GroupCommit(self._engine, clock=clock, measures=self._measures)

    def acquire(self) -> None:
        """Be the only server of this database, until it is closed.

        Raises:
            ServerProblem: another server uses it.
            ServerUnavailable: the database does not answer.
        """
        with self._told():
            self.leader_lock.take()

    def number(self, *, now_ns: int) -> DatabasePosition:
        """Give this server a generation of its own: no older one commits anything from now on.

        Returns:
            Where the database stands.
        """
        name = self.leader_lock.name
        found = self.write(lambda connection: leader_lock.begin(connection, holder=name, now_ns=now_ns))
        if self._writer is not None:
            self._writer.holder = name
        self._is_numbered = True
        self.leader_lock.numbered()
        return found

    def on_commit(self, told: Callable[[int], None]) -> None:
        """Call a function with each commit's number before its writer returns; PostgreSQL's are not counted."""
        if self._writer is not None:
            self._writer.on_commit = told

    def checkpoint(self) -> None:
        """Move what is in SQLite's log into its file, so that less is lost with the log; without waiting for a lock."""
        if self._file is None:
            return
        try:
            with contextlib.closing(sqlite3.connect(self._file, timeout=0)) as connection:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:
            self._tell_operator(f"the database's log was not moved into its file: {error}", logging.WARNING)

    def migrate(self) -> None:
        """Bring the tables to this version; a few milliseconds when they are."""
        is_current = self.read(migrations.is_current)
        version = tuple(self._readers.dialect.server_version_info or ())  # known since the first connection
        if version < OLDEST[self.kind]:
            there, least = (".".join(map(str, numbers)) for numbers in (version, OLDEST[self.kind]))
            raise ServerProblem(f"the database is {self.kind} {there}", hint=f"{self.kind} {least} or newer is needed")
        if not is_current:
            self._migrate()
        self._served = True

    def _migrate(self) -> None:
        if self._writer is not None:
            self.write(migrations.bring)
            return
        with self._told(), self._engine.connect() as connection:
            # The lock is waited for first, and what was committed meanwhile must be seen.
            committed = connection.execution_options(isolation_level="READ COMMITTED")
            with committed.begin():
                committed.execute(sa.text("SET LOCAL lock_timeout = 0"))  # another server may migrate for minutes
                committed.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": migrations.LOCK})
                migrations.bring(committed)

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Return what a work finds; it sees one moment of the database, and may not write."""
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
        """Return what a work returns, once all that it wrote is durable.

        Raises:
            ServerUnavailable: the database is away, or closed.
            ServerStorageFull: its disk is full.
            Exception: whatever the work raises; nothing of it is written then.
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
        """Return why the last write did not succeed, where that was the database's fault, or ""."""
        return self._write_problem

    def problem(self, *, now_ns: int) -> str:
        """Return what is wrong with the database, or "": asked to read, and now and then to write.

        A disk that turned read-only under a server goes on being read.
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
        """Remember whether the database takes writes."""
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
        """Finish what waits and close all connections."""
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
                    # The connection may be a new one, because another server has ended the last.
                    self.leader_lock.require()
                    if self._is_numbered:
                        leader_lock.require_postgres(connection, self.leader_lock.name)
                    done = work(connection)
                    faults.reach("before_commit")
                faults.reach("after_commit_before_told")
                return done
            except sa.exc.DBAPIError as error:
                state = getattr(error.orig, "sqlstate", None)
                # A row that another transaction wrote after this one had looked for it will be found the next time.
                again = state in _CHANGED_MEANWHILE or (state == _UNIQUE and tried == 1)
                if not again or tried == TRIES:
                    raise
                self._measures.retries.inc()
        raise AssertionError("unreachable")

    def _marked(self, work: Callable[[sa.Connection], T]) -> Callable[[sa.Connection], T]:
        """Return a work that the writer's thread knows it is in, and whose lines in the log say whose it is."""
        context = contextvars.copy_context()

        def marked(connection: sa.Connection) -> T:
            with self._one_at_a_time():
                return context.run(work, connection)

        return marked

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if getattr(self._working, "now", False):
            raise RuntimeError("work on the database inside of other work: pass the connection on instead")
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
        except (ServerUnavailable, ServerStorageFull):  # a work's own refusal is no failure of the database
            self._measures.transaction_failures.labels(kind).inc()
            raise

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Say in the server's words what a driver says in its own."""
        try:
            yield
        except WriterClosed as error:
            raise ServerUnavailable("the server is stopping, and its database is closed") from error
        except leader_lock.Superseded as error:
            self.leader_lock.lose()
            raise ServerUnavailable(
                "another server has taken the database over", hint="ask again: it answers"
            ) from error
        except OverflowError as error:  # SQLite's driver looks before it asks
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
        """Write into the log what requests are not told: it names hosts and paths. Now and then, not for each."""
        now_ns = self._clock.boottime_ns()
        if now_ns - self._told_ns >= TOLD_EVERY_NS:
            self._told_ns = now_ns
            _log.log(level, "%s", line)


class _Turns:
    """Who may write to PostgreSQL now: many at once, or one alone.

    Works that change the same row at once make each other fail. One that failed goes alone, so the second try succeeds
    unless another process writes, too.
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
        raise InvalidValue("the url of the database cannot be read", hint=_KINDS) from error
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "postgresql+psycopg"):
        raise InvalidValue(f"{parsed.drivername} is no kind of database that the server can use", hint=_KINDS)
    return parsed


def _sqlite(url: sa.URL, *, begin: str, readers: bool) -> sa.Engine:
    pool: dict[str, Any] = {"pool_size": READERS_MAX, "max_overflow": 0, "pool_timeout": WAIT_S}
    if not readers:
        # One connection, made and used by the writer's thread.
        pool = {"poolclass": sa.StaticPool, "connect_args": {"check_same_thread": False}}
    engine = sa.create_engine(url, hide_parameters=True, **pool)

    @sa.event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself
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
            driver.execute(begin)  # takes no lock, so it cannot fail in a way that would have to be translated
        else:
            connection.exec_driver_sql(begin)

    return engine


def _postgres(url: sa.URL, leader: LeaderLock) -> sa.Engine:
    engine = sa.create_engine(
        url,
        isolation_level="REPEATABLE READ",
        hide_parameters=True,  # what is written may be a caller's secret, and errors go into the log
        pool_pre_ping=True,
        pool_size=POSTGRES_POOL,
        max_overflow=0,
        pool_timeout=WAIT_S,
        connect_args=_how_to_connect(leader.name),
    )

    @sa.event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: object) -> None:
        with connection.cursor() as cursor:
            # No forgotten session makes the server stand still, and what is acknowledged is on disk,
            # whatever the database's own configuration says.
            cursor.execute(f"SET lock_timeout = '{WAIT_S}s'")
            cursor.execute(
                "SELECT set_config('synchronous_commit', 'on', false)"
                " WHERE current_setting('synchronous_commit') = 'off'"
            )
        connection.commit()
        leader.doubt()

    return engine


def _postgres_alone(url: sa.URL, name: str) -> sa.Engine:
    """Return an engine without a pool, where each statement commits by itself."""
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
    """Return what a driver's error means for a request, or None when it is a mistake in our own SQL."""
    state = getattr(error.orig, "sqlstate", None) or ""
    if _is_full(error):
        return ServerStorageFull("the database has no room on its disk", hint="make room, and ask again")
    if getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
        return ServerProblem(DAMAGED, hint=DAMAGED_HINT)
    if getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in _FAILING or state in _READ_ONLY:
        hint = "the kernel's log (dmesg) says why; mount the disk again or replace it, and start the server again"
        return ServerUnavailable(UNWRITABLE, hint=hint)
    if state in _CHANGED_MEANWHILE:
        return ServerUnavailable("the database is busy: others change the same rows", hint="ask again later")
    if isinstance(error, sa.exc.DataError):  # a text too long, or with a zero byte: PostgreSQL looks, SQLite does not
        return InvalidValue(f"a value does not fit into the database: {said}")
    if getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR:  # no such table, and the like
        return None
    if isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError) or error.connection_invalidated:
        return ServerUnavailable("the database does not answer", hint="ask again later; the server's log says more")
    return None
