"""Stores rank output and telemetry samples in one append-only file per rank and stream.

    report ── piece(offset, bytes) ─▶ append ─▶ logs/<run>/<fence>/<rank>.<stream>
                 next offset ◀────────┘                  │
    stream, page of a log, download ◀── read, sizes ─────┘

Each output piece has an offset in its file. A repeated piece changes nothing. An overlapping piece adds only its new
bytes. The server ignores a piece beyond the end of the file. The response to a report contains the next expected
offset. Appended bytes survive a crash of the server process. After `sync`, the bytes also survive a power failure. The
server calls `sync` before it acknowledges the end of an attempt. The node keeps a copy of the output until this
acknowledgment.

A file name consists only of validated parts: a run identifier, two integers, and a stream name. In a file of telemetry
samples, `rank` is the node's number.

Failure cases:

* If only the database's disk reserve is left, the server accepts fewer bytes. The node sends the missing bytes later.
  The node's report still succeeds, because the report is also the run's heartbeat. If bytes are still missing at the
  end of the run, the server notes the gap in the last line of the log.

* If two requests write to one file, the file lock serializes the requests.

* If a node sends more output than the limit of a stream, the server ignores the excess.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.spec import RANKS_MAX
from serverless_gpu.server.core.disk_space import FULL, KEPT_FREE_BYTES, free_bytes
from serverless_gpu.units import format_bytes

STREAMS = ("stdout", "stderr", "telemetry")
BYTES_MAX = (1 << 30) + (64 << 20)
"""Maximum size of one output stream in bytes. Nodes enforce a lower limit (`node/output/logs.py`)."""
TOGETHER_MIN = 64
"""Minimum number of files for which `sync` syncs the whole file system instead of each file."""

_RUN_ID = re.compile(r"[0-9a-hjkmnp-tv-z]{26}")
_NAME = re.compile(rf"(0|[1-9][0-9]{{0,6}})\.({'|'.join(STREAMS)})")
# The operating system ignores the sticky bit of data files. The server sets the sticky bit on a log file after closing
# the log.
_CLOSED = 0o1600
_libc = ctypes.CDLL(None, use_errno=True)


class Logs:
    """Stores the output of all runs. Thread-safe."""

    def __init__(self, root: Path, *, bytes_max: int = BYTES_MAX, kept_free_bytes: int = KEPT_FREE_BYTES) -> None:
        self._root = root
        self._bytes_max = bytes_max
        self._kept_free_bytes = kept_free_bytes
        self._lock = threading.Lock()
        self._unsynced: dict[Path, set[str]] = {}
        """Files written since the last sync, by attempt directory.

        A directory without an entry may have unsynced files.
        """

    def append(self, run_id: str, fence: int, *, rank: int, stream: str, offset: int, data: bytes) -> int:
        """Append bytes to a log at the given offset.

        Returns:
            The next expected offset. An offset below the end of `data` means missing earlier bytes or a full disk. A
            higher offset means that the file already contained these bytes.
        """
        directory, name = self._directory(run_id, fence), _name(rank, stream)
        if offset < 0:
            raise InvalidValue(f"a log has no offset {offset}")
        fd = self._open(directory, name, make=offset == 0)
        if fd < 0:
            return 0
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            size = os.fstat(fd).st_size
            end = offset + len(data)
            if _is_closed(fd):
                return end
            if size >= self._bytes_max:
                return max(end, size)
            if offset > size or end <= size:
                return size
            kept = memoryview(data)[size - offset : self._bytes_max - offset]
            written = self._write(fd, kept)
            return end if written == len(kept) else size + written
        finally:
            os.close(fd)

    def close_short(self, run_id: str, fence: int, *, rank: int, stream: str, end: int, why: str) -> int:
        """Close an incomplete log with a line about the missing bytes. The log ignores later appends.

        Returns:
            The number of missing bytes; 0 if an earlier call has reported them.
        """
        fd = self._open(self._directory(run_id, fence), _name(rank, stream), make=True)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            missing = end - os.fstat(fd).st_size
            if missing <= 0 or _is_closed(fd):
                return 0
            line = f"\n— {format_bytes(missing)} missing ({why}) —\n".encode()
            # The line about missing bytes may use the reserved disk space. The reserved space may also be full.
            with contextlib.suppress(OSError):
                os.write(fd, line)
            os.fchmod(fd, _CLOSED)
            return missing
        finally:
            os.close(fd)

    def read(self, run_id: str, fence: int, *, rank: int, stream: str, offset: int = 0, limit: int) -> bytes:
        """Return the bytes of a log from the given offset."""
        path = self._directory(run_id, fence) / _name(rank, stream)
        if offset < 0:
            raise InvalidValue(f"a log has no offset {offset}")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(fd, limit, offset)
        finally:
            os.close(fd)

    def size(self, run_id: str, fence: int, *, rank: int, stream: str) -> int:
        """Return the size of one output stream in bytes."""
        try:
            return (self._directory(run_id, fence) / _name(rank, stream)).lstat().st_size
        except FileNotFoundError:
            return 0

    def sizes(self, run_id: str, fence: int) -> dict[tuple[int, str], int]:
        """Return the sizes of an attempt's log files in bytes, by rank and stream."""
        found = {}
        for entry in _entries(self._directory(run_id, fence)):
            if match := _NAME.fullmatch(entry.name):
                found[int(match[1]), match[2]] = entry.stat(follow_symlinks=False).st_size
        return found

    def sync(self, run_id: str, fence: int) -> None:
        """Make all appended bytes of an attempt durable.

        Raises:
            OSError: the disk failed. The caller must not acknowledge anything.
        """
        directory = self._directory(run_id, fence)
        with self._lock:
            names = self._unsynced.pop(directory, None)
        try:
            if names is None:  # An earlier server process wrote the existing files.
                names = {entry.name for entry in _entries(directory)}
            if names:
                if len(names) < TOGETHER_MIN or not _sync_disk(directory):
                    for name in names:
                        # A concurrent call may record a file before creating it.
                        with contextlib.suppress(FileNotFoundError):
                            _sync(directory / name)
                for path in (directory, directory.parent, self._root, self._root.parent):
                    _sync(path)
        except BaseException:
            with self._lock:  # After a failure, the next call syncs all files of the attempt.
                self._unsynced.pop(directory, None)
            raise

    def run_sizes(self) -> dict[str, int]:
        """Return the output size of each run in bytes. The call reads the size of every file."""
        return {
            entry.name: sum(
                file.stat(follow_symlinks=False).st_size
                for attempt in _entries(Path(entry.path))
                for file in _entries(Path(attempt.path))
            )
            for entry in _entries(self._root)
            if _RUN_ID.fullmatch(entry.name)
        }

    def remove(self, run_id: str) -> None:
        """Delete all output of a run, if any."""
        directory = self._directory(run_id, 1).parent
        with self._lock:
            for attempt in [path for path in self._unsynced if path.parent == directory]:
                del self._unsynced[attempt]
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory)

    def _directory(self, run_id: str, fence: int) -> Path:
        if not _RUN_ID.fullmatch(run_id) or not 0 < fence < 1 << 31:
            raise InvalidValue(f"{run_id[:40]!r} (attempt {fence}) is not a valid run")
        return self._root / run_id / str(fence)

    def _open(self, directory: Path, name: str, *, make: bool) -> int:
        """Open a log file for appending. Return -1 if the file is missing and `make` is False."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if make else 0)
        self._note(directory, name)
        try:
            return os.open(directory / name, flags, 0o600)
        except FileNotFoundError:
            if not make:
                return -1
        for path in (self._root, directory.parent, directory):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(directory / name, flags, 0o600)

    def _note(self, directory: Path, name: str) -> None:
        """Record a file for the next sync. The first call also records the files of an earlier process."""
        with self._lock:
            if directory in self._unsynced:
                self._unsynced[directory].add(name)
                return
        before = {entry.name for entry in _entries(directory)}
        with self._lock:
            self._unsynced.setdefault(directory, before).add(name)

    def _write(self, fd: int, data: memoryview) -> int:
        """Write as many bytes as the disk can hold. Return the number of written bytes."""
        free = free_bytes(fd)
        data = data if free is None else data[: max(0, free - self._kept_free_bytes)]
        written = 0
        try:
            while written < len(data):
                written += os.write(fd, data[written:])
        except OSError as error:
            if error.errno not in FULL:
                raise
        return written


def _is_closed(fd: int) -> bool:
    return bool(os.fstat(fd).st_mode & stat.S_ISVTX)


def _name(rank: int, stream: str) -> str:
    if not 0 <= rank < RANKS_MAX or stream not in STREAMS:
        raise InvalidValue(f"{stream[:40]!r} of rank {rank} is not an output stream of a rank")
    return f"{rank}.{stream}"


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            yield from entries
    except FileNotFoundError:
        return


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_disk(directory: Path) -> bool:
    """Sync a directory's file system. Return False if the operating system cannot sync file systems."""
    if not hasattr(_libc, "syncfs"):
        return False
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        if _libc.syncfs(fd):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(directory))
    finally:
        os.close(fd)
    return True
