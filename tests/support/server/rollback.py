"""Helpers of the tests of rollback that other tests use as well."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path


def has_identity(home: Path) -> bool:
    """Return whether the database's file has what the start wrote, without its log."""
    url = f"file:{home}/server/server.db?immutable=1"
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(url, uri=True)) as connection:
        return bool(connection.execute("SELECT 1 FROM server_identity").fetchone())
    return False


def delete_log(home: Path) -> None:
    (home / "server" / "server.db-wal").unlink()
