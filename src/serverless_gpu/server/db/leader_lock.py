"""Ensures that one server owns a database, with a leader lock and a fencing generation.

A server keeps leases and deliveries in memory. Two servers with one database would therefore contradict each other.

    SQLite        a lock on a file beside the database, held until the process ends
    PostgreSQL    an advisory lock in a separate session, checked every second. PostgreSQL ends that session after
                  half a minute without a check (`TTL_S`)

    take ─▶ held ──session broke──▶ not held: nothing is written ──taken again──▶ held
                                        └── another generation, or refused for a minute ─▶ gone: the server ends

A PostgreSQL restart releases the leader lock. The server immediately acquires the released lock again. After a network
failure, PostgreSQL ends the old session and releases its lock within half a minute. If PostgreSQL refuses the leader
lock for a minute, another server therefore holds the lock. A server that lost the leader lock to another server never
writes again:

* The next owner first terminates all database sessions of other servers. PostgreSQL rolls back the open transactions of
  terminated sessions.

* A new database session checks the leader lock before its first write (`doubt`).

* Each owner increments the database's generation and stores its name as the holder. If a server finds another holder,
  the server ends, because its leases and deliveries are outdated.

The generation fences writes:

    PostgreSQL    each write transaction takes a shared lock on the table before its snapshot. A new owner takes an
                  exclusive lock. A write therefore sees the new holder, or the new owner waits for the write
    SQLite        each commit that changed rows also increments a counter in the row. The commit fails if the row has
                  another holder. `high_water_mark_file.py` detects a rollback by that count

A machine may suspend a server during a transaction and resume the server an hour later. The database rolls back the
transaction of a suspended server. The in-memory state of a paused server may be outdated. After `STALE_S` seconds
without a check, the server therefore checks the leader lock before each read.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import ServerProblem, ServerUnavailable
from serverless_gpu.node.base.requirements import lock_error, require_record_locks
from serverless_gpu.server.db import migrations
from serverless_gpu.server.db.tables import audit, server_identity

ROW = "server"
HOLDER = f"SELECT holder FROM {server_identity.name} WHERE name = '{ROW}'"
_LOCK_SHARED = f"LOCK TABLE {server_identity.name} IN ROW SHARE MODE"
_LOCK_ALONE = f"LOCK TABLE {server_identity.name} IN EXCLUSIVE MODE"
_COUNT = (
    f"UPDATE {server_identity.name} SET commits = commits + 1 WHERE name = '{ROW}' AND holder = ? RETURNING commits"
)


LOOK_S = 1.0
TTL_S = 30.0
"""Seconds without a leader lock check after which another server may take over."""
WAIT_S = 5
"""Seconds that a starting server waits for a stopping server's leader lock."""
REFUSED_S = 60.0
STALE_S = 5.0
"""Seconds without a leader lock check after which each read checks the lock first."""
APPLICATION = "serverless-gpu"
_KEY = migrations.LOCK + 1
_TAKEN = "55P03"  # PostgreSQL error code lock_not_available.
_NOT_MINE = "42501"  # PostgreSQL error code insufficient_privilege.
_ENDED_S = 10.0
_PAUSE_S = 0.05
_END = sa.text(
    "SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    " AND application_name LIKE :all AND application_name <> :mine"
)
_log = logging.getLogger(__name__)


class DatabasePosition(msgspec.Struct, frozen=True, kw_only=True):
    """Database position: counters that never decrease, except after a rollback."""

    database_id: str  # Permanent random identifier of the database.
    generation: int  # Number of servers that have claimed the database.
    commits: int  # Number of SQLite transactions that changed rows; 0 for PostgreSQL.
    audit: int  # Number of the newest audit row.

    def __str__(self) -> str:
        commits = f"commit {self.commits:,}, " if self.commits else ""
        return f"{commits}audit row {self.audit:,}, generation {self.generation:,}"


class TakenOver(ServerProblem):
    """Signals that another server took over the database from this paused server."""


