"""Extracts a unit's packs into a directory that contains only files, directories and links.

    fetching threads   read packs ahead, a few at a time
    writing threads    one block each: decompress it, check every file against its row while writing it
    this thread        hands out blocks, makes empty directories, and makes links last

The extractor never opens a path through a link. The extractor opens each directory relative to its parent's descriptor
(`openat` with O_NOFOLLOW). The extractor creates a file only if no entry with its name exists (O_EXCL). The extractor
creates links after it has written all files. Each thread walks the `WrittenTree` with its own `DirectoryWalk`, which
keeps the directories of the current path open. Consecutive files are usually in the same directory, because a unit's
rows are sorted by path.

The extractor creates each file with mode 0444 or 0555. All unpacked files have the same modification time, which keeps
their bytecode valid in every tree. A unit's directory has mode 0700 until the extractor has written and verified all of
its content. If unpacking fails, the extractor removes the unit's directory. The extractor does not sync files.
`UnitCache.settle` syncs the file system later.

Failure cases: If bytes do not match their address, the extractor raises `EnvironmentCorrupt`, which names the pack,
block or file. If the disk is full or read-only, the extractor raises `StorageError`. Store errors reach the caller
unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import shutil
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from serverless_gpu.environment.compression import pieces
from serverless_gpu.environment.documents import FileRow, ProgressPoint, Report, Unit, ignore_progress
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.errors import EnvironmentCorrupt, EnvironmentRejected, StorageError
from serverless_gpu.operating_system import lacks_inodes

MTIME_S = 1_577_836_800
"""Modification time that the extractor gives every file of a unit (1 January 2020)."""
_MTIME = (MTIME_S * 10**9, MTIME_S * 10**9)
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ENTER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MODES = {"f": 0o444, "x": 0o555}
_DIRECTORY_MODE = 0o755
_TURN_S = 0.1
FETCHING_THREADS = 3
PACKS_IN_FLIGHT = 4
REPORT_S = 0.2
_Result = TypeVar("_Result")


def unpack(unit: Unit, blobs: StoreBlobs, directory: Path, *, report: Report = ignore_progress) -> None:
    """Unpack a unit into a new directory and verify its content. If unpacking fails, delete the directory.

    The caller must have checked the unit (`StoreBlobs.read_unit`). The target directory must not exist yet. The parent
    directory of the target must exist. No other process may write to the parent directory.
    """
    for _ in unpack_each([(unit, directory)], blobs, report=report):
        pass


def unpack_each(
    jobs: Iterable[tuple[Unit, Path]],
    blobs: StoreBlobs,
    *,
    report: Report = ignore_progress,
    totals: ProgressPoint | None = None,
) -> Iterator[Path]:
    """Unpack several units as one stream, which is faster than one unit after another.

    The stream starts the next unit when fewer than `PACKS_IN_FLIGHT` packs are in flight. The stream yields a unit's
    directory as soon as the directory is complete. If an error occurs, the stream deletes all directories that it has
    not yielded. Without `totals`, the progress totals grow as each unit starts.
    """
    unpacker = _Unpacker(blobs, _Meter(report, totals))
    yield from unpacker.run(jobs)


class _Meter:
    """Counts extraction progress, and reports the counts from a single thread."""

    def __init__(self, report: Report, totals: ProgressPoint | None) -> None:
        self._report = report
        self._totals = totals
        self._lock = threading.Lock()
        self._bytes = self._files = self._moved = self._bytes_begun = self._files_begun = 0
        self._name = ""
        self._next_s = 0.0

    def begin(self, unit: Unit) -> None:
        self._name = unit.address[:12]
        self._bytes_begun += sum(row.size for row in unit.rows)
        self._files_begun += sum(row.has_content for row in unit.rows)

    def fetched(self, size: int) -> None:
        with self._lock:
            self._moved += size

    def wrote(self, size: int, files: int) -> None:
        with self._lock:
            self._bytes += size
            self._files += files

    def pulse(self, *, last: bool = False) -> None:
        now = time.monotonic()
        if now < self._next_s and not last:
            return
        self._next_s = now + REPORT_S / 2
        totals = self._totals
        self._report(
            ProgressPoint(
                phase="fetch",
                bytes_done=self._bytes,
                bytes_total=totals.bytes_total if totals else self._bytes_begun,
                files_done=self._files,
                files_total=totals.files_total if totals else self._files_begun,
                moved_bytes=self._moved,
                name="" if last else self._name,
            )
        )


class _Unpacker:
    """The pipeline of an extraction: requested packs, blocks being written, and unfinished units."""

    def __init__(self, blobs: StoreBlobs, meter: _Meter) -> None:
        self._blobs = blobs
        self._meter = meter
        self._stop = threading.Event()
        self._packs: deque[tuple[_Work, Sequence[int], Future[dict[int, memoryview]]]] = deque()
        self._writes: deque[tuple[_Work, Future[None]]] = deque()
        self._open: dict[Path, _Work] = {}

    def run(self, jobs: Iterable[tuple[Unit, Path]]) -> Iterator[Path]:
        threads = min(8, max(2, len(os.sched_getaffinity(0))))
        with (
            ThreadPoolExecutor(FETCHING_THREADS, "sgpu-fetch") as self._fetching,
            ThreadPoolExecutor(threads, "sgpu-write") as self._writing,
        ):
            try:
                yield from self._run(iter(jobs), 3 * threads)
                self._meter.pulse(last=True)
            finally:
                self._stop.set()
                self._fetching.shutdown(wait=True, cancel_futures=True)
                self._writing.shutdown(wait=True, cancel_futures=True)
                for work in self._open.values():
                    work.abandon()

    def _run(self, jobs: Iterator[tuple[Unit, Path]], window: int) -> Iterator[Path]:
        steps = self._steps(jobs)
        more = True
        while more or self._packs:
            while more and len(self._packs) < PACKS_IN_FLIGHT:
                more = next(steps, None) is not None
            if self._packs:
                self._write_piece(window)
            yield from self._complete()
        while self._writes:
            self._settle()
        yield from self._complete()

    def _steps(self, jobs: Iterator[tuple[Unit, Path]]) -> Iterator[int]:
        """Request the packs of all units in order, one pack per step."""
        for unit, directory in jobs:
            self._meter.begin(unit)
            work = self._open[directory] = _Work(unit, directory)
            # Threads write the blocks of one pack in order, so that a large file never waits for a later block.
            for _, blocks in itertools.groupby(work.writer.used_blocks, key=lambda index: unit.blocks[index].pack):
                piece = tuple(blocks)
                work.outstanding += len(piece)
                self._packs.append((work, piece, self._fetching.submit(self._fetch, unit, piece)))
                yield len(piece)
            work.asked = True

    def _fetch(self, unit: Unit, piece: Sequence[int]) -> dict[int, memoryview]:
        """Return the compressed frames of selected blocks of one pack."""
        if self._stop.is_set():
            return {}
        blocks, pack = unit.blocks, unit.blocks[piece[0]].pack
        held = max(block.offset + block.length for block in blocks if block.pack == pack)
        frames: dict[int, memoryview] = {}
        if 2 * sum(blocks[index].length for index in piece) >= held:
            data = memoryview(self._blobs.read_pack(unit.packs[pack]))
            self._meter.fetched(len(data))
            for index in piece:
                frames[index] = data[blocks[index].offset : blocks[index].offset + blocks[index].length]
        else:
            for index in piece:
                part = self._blobs.read_range(unit.packs[pack], blocks[index].offset, blocks[index].length)
                self._meter.fetched(len(part))
                frames[index] = memoryview(part)
        return frames

    def _write_piece(self, window: int) -> None:
        work, piece, future = self._packs[0]
        frames = self._wait(future)
        self._packs.popleft()
        for index in piece:
            while len(self._writes) >= window:
                self._settle()
            self._writes.append((work, self._writing.submit(self._write, work, index, frames.pop(index))))

    def _write(self, work: _Work, index: int, frame: memoryview) -> None:
        if not self._stop.is_set():
            with disk_errors(work.directory):
                self._meter.wrote(*work.writer.write(index, frame))

    def _settle(self) -> None:
        work, future = self._writes[0]
        self._wait(future)
        self._writes.popleft()
        work.outstanding -= 1

    def _complete(self) -> Iterator[Path]:
        for work in list(self._open.values()):
            if not work.asked or work.outstanding:
                continue
            self._meter.wrote(0, work.finish())
            del self._open[work.directory]
            yield work.directory

    def _wait(self, future: Future[_Result]) -> _Result:
        while not wait((future,), timeout=REPORT_S).done:
            self._meter.pulse()
        self._meter.pulse()
        return future.result()


class _Work:
    """State of a unit that the extractor is currently unpacking."""

    def __init__(self, unit: Unit, directory: Path) -> None:
        self.unit = unit
        self.directory = directory
        self.outstanding = 0
        self.asked = False
        with disk_errors(directory):
            os.mkdir(directory, 0o700)
            try:
                self._tree = WrittenTree(directory)
            except BaseException:
                os.rmdir(directory)
                raise
        self.writer = UnitWriter(unit, self._tree)

    def finish(self) -> int:
        """Create all entries without content, publish the directory, and return the number of empty files."""
        with disk_errors(self.directory):
            count = self.writer.finish()
            os.chmod(self.directory, 0o755)
        self._tree.close()
        return count

    def abandon(self) -> None:
        self.writer.close()
        self._tree.close()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Convert file system errors into a StorageError that names the directory."""
    try:
        yield
    except OSError as error:
        raise storage_error(directory, error) from error


