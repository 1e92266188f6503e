"""Disk reserve of the database: on a full disk, runs can still be stopped, reported and ended; new ones are refused.

    SQLite        a file beside the database, and what is left on its disk is known
    PostgreSQL    a table of filler that no log is kept of, in the database: its disk may be another machine's

    room ─┬─ little left (SQLite) ───────▶ low: submits are refused
          └─ a write does not fit ───────▶ given back, the write done again ─▶ low
    low ──── there is room again, looked at every ten seconds ─▶ kept again, submits are taken

A stop, a heartbeat and an ending take a few kilobytes each; the reserve has sixteen megabytes.

What can go wrong: the reserve is used up, too (requests fail, and nodes keep and repeat what they have to say);
it cannot be made (said in the log; then writes fail as soon as the disk is full). PostgreSQL ends by itself when there
is no room for its log, and that is a database that is away: nothing but room, made by a person, brings it back. At its
start after such an end it empties the table, as it does with all that have no log, so that there is some.
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
"""What is left of a disk when no new runs are taken."""
EVERY_S = 10.0
_TABLE = "sgpu_reserve"
_PIECE_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class DiskReserve(abc.ABC):
    """Room that is kept back; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given = False
        self._is_gone = False
        self._told = ""

    def problem(self) -> str:
        """Return why no new runs are taken, or "" when they are."""
        if self._given:
            return "the database's disk is full; what is kept back is for runs that are there"
        return self._short()

    def give_back(self) -> bool:
        """Give the reserve back, because something did not fit; return whether it is worth trying again."""
        with self._lock:
            if not self._given:
                _log.error("the database's disk is full: %s are given back, no new runs are taken", format_bytes(BYTES))
            self._given = True
            is_gone = self._gone()
        faults.reach("after_reserve_is_given_back")
        return is_gone

    def tend(self) -> None:
        """Keep room back, where it is not kept and there is some."""
        with self._lock:
            if self._given and not self._gone():
                return  # that it is still there says nothing about room
            try:
                kept = self._keep()
            except (OSError, sa.exc.SQLAlchemyError) as error:
                kept, why = False, str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
                if why != self._told:
                    _log.warning("nothing is kept back for a full disk: %s", why)
                self._told = why
            if kept and self._given:
                _log.warning("there is room on the database's disk again: new runs are taken")
            if kept:
                self._given, self._is_gone, self._told = False, False, ""

    def _gone(self) -> bool:
        """Give it back, unless that was done; return whether it is given back."""
        self._is_gone = self._is_gone or self._release()
        return self._is_gone

    @abc.abstractmethod
    def _short(self) -> str:
        """Return that little is left, where that can be known, or ""."""

    @abc.abstractmethod
    def _release(self) -> bool:
        """Give it back; return whether nothing is kept any more."""

    @abc.abstractmethod
    def _keep(self) -> bool:
        """Keep it back, unless it is; return whether it is then."""


class FileReserve(DiskReserve):
    """A file beside an SQLite database."""

    def __init__(self, database: Path) -> None:
        super().__init__()
        self._path = database.with_name(f"{database.name}.reserve")

    def _short(self) -> str:
        free = free_bytes(self._path.parent)
        if free is None or free >= LOW_BYTES:
            return ""
        return f"the database's disk has {format_bytes(free)} left, and new runs need {format_bytes(LOW_BYTES)}"

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
    """A table of filler in a PostgreSQL database, which no log is kept of: making it needs no room but its own."""

    def __init__(self, connect: Callable[[], sa.Connection]) -> None:
        super().__init__()
        self._connect = connect

    def _short(self) -> str:
        return ""  # PostgreSQL tells only its administrator how much is left

    def _release(self) -> bool:
        # Not TRUNCATE: that makes new files first, and what belongs to them has no room.
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
                self._release()  # what was made of it takes room, and is of no use
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
    """Of a database in memory: nothing is kept."""

    def _short(self) -> str:
        return ""

    def _release(self) -> bool:
        return False

    def _keep(self) -> bool:
        return True