class LeaderLock:
    """Lock that makes one server the owner of a database. All methods are thread-safe.

    Attributes:
        name: application name of this server's sessions in PostgreSQL.
        on_gone: called once, when another server has taken over the database.
    """

    def __init__(self, url: sa.URL, connect: Callable[[], sa.Connection], *, clock: Clock) -> None:
        self._path = f"{url.database}.lock" if url.database and url.get_backend_name() == "sqlite" else ""
        self._is_postgres = url.get_backend_name() == "postgresql"
        self._connect = connect
        self._clock = clock
        self._lock = threading.Lock()
        self.name = f"{APPLICATION} {secrets.token_hex(4)}"
        self._looks = 0
        self._file = -1
        self._session: sa.Connection | None = None
        self._held = True  # Operations before `take` do not require the lock.
        self._refused_ns: int | None = None
        self._taken = False
        self._is_numbered = False
        self._looked_ns = clock.boottime_ns()
        self.is_gone = False
        self.on_gone: Callable[[], None] = lambda: None

    def take(self) -> None:
        """Acquire the leader lock, or raise an error if another server uses the database."""
        with self._lock:
            taken = self._take_session() if self._is_postgres else self._take_file()
            if not taken:
                raise ServerProblem(
                    "another server uses this database",
                    hint="stop the other server, or give this server another database with --database",
                )
            self._taken = True
            self._looked_ns = self._clock.boottime_ns()

    def numbered(self) -> None:
        """Record that this server has a generation.

        After this call, the server ends if another server becomes the holder.
        """
        self._is_numbered = True

    def lose(self) -> None:
        """Record that another server has claimed the database, and end this server."""
        self._held = False
        if not self.is_gone:
            self.is_gone = True
            _log.error("another server has taken the database over; this server ends")
            self.on_gone()

    @property
    def is_held(self) -> bool:
        """Return True if this server owned the database at the last check."""
        return self._held and not self.is_gone

    def require(self) -> None:
        """Raise an error unless this server owns the database. Check a doubtful lock again."""
        if self._held and not self.is_stale:
            return
        seen = self._looks
        with self._lock:
            if self._looks == seen:
                self._look()
            is_held = self._held  # A concurrent check temporarily clears `_held`.
        if not is_held:
            raise ServerUnavailable(
                "the database does not answer, or belongs to another server",
                hint="try again later; the server's log has details",
            )

    @property
    def is_stale(self) -> bool:
        """Return True if the last check of the leader lock is too old."""
        if not self._taken or not self._is_postgres:
            return False
        return self._clock.boottime_ns() - self._looked_ns > STALE_S * 1e9

    def doubt(self) -> None:
        """Require a check of the leader lock before the next write."""
        if self._taken and self._is_postgres:
            self._held = False

    def look(self) -> bool:
        """Check the leader lock, and return True if this server owns the database."""
        with self._lock:
            self._look()
        return self._held

    def close(self) -> None:
        """Release the leader lock for the next server."""
        with self._lock:
            self._drop()
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
            self._taken = False

    def _look(self) -> None:
        if not self._is_postgres or not self._taken or self.is_gone:
            return
        self._looks += 1
        self._looked_ns = self._clock.boottime_ns()
        try:
            lives = self._session_lives()
            self._held = self._held and lives  # Block writes until this server holds the lock again.
            self._held = (lives or self._try_session()) and not self.is_gone
        # The next check decides about the owner, because the database is unreachable.
        except sa.exc.DBAPIError:
            self._held = False
            return
        except ServerProblem as error:
            self._held = False
            _log.warning("this server does not own the database: %s", error.message)
            return
        if self._held or self.is_gone:
            self._refused_ns = None
            return
        now_ns = self._clock.boottime_ns()
        self._refused_ns = now_ns if self._refused_ns is None else self._refused_ns
        if now_ns - self._refused_ns >= REFUSED_S * 1e9:
            self.lose()

    def _take_file(self) -> bool:
        if not self._path:
            return True
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            self._file = -1
            return False
        except OSError as error:
            raise lock_error(Path(self._path), error.strerror or str(error)) from error
        require_record_locks(Path(self._path).parent, "the server's database")
        return True

    def _take_session(self) -> bool:
        session = self._open()
        try:
            session.execute(sa.text(f"SET lock_timeout = '{WAIT_S}s'"))
            session.execute(sa.text("SELECT pg_advisory_lock(:key)"), {"key": _KEY})
        except sa.exc.DBAPIError as error:
            session.close()
            if getattr(error.orig, "sqlstate", None) == _TAKEN:
                return False
            raise
        self.end_others(session)
        self._session = session
        return True

    def _session_lives(self) -> bool:
        if self._session is None:
            return False
        try:
            is_mine = self._is_mine(self._session)
        except sa.exc.DBAPIError:
            self._drop()
            return False
        if not is_mine:
            self.lose()
        return is_mine

    def _is_mine(self, session: sa.Connection) -> bool:
        """Return True if this server is the last server that claimed the database."""
        if not self._is_numbered:
            session.scalar(sa.text("SELECT 1"))
            return True
        holder: str | None = session.scalar(sa.text(HOLDER))
        return holder == self.name

    def _try_session(self) -> bool:
        session = self._open()
        try:
            is_locked = session.scalar(sa.text("SELECT pg_try_advisory_lock(:key)"), {"key": _KEY})
            # Check the holder only now, because other servers store their generation under the lock.
            if not self._is_mine(session):
                self.lose()
            elif is_locked:
                self.end_others(session)
                self._session = session
                return True
        finally:
            if self._session is None:
                session.close()
        return False

    def end_others(self, session: sa.Connection) -> None:
        """Terminate the open database sessions of other servers."""
        values = {"mine": self.name, "all": f"{APPLICATION} %"}
        try:
            for _ in range(round(_ENDED_S / _PAUSE_S)):
                if not session.execute(_END, values).all():
                    return
                threading.Event().wait(_PAUSE_S)
        except sa.exc.DBAPIError as error:
            session.close()
            if getattr(error.orig, "sqlstate", None) != _NOT_MINE:
                raise
            raise ServerProblem(
                "this server cannot terminate the database sessions of a server with another PostgreSQL user",
                hint="stop the other server, or start this server with the same PostgreSQL user",
            ) from error
        session.close()
        raise ServerProblem(
            f"sessions of another server of this database did not end within {_ENDED_S:.0f} s",
            hint="find the other server with `SELECT * FROM pg_stat_activity` in PostgreSQL, and stop the server",
        )

    def _open(self) -> sa.Connection:
        """Open a session that PostgreSQL ends if this machine fails."""
        session = self._connect()
        try:
            for name, value in (("idle", 10), ("interval", 5), ("count", 4)):
                session.execute(sa.text(f"SET tcp_keepalives_{name} = {value}"))
            session.execute(sa.text(f"SET idle_session_timeout = {round(TTL_S * 1000)}"))
        except sa.exc.DBAPIError:
            session.close()
            raise
        return session

    def _drop(self) -> None:
        if self._session is not None:
            with contextlib.suppress(sa.exc.DBAPIError):
                self._session.close()
            self._session = None


