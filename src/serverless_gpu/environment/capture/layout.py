"""Where the bytes of a unit go, as values: which files share a block, and which old blocks are used again.

    small files   in order of their rows, as many as fit into a block
    large files   blocks of their own, one after another
    old content   where the version before has it: an edited file of torch costs kilobytes, not all of torch

Old packs are kept only while at least half of what they hold is used, and while there are not many times more of them
than anew: so neither the store nor a restore pays for a long history of edits. All of it is pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from serverless_gpu.environment.documents import BLOCK_BYTES, PACK_BYTES, ContentPlace, FileRow, PackBlock, Unit

PACKS_MORE_MAX = 16
"""How many more packs than anew a unit may have before it is packed again."""


class BlockPart(NamedTuple):
    """Bytes of one file in a block: index of its row, where they start in the file, how many."""

    row: int
    start: int
    size: int


class BlockPlan(NamedTuple):
    """What one block holds: all of some small files, or a part of a large one."""

    parts: tuple[BlockPart, ...]
    large: bool = False

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


class Reuse(NamedTuple):
    """What of an older version still serves: packs, their blocks, and places by index of the new row."""

    packs: tuple[str, ...] = ()
    blocks: tuple[PackBlock, ...] = ()
    places: dict[int, ContentPlace] = {}  # noqa: RUF012 - never written to


def plan_blocks(rows: Sequence[FileRow], wanted: Collection[int], block_bytes: int = BLOCK_BYTES) -> list[BlockPlan]:
    """Return the blocks that hold these files, in order.

    Args:
        rows: of the unit.
        wanted: indices of the files that have no place yet, in order; empty ones are read, too, and take no space.
        block_bytes: content of a block.
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
    """Return the places of files by index of their row.

    Args:
        plans: the blocks.
        first: index of the first of them among the blocks of the unit; blocks without content are not counted.
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


def reuse(rows: Sequence[FileRow], old: Unit) -> Reuse:
    """Return which bytes of an older version can stand for files of a new one, or nothing if that is not worth it.

    Args:
        rows: of the new version.
        old: the older one, already checked.
    """
    known = _known(old)
    taken: dict[int, ContentPlace] = {}
    used_blocks: dict[int, int] = defaultdict(int)
    for index, row in enumerate(rows):
        if row.has_content and row.size and (found := known.get((row.sha256, row.size))):
            # Taken once each: two files of one content have two places, as the rules want it.
            taken[index] = place = found.pop()
            for block, size in _spread(place, row.size, old.blocks):
                used_blocks[block] += size
    packs = {old.blocks[block].pack for block in used_blocks}
    kept = [index for index, block in enumerate(old.blocks) if block.pack in packs]
    held = sum(old.blocks[index].length for index in kept)
    used = sum(old.blocks[index].length * size // old.blocks[index].size for index, size in used_blocks.items())
    if not taken or 2 * used < held or len(packs) > PACKS_MORE_MAX + 2 * held // PACK_BYTES:
        return Reuse()
    pack_index = {pack: index for index, pack in enumerate(sorted(packs))}
    block_index = {block: index for index, block in enumerate(kept)}
    return Reuse(
        packs=tuple(old.packs[pack] for pack in pack_index),
        blocks=tuple(
            msgspec.structs.replace(old.blocks[index], pack=pack_index[old.blocks[index].pack]) for index in kept
        ),
        places={row: ContentPlace(block_index[place.block], place.start) for row, place in taken.items()},
    )


def _known(old: Unit) -> dict[tuple[bytes, int], list[ContentPlace]]:
    """Return where each content lies, by digest and size."""
    known: dict[tuple[bytes, int], list[ContentPlace]] = defaultdict(list)
    filled = (row for row in old.rows if row.has_content and row.size)
    for row, place in zip(filled, old.places, strict=True):
        known[row.sha256, row.size].append(place)
    return known


def _spread(place: ContentPlace, size: int, blocks: Sequence[PackBlock]) -> list[tuple[int, int]]:
    """Return the blocks a file lies in, and how many of its bytes each has."""
    if place.start + size <= blocks[place.block].size:
        return [(place.block, size)]
    parts, block, left = [], place.block, size
    while left:
        parts.append((block, blocks[block].size))
        left, block = left - blocks[block].size, block + 1
    return parts
