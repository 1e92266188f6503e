"""Plans a unit's blocks, reuses blocks of the unit's previous version, and reads files.

    small files   in order of their rows, as many as fit into a block
    large files   separate blocks, one after another
    old content   reused from the previous version: an edited file of torch costs kilobytes, not all of torch

A unit reuses an old pack only if the unit contains at least half of the pack's content. The packer packs a unit from
scratch if the unit has many more packs than a new capture would create. The limits on pack reuse keep restores fast
after many edits.

The reader compares the digest of each file with the file's row. If RECORD contains a wrong digest, the reader records
the true digest as a correction. If a file's size has changed since the scan, the packer plans the unit again
(`FileChanged`). If a file changes during several reads, the reader raises `EnvironmentUnsupported` with the name of the
file.

Several threads read the blocks of a large file in parallel and hash the blocks in order. A thread waits briefly before
hashing, because another thread is already processing the previous block.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from serverless_gpu.environment.documents import BLOCK_BYTES, PACK_BYTES, ContentPlace, FileRow, PackBlock, Unit
from serverless_gpu.errors import EnvironmentUnsupported

PACKS_MORE_MAX = 16
"""Number of excess packs, compared with a new capture, at which the packer packs a unit from scratch."""
TRIES_MAX = 4
"""Maximum number of reads for a file that changes during each read."""
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK prevents a hang if the path is a FIFO.
_TURN_S = 0.1
_one_by_one = threading.Lock()
"""Lock for reading small files, which avoids contention for the interpreter lock."""


class BlockPart(NamedTuple):
    """Part of a file in a block: row index of the file, offset in the file, and number of bytes."""

    row: int
    start: int
    size: int


class BlockPlan(NamedTuple):
    """Planned content of one block: several complete small files, or one part of a large file."""

    parts: tuple[BlockPart, ...]
    large: bool = False

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


class ReusedBlocks(NamedTuple):
    """Reusable packs and blocks of a unit's older version, with content places by new row index."""

    packs: tuple[str, ...] = ()
    blocks: tuple[PackBlock, ...] = ()
    places: dict[int, ContentPlace] = {}  # noqa: RUF012 - never written to


def plan_blocks(rows: Sequence[FileRow], wanted: Collection[int], block_bytes: int = BLOCK_BYTES) -> list[BlockPlan]:
    """Plan the blocks for the files of a unit, in order.

    `wanted` contains the row indices of files that need a content place, in order. A plan may contain empty files,
    which occupy no block.
    """
    plans: list[BlockPlan] = []
    group: list[BlockPart] = []
    room = block_bytes
    for index in wanted:
        size = rows[index].size
        if size > block_bytes:
            plans += [
                BlockPlan((BlockPart(index, start, min(block_bytes, size - start)),), large=True)
                for start in range(0, size, block_bytes)
            ]
            continue
        if size > room:
            plans.append(BlockPlan(tuple(group)))
            group, room = [], block_bytes
        group.append(BlockPart(index, 0, size))
        room -= size
    if group:
        plans.append(BlockPlan(tuple(group)))
    return plans


def places_of(plans: Sequence[BlockPlan], first: int) -> dict[int, ContentPlace]:
    """Return the content places of files by row index.

    `first` is the block index of the first plan in the unit. A plan without content has no block index.
    """
    places: dict[int, ContentPlace] = {}
    block = first
    for plan in plans:
        start = 0
        for part in plan.parts:
            if part.size and part.start == 0:
                places[part.row] = ContentPlace(block, start)
            start += part.size
        block += start > 0
    return places