class Superseded(Exception):
    """Signals that another server has claimed the database."""


def begin(connection: sa.Connection, *, holder: str, now_ns: int) -> DatabasePosition:
    """Assign the next generation to this server, and return the database position.

    Args:
        connection: connection of a transaction that has read nothing yet.
        holder: `LeaderLock.name` of this server.
        now_ns: nanoseconds since 1970.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(_LOCK_ALONE)
    row = server_identity.c
    mine = {"holder": holder, "claimed_ns": now_ns}
    changed = connection.execute(
        sa.update(server_identity).where(row.name == ROW).values(generation=row.generation + 1, **mine)
    )
    if not changed.rowcount:
        values = {"name": ROW, "database_id": secrets.token_hex(16), "generation": 1, **mine}
        connection.execute(sa.insert(server_identity).values(**values))
    found = position(connection)
    assert found is not None
    return found


def position(connection: sa.Connection) -> DatabasePosition | None:
    """Return the database position, or None if no server has claimed the database yet."""
    if not sa.inspect(connection).has_table(server_identity.name):
        return None
    row = connection.execute(sa.select(server_identity).where(server_identity.c.name == ROW)).first()
    if row is None:
        return None
    return DatabasePosition(
        database_id=row.database_id,
        generation=row.generation,
        commits=row.commits,
        audit=newest_audit_seq(connection),
    )


def newest_audit_seq(connection: sa.Connection) -> int:
    """Return the number of the newest audit row, or 0 for an empty audit."""
    return connection.scalar(sa.select(sa.func.max(audit.c.seq))) or 0


def require_postgres(connection: sa.Connection, holder: str) -> None:
    """Begin a write transaction that prevents other servers from claiming the database.

    Args:
        connection: connection of a transaction that has read nothing yet, so that PostgreSQL creates its snapshot under
            the lock.
        holder: `LeaderLock.name` of this server.
    """
    statement = f"{_LOCK_SHARED}; {HOLDER}"
    errors = connection.dialect.loaded_dbapi.Error
    try:
        # The driver sends both statements in one round trip, which SQLAlchemy does not support.
        cursor: Any = connection.connection.cursor()
        with contextlib.closing(cursor):
            cursor.execute(statement)
            while cursor.nextset():
                pass
            row = cursor.fetchone()
    except errors as error:
        raise sa.exc.DBAPIError.instance(statement, None, error, errors, dialect=connection.dialect) from error
    if row != (holder,):
        raise Superseded


def count_commit(driver: sqlite3.Connection, holder: str) -> int:
    """Increment the commit counter in the current transaction, and return its new value."""
    row = driver.execute(_COUNT, (holder,)).fetchone()
    if row is None:
        raise Superseded
    return int(row[0])


def probe(connection: sa.Connection, *, now_ns: int) -> None:
    """Write the current time to test whether the database accepts writes."""
    connection.execute(sa.update(server_identity).where(server_identity.c.name == ROW).values(probed_ns=now_ns))
