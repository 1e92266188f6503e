"""The high-water mark: a small file beside the database that says how far the database has come.

    <database>.mark         beside an SQLite database
    server/database.mark    of a PostgreSQL database

    commit is durable ─▶ mark written ─▶ the write returns         SQLite: every commit
    each second       ─▶ audit number, written and synced          both

A database behind its mark was rolled back: its log was lost, an old copy was put in its place, or a standby took over
that lacked the last transactions. What the server had acknowledged since is gone.

The mark lags behind the database and never leads it. A start compares both (`operations/backup.py`).

- SQLite: the mark is written before a write returns. It survives the end of the process; a power cut may
  take back its last second (`SYNC_S`).
- PostgreSQL: the mark lags by a second, and by the audit alone.

Two slots are written in turn, each with a checksum, so that one is whole whenever the power fails.

Failure cases: the mark cannot be written (logged once; it lags until it can be); it is missing (a server of an older
version, a copied home: nothing to compare); neither slot is whole (refused as a rollback is: the disk lied).
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

    position: DatabasePosition  # how far the database had come at least
    at_ns: int  # when that was written, nanoseconds since 1970
    place: str = ""  # where the database was, where the mark does not lie beside it; without a password


def rollback(mark: HighWaterMark | None, found: DatabasePosition | None, *, place: str = "") -> str:
    """Return how a database has less than its mark says, or "" when it has not.

    `mark` is None where nothing was written, `found` None where no server has claimed the database.
    """
    if mark is None:
        return ""
    there = mark.position
    if found is None or found.database_id != there.database_id:
        if mark.place != place:
            return ""  # the server was told to use another database
        what = "it is empty or from before it had an identity" if found is None else f"it is {found.database_id[:8]}"
        return f"this server used database {there.database_id[:8]} here, up to {there}, and {what}"
    behind = found.generation < there.generation or found.commits < there.commits or found.audit < there.audit
    return f"it ends at {found}, and this server had acknowledged {there}" if behind else ""


class UnreadableMark(Exception):
    """Neither slot of a mark is whole."""


def read_mark(path: Path) -> HighWaterMark | None:
    """Return what a mark says, or None without a mark.

    Raises:
        UnreadableMark: the file has no slot that is whole.
        OSError: it cannot be read.
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
    """The mark of a server that works. `commit` belongs to the writer's thread, everything else to any.

    Args:
        path: of the file; None for a database in memory, which has no mark.
        position: where the database stands.
        now_ns: nanoseconds since 1970.
        place: as in `HighWaterMark.place`.
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
        """Return how far the mark is."""
        return self._mark.position

    def commit(self, number: int) -> None:
        """Move the mark to a commit that is durable."""
        with self._lock:
            if number > self._mark.position.commits:
                self._move(msgspec.structs.replace(self._mark.position, commits=number), self._mark.at_ns)

    def sync(self, *, audit: int, now_ns: int) -> None:
        """Move the mark to a row of the audit that is durable, and make the mark itself durable."""
        with self._lock:
            position = msgspec.structs.replace(self._mark.position, audit=max(audit, self._mark.position.audit))
            if self._fd < 0 or position == self._synced:
                return
            self._move(position, now_ns)
            fd = os.dup(self._fd)
        try:
            os.fsync(fd)  # without the lock: commits do not wait for it
            self._synced = position
        except OSError as error:
            self._tell(error)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the file."""
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
    """Checkpoints a database that has new commits, soon after the start and then now and then.

    SQLite by itself waits for a thousand pages: until then a young server has nothing but its log.
    """

    def __init__(self, database: Database, mark: MarkFile) -> None:
        self._database, self._mark = database, mark
        self._commits = -1
        self._due_ns = 0

    def tick(self, now_ns: int) -> None:
        """Checkpoint, if that is due."""
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
