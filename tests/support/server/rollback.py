"""Helpers of the tests of rollback that other tests use as well."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path


def has_identity(home: Path) -> bool:
    """Return whether the database's file is whole without its log, and has what the start wrote; keep it as it is."""
    seen = _seen(home)
    with contextlib.suppress(OSError, sqlite3.Error):
        shutil.copyfile(home / "server" / "server.db", seen)
        with contextlib.closing(sqlite3.connect(f"file:{seen}?immutable=1", uri=True)) as connection:
            is_whole = connection.execute("PRAGMA quick_check").fetchone() == ("ok",)
            return is_whole and bool(connection.execute("SELECT 1 FROM server_identity").fetchone())
    return False


def delete_log(home: Path) -> None:
    """Delete the log of a killed server, with the file as `has_identity` saw it.

    The server may have been killed while it moved the log into the file, which is no database without the log.
    """
    (home / "server" / "server.db-wal").unlink()
    _seen(home).replace(home / "server" / "server.db")


def _seen(home: Path) -> Path:
    return home / "server.db.seen"