def storage_error(directory: Path, error: OSError) -> StorageError:
    """Return the error for a directory that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and lacks_inodes(directory):
        return StorageError(
            f"no inodes are left on the disk of {directory}, so a unit cannot be unpacked",
            hint="delete files on this disk, then start the run again",
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"no space is left on the disk of {directory}, so a unit cannot be unpacked",
            hint="free some space on this disk, then start the run again",
        )
    return StorageError(f"{directory} cannot be written: {error.strerror or error}")


class WrittenTree:
    """A new directory that several threads fill.

    The new directory is empty. Other users cannot enter the new directory.
    """

    def __init__(self, directory: Path) -> None:
        self.fd = os.open(directory, _ENTER)
        self._made: set[str] = set()
        # Linux reports the umask in /proc. Without /proc, a process can read its umask only by briefly changing it.
        self.masked = _umask() & _DIRECTORY_MODE != 0

    def enter(self, above: int, name: str, path: str) -> int:
        """Open a directory, creating it if needed, and return its descriptor."""
        if path not in self._made:
            try:
                os.mkdir(name, _DIRECTORY_MODE, dir_fd=above)
                made = True
            except FileExistsError:
                # Another thread has already created this directory entry. If the entry is not a directory, `os.open`
                # fails.
                made = False
            fd = os.open(name, _ENTER, dir_fd=above)
            if made and self.masked:
                os.fchmod(fd, _DIRECTORY_MODE)
            self._made.add(path)
            return fd
        return os.open(name, _ENTER, dir_fd=above)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class DirectoryWalk:
    """A thread's current directory in a tree, with open descriptors of its parent directories."""

    def __init__(self, tree: WrittenTree) -> None:
        self._tree = tree
        self._at = ""
        self._names: list[str] = []
        self._fds: list[int] = []

    def __enter__(self) -> DirectoryWalk:
        return self

    def __exit__(self, *exc: object) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def go(self, directory: str) -> int:
        """Return the descriptor of a directory in the tree, which stays open until the next call."""
        if directory == self._at:
            return self._fds[-1] if self._fds else self._tree.fd
        names = directory.split("/")
        same = 0
        for one, other in zip(names, self._names, strict=False):
            if one != other:
                break
            same += 1
        while len(self._fds) > same:
            os.close(self._fds.pop())
            self._names.pop()
        self._at = "/".join(self._names)
        for index in range(same, len(names)):
            above = self._fds[-1] if self._fds else self._tree.fd
            self._fds.append(self._tree.enter(above, names[index], "/".join(names[: index + 1])))
            self._names.append(names[index])
        self._at = directory
        return self._fds[-1]

    def make(self, row: FileRow) -> int:
        """Create a file of the unit and return its descriptor for writing."""
        directory, _, name = row.path.rpartition("/")
        fd = os.open(name, _MAKE, _MODES[row.kind], dir_fd=self.go(directory))
        if self._tree.masked:
            os.fchmod(fd, _MODES[row.kind])
        return fd


