"""Verifies that packs hold the bytes that a unit's rows promise, one pack in memory at a time.

A unit's address covers its rows and says nothing about the packs that it points into. So a unit whose address is right
may point at packs that hold something else: each pack is what its name says, and no restore can use the unit. Only a
look at the content tells. It reads each pack once, in the order in which a capture fills them.

Failure: `Unequal` names the first row whose bytes are others. What `read` raises goes through.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from serverless_gpu.environment.compression import decompress
from serverless_gpu.environment.documents import FileRow, Unit
from serverless_gpu.errors import EnvironmentRejected

PACK_READS_FREE = 16
"""How many more packs are read than a unit has; a unit whose blocks jump between packs is refused."""

ReadPack = Callable[[str, int], bytes]
"""Returns the beginning of a pack: its digest, and how many bytes are needed."""


class Unequal(Exception):
    """Packs do not hold what the rows of a unit say."""


class _Part(NamedTuple):
    """What a block holds of a file: its bytes from `start` to `end`, and whether the file ends there."""

    row: FileRow
    start: int
    end: int
    is_last: bool = True


def check_content(unit: Unit, read: ReadPack) -> None:
    """Compare all content of a unit with its rows.

    Raises:
        Unequal: a row's bytes are others, or a block cannot be read.
    """
    parts = _parts_by_block(unit)
    extents: dict[int, int] = defaultdict(int)
    for index in parts:
        block = unit.blocks[index]
        extents[block.pack] = max(extents[block.pack], block.offset + block.length)
    pack, data, reads = -1, memoryview(b""), 0
    digest = hashlib.sha256()  # of the file at hand; one of several blocks fills them one after another
    for index in sorted(parts):
        block = unit.blocks[index]
        if block.pack != pack:
            reads += 1
            if reads > len(extents) + PACK_READS_FREE:
                raise Unequal("its blocks jump between its packs")
            data = memoryview(b"")  # one pack in memory, not two
            pack, data = block.pack, memoryview(read(unit.packs[block.pack], extents[block.pack]))
        content = _content(data[block.offset : block.offset + block.length], block.size, parts[index][0].row)
        for part in parts[index]:
            digest.update(content[part.start : part.end])
            if not part.is_last:
                continue
            if digest.digest() != part.row.sha256:
                raise Unequal(f"its packs hold other bytes than {part.row.path!r} has")
            digest = hashlib.sha256()


def _content(frame: memoryview, size: int, row: FileRow) -> memoryview:
    try:
        content = decompress(frame, size)
    except EnvironmentRejected as error:
        raise Unequal(f"the bytes of {row.path!r} cannot be read: {error.message}") from None
    if len(content) != size:
        raise Unequal(f"the block of {row.path!r} holds {len(content)} bytes instead of {size}")
    return memoryview(content)


def _parts_by_block(unit: Unit) -> Mapping[int, list[_Part]]:
    """Return what the blocks hold, by their index; blocks that no file has are left out, as a restore does."""
    parts: dict[int, list[_Part]] = defaultdict(list)
    filled = (row for row in unit.rows if row.has_content and row.size)
    for row, place in zip(filled, unit.places, strict=True):
        block, size = place.block, unit.blocks[place.block].size
        if place.start + row.size <= size:
            parts[block].append(_Part(row, place.start, place.start + row.size))
            continue
        left = row.size
        while left:
            size = unit.blocks[block].size
            parts[block].append(_Part(row, 0, size, left == size))
            left, block = left - size, block + 1
    return parts
