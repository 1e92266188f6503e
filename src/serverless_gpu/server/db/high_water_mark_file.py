"""Records the position of the database in a small file, the high-water mark.

    <database>.mark         beside an SQLite database
    server/database.mark    of a PostgreSQL database

    commit is durable ─▶ mark written ─▶ the write returns         SQLite: every commit
    each second       ─▶ audit number, written and synced          both

A database behind its mark was rolled back, and lacks changes that the server had acknowledged. Possible causes are a
lost log, an old copy of the database, or a standby without the last transactions.

The mark may lag behind the database, but is never ahead. A starting server compares the mark with the database
(`operations/backup.py`).

* SQLite: the server writes the mark before a write returns. The mark survives the end of the process. A power failure
  may undo its last second (`SYNC_S`).

* PostgreSQL: the mark lags by a second, and records only the audit.

The server writes two slots in turn, each with a checksum. Therefore one of the slots is always intact after a power
failure.

Failure cases:

* The server cannot write the mark: the server logs this failure once. The mark lags until a write succeeds.

* The mark is missing, for example in a copied home or after an older server version: the starting server skips the
  comparison.

* Neither slot is intact: the server refuses to start, as after a rollback, because the disk lost synced data.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from pathlib import Path

import msgspec

from serverless_gpu.json_codec import from_json
from serverless_gpu.node.base.private_files import write_private
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.db.leader_lock import DatabasePosition

SYNC_S = 1.0
CHECKPOINT_S = 10.0
_SLOT_BYTES = 1024
_SLOTS = 2
_log = logging.getLogger(__name__)


class HighWaterMark(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a high-water mark."""

    position: DatabasePosition  # Minimum position of the database.
    at_ns: int  # Time of this mark, nanoseconds since 1970.
    place: str = ""  # Location, without a password, of a database that is not beside its mark.


def rollback(mark: HighWaterMark | None, found: DatabasePosition | None, *, place: str = "") -> str:
    """Return a message about a database that is behind its mark, or "" otherwise.

    `mark` is None if no mark exists. `found` is None if no server has claimed the database.
    """
    if mark is None:
        return ""
    there = mark.position
    if found is None or found.database_id != there.database_id:
        if mark.place != place:
            return ""  # The operator has configured another database.
        what = (
            "the current database is empty or has no identity yet"
            if found is None
            else f"the current database is {found.database_id[:8]}"
        )
        return f"this server last used database {there.database_id[:8]}, up to {there}; {what}"
    behind = found.generation < there.generation or found.commits < there.commits or found.audit < there.audit
    return f"the database ends at {found}, but this server had acknowledged changes up to {there}" if behind else ""


class UnreadableMark(Exception):
    """Signals that neither slot of a high-water mark is intact."""


def read_mark(path: Path) -> HighWaterMark | None:
    """Return the newest intact slot of the mark in a file, or None without a file.

    Raises:
        UnreadableMark: neither slot is intact.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    slots = (data[number * _SLOT_BYTES : (number + 1) * _SLOT_BYTES] for number in range(_SLOTS))
    found = [mark for slot in slots if (mark := _decode(slot)) is not None]
    if not found:
        raise UnreadableMark
    return max(found, key=lambda mark: (mark.position.generation, mark.position.commits, mark.position.audit))


class MarkFile:
    """The mark of a running server. Only the writer's thread calls `commit`.

    Args:
        path: path of the file; None for a database in memory, which has no mark.
        position: current position of the database.
        now_ns: nanoseconds since 1970.
        place: location of the database, as in `HighWaterMark.place`.
    """

    def __init__(self, path: Path | None, position: DatabasePosition, *, now_ns: int, place: str = "") -> None:
        self._path = path
        self._lock = threading.Lock()
        self._mark = HighWaterMark(position=position, at_ns=now_ns, place=place)
        self._synced = position
        self._slot = 0
        self._fd = -1
        self._problem = ""
        if path is not None:
            slot = _encode(self._mark)
            write_private(path, slot * _SLOTS)
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    @property
    def position(self) -> DatabasePosition:
        """Return the position in the mark."""
        return self._mark.position

    def commit(self, number: int) -> None:
        """Advance the mark to a durable commit."""
        with self._lock:
            if number > self._mark.position.commits:
                self._move(msgspec.structs.replace(self._mark.position, commits=number), self._mark.at_ns)

    def sync(self, *, audit: int, now_ns: int) -> None:
        """Advance the mark to a durable row of the audit, and sync the mark."""
        with self._lock:
            position = msgspec.structs.replace(self._mark.position, audit=max(audit, self._mark.position.audit))
            if self._fd < 0 or position == self._synced:
                return
            self._move(position, now_ns)
            fd = os.dup(self._fd)
        try:
            os.fsync(fd)  # The sync runs without a lock, so that commits do not wait.
            self._synced = position
        except OSError as error:
            self._tell(error)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the mark's file."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _move(self, position: DatabasePosition, at_ns: int) -> None:
        self._mark = msgspec.structs.replace(self._mark, position=position, at_ns=at_ns)
        if self._fd < 0:
            return
        self._slot = (self._slot + 1) % _SLOTS
        try:
            os.pwrite(self._fd, _encode(self._mark), self._slot * _SLOT_BYTES)
            self._problem = ""
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if self._problem != str(error):
            self._problem = str(error)
            _log.warning("the high-water mark %s cannot be written and lags behind the database: %s", self._path, error)


class Checkpoints:
    """Checkpoints a database with new commits, soon after the start and then every ten seconds.

    SQLite's automatic checkpoint waits for a thousand pages. Before the first checkpoint, all data of a new server is
    only in SQLite's log.
    """

    def __init__(self, database: Database, mark: MarkFile) -> None:
        self._database, self._mark = database, mark
        self._commits = -1
        self._due_ns = 0

    def tick(self, now_ns: int) -> None:
        """Run a checkpoint if the database has new commits and the last checkpoint is old enough."""
        commits = self._mark.position.commits
        if commits != self._commits and now_ns >= self._due_ns:
            self._commits, self._due_ns = commits, now_ns + round(CHECKPOINT_S * 1e9)
            self._database.checkpoint()


def _encode(mark: HighWaterMark) -> bytes:
    text = msgspec.json.encode(mark)
    return b"%08x %s" % (zlib.crc32(text), text.ljust(_SLOT_BYTES - 10)) + b"\n"


def _decode(slot: bytes) -> HighWaterMark | None:
    check, _, text = slot.partition(b" ")
    text = text.rstrip()
    try:
        if int(check, 16) != zlib.crc32(text):
            return None
        return from_json(text, HighWaterMark)
    except (ValueError, msgspec.MsgspecError):
        return None