class UnitWriter:
    """Writes the blocks of one unit. Several threads may write blocks at the same time."""

    def __init__(self, unit: Unit, tree: WrittenTree) -> None:
        self._unit = unit
        self._tree = tree
        self._what = f"unit {unit.address[:12]}"
        # block number → files in this block, by start offset
        self._small: dict[int, list[tuple[int, FileRow]]] = defaultdict(list)
        # block number → large file with content in this block, and the offset in this file
        self._large: dict[int, tuple[_LargeFile, int]] = {}
        self._plan()
        self.used_blocks = sorted([*self._small, *self._large])

    def write(self, index: int, frame: memoryview) -> tuple[int, int]:
        """Write the files of one block, and return the numbers of written bytes and completed files.

        Raise EnvironmentCorrupt if the content of a file does not match its row.
        """
        size = self._unit.blocks[index].size
        content = pieces(frame, size)
        large, start = self._large.get(index, (None, 0))
        try:
            if large is not None:
                return size, int(large.write(content, start))
            return self._write_small(self._small[index], _Stream(content))
        except EnvironmentRejected as error:
            raise EnvironmentCorrupt(f"{self._what}, block {index}: {error.message}") from None

    def finish(self) -> int:
        """Create empty files and directories, then links, and return the number of empty files."""
        with DirectoryWalk(self._tree) as walk:
            empty = [row for row in self._unit.rows if row.has_content and not row.size]
            for row in empty:
                fd = walk.make(row)
                try:
                    os.utime(fd, ns=_MTIME)
                finally:
                    os.close(fd)
            for row in self._unit.rows:
                if row.kind == "d":
                    walk.go(row.path)
            for row in self._unit.rows:
                if row.kind == "l":
                    directory, _, name = row.path.rpartition("/")
                    os.symlink(row.target, name, dir_fd=walk.go(directory))
        return len(empty)

    def close(self) -> None:
        """Close the large files that are still incomplete."""
        for large, _ in self._large.values():
            large.close()

    def _plan(self) -> None:
        filled = (row for row in self._unit.rows if row.has_content and row.size)
        for row, place in zip(filled, self._unit.places, strict=True):
            if place.start + row.size <= self._unit.blocks[place.block].size:
                self._small[place.block].append((place.start, row))
                continue
            large, start, block = _LargeFile(row, self._tree, self._what), 0, place.block
            while start < row.size:
                self._large[block] = (large, start)
                start, block = start + self._unit.blocks[block].size, block + 1
        for files in self._small.values():
            files.sort(key=lambda item: item[0])

    def _write_small(self, files: Sequence[tuple[int, FileRow]], stream: _Stream) -> tuple[int, int]:
        total = 0
        sha256, write, utime, close = hashlib.sha256, os.write, os.utime, os.close
        with DirectoryWalk(self._tree) as walk:
            for start, row in files:
                content = stream.take(start, row.size)
                if sha256(content).digest() != row.sha256:
                    raise _wrong_content(self._what, row)
                fd = walk.make(row)
                try:
                    done = write(fd, content)
                    while done < row.size:
                        done += write(fd, content[done:])
                    utime(fd, ns=_MTIME)
                finally:
                    close(fd)
                total += row.size
        stream.end()
        return total, len(files)


