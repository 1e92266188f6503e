"""Migrates the database tables of an older server version to this version.

    no tables            created from `server.tables`, equal to the last revision's result (a test compares)
    an older revision    Alembic runs the newer revisions in `versions/`, in order
    this revision        nothing to do; Alembic (300 ms of import) is not loaded
    a newer revision     refused, because an older server would overwrite unknown data

The migration is one transaction under a database lock.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.errors import ServerProblem
from serverless_gpu.server.db import tables

HEAD = "0018"
LOCK = 7_310_227_001  # Key of the migration's advisory lock.
_PLACE = Path(__file__).parent

_version = sa.Table(  # Alembic's own definition of its version table.
    "alembic_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True)
)


def revision(connection: sa.Connection) -> str | None:
    """Return the database's schema revision, or None for a new database."""
    if not sa.inspect(connection).has_table(_version.name):
        return None
    found: str | None = connection.scalar(sa.select(_version.c.version_num))
    return found


def is_current(connection: sa.Connection) -> bool:
    """Return True if the database has the current schema revision."""
    return revision(connection) == HEAD


def bring(connection: sa.Connection) -> None:
    """Migrate a database to the current schema revision in the caller's transaction.

    Raises:
        ServerProblem: the database has a newer version, or contains tables of another program.
    """
    found = revision(connection)
    if found == HEAD:
        return
    if found is None:
        _make(connection)
    else:
        upgrade(connection)
    faults.reach("in_migration")


def _make(connection: sa.Connection) -> None:
    there = set(sa.inspect(connection).get_table_names()) & set(tables.metadata.tables)
    if there:
        message = f"the database has a table {sorted(there)[0]!r} that this program did not create"
        raise ServerProblem(message, hint="give the server a separate database")
    tables.metadata.create_all(connection, checkfirst=False)
    _version.create(connection)
    connection.execute(sa.insert(_version).values(version_num=HEAD))


def upgrade(connection: sa.Connection, to: str = "head") -> None:
    """Run every missing schema revision up to the given revision.

    Raises:
        ServerProblem: the revision of the database is unknown to this version.
    """
    import alembic.command
    import alembic.config
    import alembic.util

    config = alembic.config.Config()
    config.set_main_option("script_location", str(_PLACE).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        alembic.command.upgrade(config, to)
    except alembic.util.CommandError as error:
        message = f"a newer version of serverless-gpu created the database (revision {revision(connection)})"
        raise ServerProblem(message, hint="start the version that created the database, or a newer one") from error
