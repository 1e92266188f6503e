"""Records the database position in a small file, the high-water mark.

    <database>.mark         beside an SQLite database
    server/database.mark    of a PostgreSQL database

    commit is durable ─▶ mark written ─▶ the write returns         SQLite: every commit
    each second       ─▶ audit number, written and synced          both

A database behind its high-water mark lacks changes that the server had acknowledged. Possible causes are a lost
write-ahead log, an old copy of the database, or an outdated standby.

The high-water mark may lag behind the database but is never ahead. A starting server compares the high-water mark with
the database (`operations/backup.py`).

* SQLite: the server updates the high-water mark before each write returns. A power failure may undo the last second of
  updates (`SYNC_S`).

* PostgreSQL: the high-water mark records only the audit, with a delay of one second.

The server writes alternately to two slots with checksums. A power failure therefore leaves at least one slot intact.

Failure cases:

* The server cannot write the high-water mark. The server logs the write error once and continues.

* The high-water mark is missing, for example after an upgrade from an older version. The starting server skips the
  comparison.

* Neither slot is intact, because the disk lost synced data. The server refuses to start.
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
    """Contents of a high-water mark."""

    position: DatabasePosition  # Minimum database position.
    at_ns: int  # Time of the last update, nanoseconds since 1970.
    place: str = ""  # Location of a PostgreSQL database, without the password.


def rollback(mark: HighWaterMark | None, found: DatabasePosition | None, *, place: str = "") -> str:
    """Return a message if the database is behind its high-water mark, or "".

    `mark` is None without a mark file. `found` is None if no server has claimed the database.
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
    """Return the newest intact slot of a mark file, or None if the file is missing.

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
    """High-water mark file of a running server. Only the writer thread calls `commit`.

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
        """Return the recorded database position."""
        return self._mark.position

    def commit(self, number: int) -> None:
        """Advance the high-water mark to a durable commit."""
        with self._lock:
            if number > self._mark.position.commits:
                self._move(msgspec.structs.replace(self._mark.position, commits=number), self._mark.at_ns)

    def sync(self, *, audit: int, now_ns: int) -> None:
        """Advance the high-water mark to a durable audit row, and sync the mark file."""
        with self._lock:
            position = msgspec.structs.replace(self._mark.position, audit=max(audit, self._mark.position.audit))
            if self._fd < 0 or position == self._synced:
                return
            self._move(position, now_ns)
            fd = os.dup(self._fd)
        try:
            os.fsync(fd)  # Sync without the lock, so that commits do not wait.
            self._synced = position
        except OSError as error:
            self._tell(error)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the mark file."""
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
            _log.warning("the server cannot update the high-water mark %s: %s", self._path, error)


class Checkpoints:
    """Checkpoints an SQLite database with new commits every ten seconds.

    SQLite's automatic checkpoint waits for a thousand pages. A new server's data would stay in the write-ahead log for
    a long time.
    """

    def __init__(self, database: Database, mark: MarkFile) -> None:
        self._database, self._mark = database, mark
        self._commits = -1
        self._due_ns = 0

    def tick(self, now_ns: int) -> None:
        """Run a due checkpoint if the database has new commits."""
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