def reuse(rows: Sequence[FileRow], old: Unit) -> ReusedBlocks:
    """Return the blocks of an older unit version that a new version can reuse."""
    # Maps a file's digest and size to the content places in the old unit version.
    known: dict[tuple[bytes, int], list[ContentPlace]] = defaultdict(list)
    filled = (row for row in old.rows if row.has_content and row.size)
    for row, place in zip(filled, old.places, strict=True):
        known[row.sha256, row.size].append(place)
    taken: dict[int, ContentPlace] = {}
    used_blocks: dict[int, int] = defaultdict(int)
    for index, row in enumerate(rows):
        if row.has_content and row.size and (found := known.get((row.sha256, row.size))):
            # Each old content place serves one file, because files with equal content need separate content places.
            taken[index] = place = found.pop()
            for block, size in _spread(place, row.size, old.blocks):
                used_blocks[block] += size
    packs = {old.blocks[block].pack for block in used_blocks}
    kept = [index for index, block in enumerate(old.blocks) if block.pack in packs]
    held = sum(old.blocks[index].length for index in kept)
    used = sum(old.blocks[index].length * size // old.blocks[index].size for index, size in used_blocks.items())
    if not taken or 2 * used < held or len(packs) > PACKS_MORE_MAX + 2 * held // PACK_BYTES:
        return ReusedBlocks()
    pack_index = {pack: index for index, pack in enumerate(sorted(packs))}
    block_index = {block: index for index, block in enumerate(kept)}
    return ReusedBlocks(
        packs=tuple(old.packs[pack] for pack in pack_index),
        blocks=tuple(
            msgspec.structs.replace(old.blocks[index], pack=pack_index[old.blocks[index].pack]) for index in kept
        ),
        places={row: ContentPlace(block_index[place.block], place.start) for row, place in taken.items()},
    )


def _spread(place: ContentPlace, size: int, blocks: Sequence[PackBlock]) -> list[tuple[int, int]]:
    """Return the blocks of a file with the number of the file's bytes in each block."""
    if place.start + size <= blocks[place.block].size:
        return [(place.block, size)]
    parts, block, left = [], place.block, size
    while left:
        parts.append((block, blocks[block].size))
        left, block = left - blocks[block].size, block + 1
    return parts


class FileChanged(Exception):
    """Raised if a file's size differs from the scanned size.

    After this error, the packer plans the unit again.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class CaptureStopped(Exception):
    """Raised in reading threads after another thread has failed."""


class UnitReader:
    """Reads the files of one unit, concurrently for several threads.

    The keys of `files` and `texts` are row indices. An entry in `texts` overrides the file content of the same row.
    """

    def __init__(
        self,
        rows: Sequence[FileRow],
        files: Mapping[int, str],
        texts: Mapping[int, bytes],
        stopped: Callable[[], bool],
    ) -> None:
        self._rows = rows
        self._files = files
        self._texts = texts
        self._stopped = stopped
        self._lock = threading.Lock()
        self._large: dict[int, _LargeFile] = {}
        self.corrections: dict[int, bytes] = {}
        """True digests by row index, for rows with a wrong digest."""

    def read(self, plan: BlockPlan, buffer: memoryview) -> memoryview:
        """Read the planned content of a block.

        `buffer` must be at least one byte larger than the block. The extra byte lets the reader detect a larger file
        (`FileChanged`).
        """
        if self._stopped():
            raise CaptureStopped
        if plan.large:
            return self._read_large(plan.parts[0], buffer)
        with _one_by_one:
            return self._read_small(plan.parts, buffer)

    def close(self) -> None:
        """Close the large files that the reader has not read completely."""
        for large in self._large.values():
            large.close()

    def _read_small(self, parts: Sequence[BlockPart], buffer: memoryview) -> memoryview:
        rows, files, texts = self._rows, self._files, self._texts
        sha256, readv, close = hashlib.sha256, os.readv, os.close
        start = 0
        for index, _, size in parts:
            end = start + size
            if index in texts:
                count = len(texts[index])
                buffer[start:end] = texts[index][:size].ljust(size)
            else:
                try:
                    fd = os.open(files[index], _FLAGS)
                    try:
                        count = readv(fd, (buffer[start : end + 1],))
                    finally:
                        close(fd)
                except OSError as error:
                    raise unreadable(files[index], error) from None
            if count != size or sha256(buffer[start:end]).digest() != rows[index].sha256:
                buffer[start:end] = self._read_again(index)
            start = end
        return buffer[:start]

    def _read_again(self, index: int) -> bytes:
        """Read a small file again after its content did not match its row."""
        size = self._rows[index].size
        if index in self._texts:
            data = self._texts[index]
        else:
            data = _read_steady(self._files[index], size)
        if len(data) != size:
            raise FileChanged(self._rows[index].path)
        digest = hashlib.sha256(data).digest()
        if digest != self._rows[index].sha256:
            self.corrections[index] = digest
        return data

    def _read_large(self, part: BlockPart, buffer: memoryview) -> memoryview:
        index, size = part.row, self._rows[part.row].size
        if index in self._texts:
            return self._read_large_text(part, buffer)
        with self._lock:
            large = self._large.get(index)
            if large is None:
                large = self._large[index] = _LargeFile(self._files[index], size, self._stopped)
        data = large.read(part, buffer[: part.size])
        if part.start + part.size == size and (digest := large.finish()) != self._rows[index].sha256:
            self.corrections[index] = digest
        return data

    def _read_large_text(self, part: BlockPart, buffer: memoryview) -> memoryview:
        text, row = self._texts[part.row], self._rows[part.row]
        if len(text) != row.size:
            raise FileChanged(row.path)
        if part.start == 0 and (digest := hashlib.sha256(text).digest()) != row.sha256:
            self.corrections[part.row] = digest
        buffer[: part.size] = text[part.start : part.start + part.size]
        return buffer[: part.size]


class _LargeFile:
    """A large file that several threads read in parts and hash in order."""

    def __init__(self, path: str, size: int, stopped: Callable[[], bool]) -> None:
        self._path = path
        self._size = size
        self._stopped = stopped
        self._fd = open_regular(path)
        self._before = _signature(os.fstat(self._fd))
        self._digest = hashlib.sha256()
        self._turn = threading.Condition()
        self._hashed = 0
        self._failed = False
        if self._before[0] != size:
            self.close()
            raise FileChanged(path)

    def read(self, part: BlockPart, buffer: memoryview) -> memoryview:
        """Read one part of a large file into a buffer of equal size."""
        try:
            count = os.preadv(self._fd, (buffer,), part.start)
        except OSError as error:
            self._fail()
            raise unreadable(self._path, error) from None
        if count != part.size:
            self._fail()
            raise FileChanged(self._path)
        with self._turn:
            while self._hashed != part.start:
                self._turn.wait(_TURN_S)
                if self._failed or self._stopped():
                    raise FileChanged(self._path) if self._failed else CaptureStopped
        self._digest.update(buffer)
        with self._turn:
            self._hashed += part.size
            self._turn.notify_all()
        return buffer

    def finish(self) -> bytes:
        """Return the digest of the completely read file."""
        after = _signature(os.fstat(self._fd))
        self.close()
        if after != self._before:
            raise FileChanged(self._path)
        return self._digest.digest()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _fail(self) -> None:
        with self._turn:
            self._failed = True
            self._turn.notify_all()


def open_regular(path: str) -> int:
    """Open a regular file for reading."""
    try:
        fd = os.open(path, _FLAGS)
    except OSError as error:
        raise unreadable(path, error) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise EnvironmentUnsupported(
            f"the capture failed because {path} is no longer a regular file",
            hint="run the capture again while no process changes the environment",
        )
    return fd


def unreadable(path: str, error: OSError) -> EnvironmentUnsupported:
    """Return the error for an unreadable file."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return EnvironmentUnsupported(
            f"the file {path} disappeared during the capture",
            hint="run the capture again while no process installs or deletes packages in this environment",
        )
    if isinstance(error, PermissionError):
        return EnvironmentUnsupported(
            f"the capture failed because {path} cannot be read: {error.strerror}",
            hint=f"make the file readable (chmod u+r {path!r}), remove the file, or list a code file in .sgpuignore",
        )
    return EnvironmentUnsupported(
        f"the capture failed because {path} cannot be read: {error.strerror or error}",
        hint="check the disk that contains the file, then run the capture again",
    )


