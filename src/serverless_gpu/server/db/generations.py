"""Generations of servers: each server that claims a database numbers itself, and an older one commits nothing more.

    start   ── claim (`leader_lock.py`) ─▶ generation + 1, holder = this process
    write   ── is the row still mine? ─▶ work ─▶ commit
                └─ no: `Superseded`; nothing is committed, and the server ends

A lock alone does not stop a server that stood still: when its successor is gone, the lock is free and the old server
gets it back, with leases and deliveries in its memory that are no longer true. The row remembers the successor.

    PostgreSQL    each write transaction takes a shared lock on the table before its snapshot, and a claim takes an
                  exclusive one: a write sees the claim, or the claim waits for the write. The lock is in memory only
    SQLite        each commit that changed something also counts itself in the row, and fails where the row has
                  another holder; the count is what `high_water_mark.py` recognises a rollback by
"""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
from typing import Any

import sqlalchemy as sa

from serverless_gpu.model.high_water_mark import DatabasePosition
from serverless_gpu.server.db.tables import audit, server_identity

ROW = "server"
HOLDER = f"SELECT holder FROM {server_identity.name} WHERE name = '{ROW}'"
_LOCK_SHARED = f"LOCK TABLE {server_identity.name} IN ROW SHARE MODE"
_LOCK_ALONE = f"LOCK TABLE {server_identity.name} IN EXCLUSIVE MODE"
_COUNT = (
    f"UPDATE {server_identity.name} SET commits = commits + 1 WHERE name = '{ROW}' AND holder = ? RETURNING commits"
)


class Superseded(Exception):
    """Another server has claimed the database since."""


def begin(connection: sa.Connection, *, holder: str, now_ns: int) -> DatabasePosition:
    """Number this server, one higher than the last; return where the database stands then.

    Args:
        connection: of a transaction that has read nothing yet.
        holder: the name of this process's claim.
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
    """Return where a database stands, or None where no server of a version with generations has claimed it."""
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
    """Return the number of the last row of the audit, 0 without rows."""
    return connection.scalar(sa.select(sa.func.max(audit.c.seq))) or 0


def require_postgres(connection: sa.Connection, holder: str) -> None:
    """Begin a write transaction: no other server can claim the database until it has ended.

    Args:
        connection: of a transaction that has read nothing yet, so that its snapshot is made under the lock.
        holder: the name of this process's claim.

    Raises:
        Superseded: another server has claimed the database.
    """
    statement = f"{_LOCK_SHARED}; {HOLDER}"
    errors = connection.dialect.loaded_dbapi.Error
    try:
        # By the driver: one round trip for both, of which SQLAlchemy would show the first one's rows.
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
    """Count a commit that is about to be made; return its number.

    Raises:
        Superseded: another server has claimed the database.
    """
    row = driver.execute(_COUNT, (holder,)).fetchone()
    if row is None:
        raise Superseded
    return int(row[0])


def probe(connection: sa.Connection, *, now_ns: int) -> None:
    """Write a moment, to see whether the database can be written."""
    connection.execute(sa.update(server_identity).where(server_identity.c.name == ROW).values(probed_ns=now_ns))