class _Stream:
    """Reads a block's content sequentially, and discards the bytes before the requested offset."""

    def __init__(self, content: Iterator[bytes]) -> None:
        self._content = content
        self._at = 0  # offset in the block at which the current chunk starts
        self._piece = memoryview(b"")

    def take(self, start: int, size: int) -> memoryview:
        """Return up to `size` bytes of the block's content, beginning at `start`.

        `start` must not be before the reader's current offset.
        """
        while start >= self._at + len(self._piece) and self._next():
            pass
        offset = start - self._at
        if offset + size <= len(self._piece):
            return self._piece[offset : offset + size]
        parts = [self._piece[offset:]]
        while sum(map(len, parts)) < size and self._next():
            parts.append(self._piece[: size - sum(map(len, parts))])
        return memoryview(b"".join(parts))

    def end(self) -> None:
        """Read to the end of the block, which proves that the compressed frame is complete."""
        while self._next():
            pass

    def _next(self) -> bool:
        piece = next(self._content, None)
        if piece is None:
            return False
        self._at += len(self._piece)
        self._piece = memoryview(piece)
        return True


class _LargeFile:
    """A large file that several threads write in parts and hash in order."""

    def __init__(self, row: FileRow, tree: WrittenTree, what: str) -> None:
        self._row = row
        self._tree = tree
        self._what = what
        self._fd = -1
        self._turn = threading.Condition()
        self._digest = hashlib.sha256()
        self._hashed = 0
        self._failed = False

    def write(self, content: Iterator[bytes], start: int) -> bool:
        """Write one part of the file, and return True if the file is complete and has the right digest."""
        try:
            self._open()
            waiting: list[bytes] = []
            end = start
            for piece in content:
                self._put(piece, end)
                end += len(piece)
                if self._hashed == start:  # A thread advances `_hashed` only if its part starts at `_hashed`.
                    for earlier in waiting:
                        self._digest.update(earlier)
                    waiting.clear()
                    self._digest.update(piece)
                else:
                    waiting.append(piece)
            # A thread hashes its part only after all earlier parts of the file. If writing a part failed, the thread
            # that wrote the part reports the error.
            with self._turn:
                while self._hashed != start and not self._failed:
                    self._turn.wait(_TURN_S)
                if self._failed:
                    return False
            for earlier in waiting:
                self._digest.update(earlier)
            with self._turn:
                self._hashed = end
                self._turn.notify_all()
            if end != self._row.size:
                return False
            if self._digest.digest() != self._row.sha256:
                raise _wrong_content(self._what, self._row)
            os.utime(self._fd, ns=_MTIME)
            self.close()
            return True
        except BaseException:
            self.fail()
            raise

    def fail(self) -> None:
        """Wake all threads that wait for a part of this file after another part has failed."""
        with self._turn:
            self._failed = True
            self._turn.notify_all()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        with self._turn:
            if self._fd < 0:
                with DirectoryWalk(self._tree) as walk:
                    self._fd = walk.make(self._row)

    def _put(self, data: bytes, start: int) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self._fd, view, start)
            view, start = view[done:], start + done


def _wrong_content(what: str, row: FileRow) -> EnvironmentCorrupt:
    return EnvironmentCorrupt(f"{what}: the stored content of {row.path!r} does not match its digest")


def _umask() -> int:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("Umask:"):
                    return int(line.split()[1], 8)
    except (OSError, ValueError):
        pass
    return 0o777  # The extractor sets all modes explicitly, because the umask is unknown.
