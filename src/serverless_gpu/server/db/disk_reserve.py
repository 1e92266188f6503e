"""Reserves disk space for the database, so that runs can still end on a full disk.

    SQLite        a file beside the database; the free space of its disk is known
    PostgreSQL    an unlogged table of filler in the database; its disk may belong to another machine

    space ─┬─ little left (SQLite) ───────▶ low: submissions are refused
           └─ a write does not fit ───────▶ reserve released, write repeated ─▶ low

    low ──── space is free again, checked every ten seconds ─▶ reserved again, submissions are accepted

Each stop, heartbeat or end of a run needs a few kilobytes of disk space. The disk reserve has sixteen megabytes.

Failure cases:

* The database has used up the disk reserve too. Database writes fail until the disk has free space. Nodes store their
  reports until database writes succeed.

* The server cannot create the disk reserve. The server logs the problem. Database writes fail once the disk is full.

* PostgreSQL has no disk space for its write-ahead log. PostgreSQL stops until an operator frees disk space. At its next
  start, PostgreSQL empties the unlogged reserve table, which frees some disk space.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.server.core.disk_space import free_bytes
from serverless_gpu.units import format_bytes

BYTES = 16 << 20
LOW_BYTES = 64 << 20
"""Minimum free bytes of the database's disk for accepting new runs."""
EVERY_S = 10.0
_TABLE = "sgpu_reserve"
_PIECE_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class DiskReserve(abc.ABC):
    """Reserved disk space with thread-safe methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given = False
        self._is_gone = False
        self._told = ""

    def problem(self) -> str:
        """Return the reason why the server accepts no new runs, or "" if the disk has free space."""
        if self._given:
            return "the server accepts no new runs, because the database's disk is full"
        return self._short()

    def give_back(self) -> bool:
        """Release the disk reserve after a failed write, and return True if the write may be retried."""
        with self._lock:
            if not self._given:
                _log.error(
                    "the database's disk is full: the reserve of %s is released, and the server accepts no new runs",
                    format_bytes(BYTES),
                )
            self._given = True
            is_gone = self._gone()
        faults.reach("after_reserve_is_given_back")
        return is_gone

    def tend(self) -> None:
        """Create the disk reserve again if the disk has enough free space."""
        with self._lock:
            if self._given and not self._gone():
                return  # The database could not delete the disk reserve yet.
            try:
                kept = self._keep()
            except (OSError, sa.exc.SQLAlchemyError) as error:
                kept, why = False, str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
                if why != self._told:
                    _log.warning("the server could not reserve disk space for the database: %s", why)
                self._told = why
            if kept and self._given:
                _log.warning("the database's disk has free space again; the server accepts new runs")
            if kept:
                self._given, self._is_gone, self._told = False, False, ""

    def _gone(self) -> bool:
        """Release an existing disk reserve, and return True once no reserve exists."""
        self._is_gone = self._is_gone or self._release()
        return self._is_gone

    @abc.abstractmethod
    def _short(self) -> str:
        """Return a message if the disk is nearly full, or ""."""

    @abc.abstractmethod
    def _release(self) -> bool:
        """Release the reserved disk space, and return True on success."""

    @abc.abstractmethod
    def _keep(self) -> bool:
        """Create a missing disk reserve, and return True if the disk reserve exists."""


class FileReserve(DiskReserve):
    """A reserve file next to an SQLite database."""

    def __init__(self, database: Path) -> None:
        super().__init__()
        self._path = database.with_name(f"{database.name}.reserve")

    def _short(self) -> str:
        free = free_bytes(self._path.parent)
        if free is None or free >= LOW_BYTES:
            return ""
        return f"the database's disk has {format_bytes(free)} free, and new runs need {format_bytes(LOW_BYTES)}"

    def _release(self) -> bool:
        try:
            os.truncate(self._path, 0)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _keep(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_size >= BYTES:
                return True
        free = free_bytes(self._path.parent)
        if free is not None and free < LOW_BYTES + BYTES:
            return False
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, BYTES)
        except OSError:
            os.ftruncate(fd, 0)
            raise
        finally:
            os.close(fd)
        return True


class TableReserve(DiskReserve):
    """An unlogged filler table in a PostgreSQL database."""

    def __init__(self, connect: Callable[[], sa.Connection]) -> None:
        super().__init__()
        self._connect = connect

    def _short(self) -> str:
        return ""  # Ordinary PostgreSQL users cannot query free disk space.

    def _release(self) -> bool:
        # Drop the table, because TRUNCATE would first create new files on the full disk.
        with contextlib.suppress(sa.exc.SQLAlchemyError), self._connect() as connection:
            connection.execute(sa.text(f"DROP TABLE IF EXISTS {_TABLE}"))
            return True
        return False

    def _keep(self) -> bool:
        with self._connect() as connection:
            size = connection.scalar(sa.text("SELECT pg_total_relation_size(to_regclass(:name))"), {"name": _TABLE})
            if size is not None and size >= BYTES:
                return True
            try:
                self._make(connection)
            except sa.exc.SQLAlchemyError:
                self._release()  # Free the disk space of the incomplete reserve table.
                raise
        return True

    @staticmethod
    def _make(connection: sa.Connection) -> None:
        for statement in (
            f"DROP TABLE IF EXISTS {_TABLE}",
            f"CREATE UNLOGGED TABLE {_TABLE} (filler bytea)",
            f"ALTER TABLE {_TABLE} ALTER COLUMN filler SET STORAGE EXTERNAL",
        ):
            connection.execute(sa.text(statement))
        filler = "SELECT decode(repeat('00', :piece), 'hex') FROM generate_series(1, :pieces)"
        numbers = {"piece": _PIECE_BYTES, "pieces": BYTES // _PIECE_BYTES}
        connection.execute(sa.text(f"INSERT INTO {_TABLE} {filler}"), numbers)


class NoReserve(DiskReserve):
    """An empty disk reserve for in-memory databases."""

    def _short(self) -> str:
        return ""

    def _release(self) -> bool:
        return False

    def _keep(self) -> bool:
        return True