def unsteady(path: str) -> EnvironmentUnsupported:
    """Return the error for a file that changes during every read."""
    return EnvironmentUnsupported(
        f"the capture failed because {path} changes during every read",
        hint="stop the process that writes to the file, or move the file out of the environment or code directory",
    )


def _read_steady(path: str, size: int) -> bytes:
    """Return the content of a file that keeps the expected size and does not change during the read."""
    for _ in range(TRIES_MAX):
        fd = open_regular(path)
        try:
            before = os.fstat(fd)
            if before.st_size != size:
                raise FileChanged(path)
            data = os.read(fd, size + 1)
            after = os.fstat(fd)
        except OSError as error:
            raise unreadable(path, error) from None
        finally:
            os.close(fd)
        if _signature(before) == _signature(after) and len(data) == size:
            return data
    raise unsteady(path)


def _signature(seen: os.stat_result) -> tuple[int, int, int]:
    return seen.st_size, seen.st_mtime_ns, seen.st_ino


def true_sizes(rows: Sequence[FileRow], files: Mapping[int, str], texts: Mapping[int, bytes]) -> list[FileRow]:
    """Return the rows with current file sizes, and a digest of zeros for each changed file."""
    fresh = list(rows)
    for index, row in enumerate(rows):
        if not row.has_content:
            continue
        try:
            size = len(texts[index]) if index in texts else os.stat(files[index]).st_size
        except OSError as error:
            raise unreadable(files[index], error) from None
        if size != row.size:
            fresh[index] = msgspec.structs.replace(row, size=size, sha256=bytes(32))
    return fresh
