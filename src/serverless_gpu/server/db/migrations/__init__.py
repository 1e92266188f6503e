"""How tables of an older version become those of this one.

    nothing there        made from `server.tables`, as the last revision leaves them (a test compares)
    an older revision    Alembic runs what is in `versions/`, in order
    this revision        nothing to do, and Alembic (300 ms of import) is not even loaded
    a newer one          refused: an older server would not know what it overwrites

All of it is one transaction, under the database's own lock.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.errors import ServerProblem
from serverless_gpu.server.db import tables

HEAD = "0009"
LOCK = 7_310_227_001  # any number that nobody else of the same database takes
_PLACE = Path(__file__).parent

_version = sa.Table(  # as Alembic makes it
    "alembic_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True)
)


def revision(connection: sa.Connection) -> str | None:
    """Return the revision that a database has, or None when it has none."""
    if not sa.inspect(connection).has_table(_version.name):
        return None
    found: str | None = connection.scalar(sa.select(_version.c.version_num))
    return found


def is_current(connection: sa.Connection) -> bool:
    """Return whether there is nothing to do."""
    return revision(connection) == HEAD


def bring(connection: sa.Connection) -> None:
    """Bring a database to this version, inside of the caller's transaction.

    Raises:
        ServerProblem: it is of a newer version, or holds tables of something else.
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
        message = f"the database has a table {sorted(there)[0]!r} that this program did not make"
        raise ServerProblem(message, hint="give the server a database of its own")
    tables.metadata.create_all(connection, checkfirst=False)
    _version.create(connection)
    connection.execute(sa.insert(_version).values(version_num=HEAD))


def upgrade(connection: sa.Connection, to: str = "head") -> None:
    """Run every revision that a database lacks, up to one.

    Raises:
        ServerProblem: its revision is not known here.
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
        message = f"the database was made by a newer version of serverless-gpu (revision {revision(connection)})"
        raise ServerProblem(message, hint="start the version that made it, or a newer one") from error
