"""A unit's packs become a directory: our own extractor, which can make files, directories and links and nothing else.

    fetching threads   read packs ahead, a few at a time
    writing threads    one block each: decompress, check every file against its row while writing it
    this thread        hands out blocks, makes empty directories, and links last of all

Nothing is ever opened through a link: a directory is reached from the fresh root name by name (`openat` with
O_NOFOLLOW), a file is made where nothing is (O_EXCL), and while files are written there is not one link in the tree.
Modes are 0444 and 0555, given when a file is made; there is no way to say another. Files have one modification time, so
that bytecode made from them is valid wherever they are linked to. Until everything is there and right the directory is
0700; on any failure it is removed. Nothing is synced: whoever publishes the directory syncs its file system before.

Failure cases: bytes that are not what their address says (`EnvironmentCorrupt`: pack, block or file named), a full or
read-only disk (`StorageError`), what the store raises.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from serverless_gpu.environment.documents import Unit
from serverless_gpu.environment.progress import ProgressPoint, Report, nobody
from serverless_gpu.environment.restore.cache.file_writer import MTIME_S, UnitWriter, WrittenTree
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.errors import StorageError
from serverless_gpu.inodes import lacks_inodes

__all__ = ["MTIME_S", "unpack", "unpack_each"]

FETCHING_THREADS = 3
PACKS_IN_FLIGHT = 4
REPORT_S = 0.2

_Result = TypeVar("_Result")


def unpack(unit: Unit, blobs: StoreBlobs, directory: Path, *, report: Report = nobody) -> None:
    """Make a directory of a unit, all of it verified, or leave nothing.

    Args:
        unit: as `Blobs.read_unit` gave it, so it follows the rules.
        blobs: where its packs are.
        directory: does not exist; its parent does, and is nobody else's to write to.
        report: told how far it is.

    Raises:
        EnvironmentCorrupt: bytes in the store are not what they should be.
        StorageError: the disk is full, or the directory cannot be written.
    """
    for _ in unpack_each([(unit, directory)], blobs, report=report):
        pass


def unpack_each(
    jobs: Iterable[tuple[Unit, Path]],
    blobs: StoreBlobs,
    *,
    report: Report = nobody,
    totals: ProgressPoint | None = None,
) -> Iterator[Path]:
    """Unpack several units as one stream, which is quicker than one after another.

    Args:
        jobs: units and their fresh directories; taken one after another, when there is room for the next.
        blobs: where their packs are.
        report: told how far it is.
        totals: of all jobs, for the reports; None if each is to count when it begins.

    Yields:
        Each directory as soon as it is complete. When this raises, those that were not yielded are gone.
    """
    unpacker = _Unpacker(blobs, _Meter(report, totals))
    yield from unpacker.run(jobs)


class _Meter:
    """Counts, and reports from one thread only."""

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
    """The pipeline: packs ahead, blocks under way, units to be finished."""

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
        """Ask for one piece of a pack after another, unit after unit."""
        for unit, directory in jobs:
            self._meter.begin(unit)
            work = self._open[directory] = _Work(unit, directory)
            for piece in _pieces(unit, work.writer.used_blocks):
                work.outstanding += len(piece)
                self._packs.append((work, piece, self._fetching.submit(self._fetch, unit, piece)))
                yield len(piece)
            work.asked = True

    def _fetch(self, unit: Unit, piece: Sequence[int]) -> dict[int, memoryview]:
        """Return the frames of some blocks that lie in one pack."""
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
    """A unit that is being unpacked."""

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
        """Make what has no content, and let others look in; return how many empty files were made."""
        with disk_errors(self.directory):
            count = self.writer.finish()
            os.chmod(self.directory, 0o755)
        self._tree.close()
        return count

    def abandon(self) -> None:
        self.writer.close()
        self._tree.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def _pieces(unit: Unit, used: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield blocks that lie in one pack, in their order: a large file waits for no block that comes after it."""
    for _, piece in itertools.groupby(used, key=lambda index: unit.blocks[index].pack):
        yield tuple(piece)


@contextlib.contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Turn what the file system raises into a StorageError that names the directory."""
    try:
        yield
    except OSError as error:
        raise storage_error(directory, error) from error


def storage_error(directory: Path, error: OSError) -> StorageError:
    """Return the error for a directory that could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and lacks_inodes(directory):
        return StorageError(
            f"no inodes left on the disk of {directory} while a unit was unpacked: it has room, and cannot hold one "
            "more file",
            hint="delete files there, then run again",
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"no space left on the disk of {directory} while a unit was unpacked",
            hint="free some space there, then run again",
        )
    return StorageError(f"{directory} cannot be written: {error.strerror or error}")
