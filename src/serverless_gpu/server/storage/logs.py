"""Output of ranks, and samples of telemetry: one file per rank and stream, appended to by offset.

    report ── piece(offset, bytes) ─▶ append ─▶ logs/<run>/<fence>/<rank>.<stream>
                 next offset ◀────────┘                  │
    stream, page of a log, download ◀── read, sizes ─────┘

A piece says where it belongs, so one that comes twice changes nothing, one that overlaps adds what is new, and one that
comes too early is left out: the answer is the offset that is wanted next. What was appended survives the end of this
process; `sync` makes it survive a power cut, and is called before an ending is acknowledged: until then the node keeps
its own copy. The files of an attempt are only ever appended to.

A name is built from checked parts only: the identifier of a run, two integers, one of three words. Of telemetry, `rank`
is the number of the node.

Failure cases: the disk is full, or has only what is kept for the database (fewer bytes are taken, and the node sends
them again later: a report is the life sign of a run that must not end because of a disk; when the run ends with bytes
missing, a line where they would be says so); two requests for one file
(one after the other: the file is locked); a node that sends more than a node stores (the rest is left out).
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
"""Stored bytes of one stream, at most; nodes stop before (`node/output/logs.py`), another sender may not."""
TOGETHER_MIN = 64
"""From so many files on the disk is asked to finish everything once, instead of each by itself."""

_RUN_ID = re.compile(r"[0-9a-hjkmnp-tv-z]{26}")
_NAME = re.compile(rf"(0|[1-9][0-9]{{0,6}})\.({'|'.join(STREAMS)})")
_CLOSED = 0o1600  # the sticky bit means nothing on a file of data: here it says that its last line is the server's
_libc = ctypes.CDLL(None, use_errno=True)


class Logs:
    """The output of all runs; safe to use from several threads."""

    def __init__(self, root: Path, *, bytes_max: int = BYTES_MAX, kept_free_bytes: int = KEPT_FREE_BYTES) -> None:
        self._root = root
        self._bytes_max = bytes_max
        self._kept_free_bytes = kept_free_bytes
        self._lock = threading.Lock()
        self._unsynced: dict[Path, set[str]] = {}
        """By directory of an attempt, the files that were written since `sync`; what it lacks may be any."""

    def append(self, run_id: str, fence: int, *, rank: int, stream: str, offset: int, data: bytes) -> int:
        """Add bytes at the place where they belong.

        Returns:
            The offset that is wanted next. Less than the end of `data` when something before it is missing here, or
            when the disk is full; more when these bytes were there already.
        """
        directory, name = self._directory(run_id, fence), _name(rank, stream)
        if offset < 0:
            raise InvalidValue(f"a log has no byte {offset}")
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
        """Say at the end of a log what is missing of it, if anything is; nothing is appended to it any more.

        Returns:
            How many bytes are missing; 0 when that was said before.
        """
        fd = self._open(self._directory(run_id, fence), _name(rank, stream), make=True)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            missing = end - os.fstat(fd).st_size
            if missing <= 0 or _is_closed(fd):
                return 0
            line = f"\n— {format_bytes(missing)} missing ({why}) —\n".encode()
            with contextlib.suppress(OSError):  # what is kept free is for this, too; there may be nothing left of it
                os.write(fd, line)
            os.fchmod(fd, _CLOSED)
            return missing
        finally:
            os.close(fd)

    def read(self, run_id: str, fence: int, *, rank: int, stream: str, offset: int = 0, limit: int) -> bytes:
        """Return bytes from an offset on; none where there are none yet."""
        path = self._directory(run_id, fence) / _name(rank, stream)
        if offset < 0:
            raise InvalidValue(f"a log has no byte {offset}")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(fd, limit, offset)
        finally:
            os.close(fd)

    def size(self, run_id: str, fence: int, *, rank: int, stream: str) -> int:
        """Return how many bytes there are of one stream."""
        try:
            return (self._directory(run_id, fence) / _name(rank, stream)).lstat().st_size
        except FileNotFoundError:
            return 0

    def sizes(self, run_id: str, fence: int) -> dict[tuple[int, str], int]:
        """Return how many bytes there are, by rank and stream; streams without any are left out."""
        found = {}
        for entry in _entries(self._directory(run_id, fence)):
            if match := _NAME.fullmatch(entry.name):
                found[int(match[1]), match[2]] = entry.stat(follow_symlinks=False).st_size
        return found

    def sync(self, run_id: str, fence: int) -> None:
        """Make everything durable that was appended of an attempt.

        Raises:
            OSError: the disk cannot; nothing may be acknowledged then.
        """
        directory = self._directory(run_id, fence)
        with self._lock:
            names = self._unsynced.pop(directory, None)
        try:
            if names is None:  # by another process, before this one was started
                names = {entry.name for entry in _entries(directory)}
            if names:
                if len(names) < TOGETHER_MIN or not _sync_disk(directory):
                    for name in names:
                        with contextlib.suppress(FileNotFoundError):  # it was opened to be looked at
                            _sync(directory / name)
                for path in (directory, directory.parent, self._root, self._root.parent):
                    _sync(path)
        except BaseException:
            with self._lock:  # the next one looks at all of them
                self._unsynced.pop(directory, None)
            raise

    def run_sizes(self) -> dict[str, int]:
        """Return how many bytes there are, by run; looks at every file."""
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
        """Remove everything that a run wrote; nothing happens without any."""
        directory = self._directory(run_id, 1).parent
        with self._lock:
            for attempt in [path for path in self._unsynced if path.parent == directory]:
                del self._unsynced[attempt]
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory)

    def _directory(self, run_id: str, fence: int) -> Path:
        if not _RUN_ID.fullmatch(run_id) or not 0 < fence < 1 << 31:
            raise InvalidValue(f"{run_id[:40]!r} is not a run with an attempt {fence}")
        return self._root / run_id / str(fence)

    def _open(self, directory: Path, name: str, *, make: bool) -> int:
        """Return a descriptor of a file that is to be appended to, -1 where it is missing and not to be made."""
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
        """Remember what has to be made durable; first all that is there, from before this process."""
        with self._lock:
            if directory in self._unsynced:
                self._unsynced[directory].add(name)
                return
        before = {entry.name for entry in _entries(directory)}
        with self._lock:
            self._unsynced.setdefault(directory, before).add(name)

    def _write(self, fd: int, data: memoryview) -> int:
        """Write as much as there is room for; return how many bytes that was."""
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
        raise InvalidValue(f"{stream[:40]!r} of rank {rank} is not the output of a rank")
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
    """Make everything durable on the disk of a directory; return whether that is possible here."""
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
