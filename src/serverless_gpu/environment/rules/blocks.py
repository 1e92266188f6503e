"""Rules of packs, blocks and places: each file has one place, nothing overlaps, nothing becomes too much.

Because no two blocks share a byte of a pack and no two files a byte of a block, the content of a unit is bounded by
what was really sent, times the ratio that is allowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from serverless_gpu.environment.documents import BLOCK_BYTES, ContentPlace, FileRow, PackBlock, Unit
from serverless_gpu.environment.rules.rows import (
    BLOCKS_MAX,
    FREE_RATIO_BYTES,
    PACK_BYTES_MAX,
    PACKS_MAX,
    RATIO_MAX,
    refuse,
)


def check_blocks(unit: Unit, what: str) -> None:
    """Check where the bytes of a unit lie.

    Args:
        unit: with rows that are checked already.
        what: the unit, for the error.

    Raises:
        EnvironmentRejected: a block or a place is wrong, or the unit would become too large.
    """
    if len(unit.packs) > PACKS_MAX or len(unit.blocks) > BLOCKS_MAX:
        refuse(what, "", f"it has at most {PACKS_MAX} packs and {BLOCKS_MAX} blocks")
    for index, block in enumerate(unit.blocks):
        _check_block(index, block, len(unit.packs), what)
    _check_overlap(unit.blocks, what)
    filled = [row for row in unit.rows if row.has_content and row.size]
    if len(filled) != len(unit.places):
        refuse(what, "", f"it has {len(unit.places)} places for {len(filled)} files that are not empty")
    _check_places(filled, unit.places, unit.blocks, what)
    _check_ratio(unit, sum(row.size for row in filled), what)


def _check_ratio(unit: Unit, content_bytes: int, what: str) -> None:
    """Check that a few bytes do not become very many."""
    # Two packs of the same bytes are one in the store (a file may repeat itself): counted once.
    first = {digest: index for index, digest in reversed(list(enumerate(unit.packs)))}
    once = set(first.values())
    sent = sum(block.length for block in unit.blocks if block.pack in once)
    made = sum(block.size for block in unit.blocks)
    if made > RATIO_MAX * sent + FREE_RATIO_BYTES:
        rule = f"{sent} bytes would become {made}; {RATIO_MAX} for each, and {FREE_RATIO_BYTES} more, are allowed"
        refuse(what, "", rule)
    # What is decompressed and thrown away costs time, too. An edited unit may leave half of its old packs unused.
    if made > 4 * content_bytes + FREE_RATIO_BYTES:
        refuse(what, "", f"its blocks hold {made} bytes, far more than the {content_bytes} of its files")


def _check_block(index: int, block: PackBlock, packs: int, what: str) -> None:
    name = f"block {index}"
    if not 0 <= block.pack < packs:
        refuse(what, name, f"it lies in pack {block.pack} of {packs}")
    if not 0 < block.size <= BLOCK_BYTES:
        refuse(what, name, f"a block holds 1 to {BLOCK_BYTES} bytes, not {block.size}")
    if block.offset < 0 or block.length < 1 or block.offset + block.length > PACK_BYTES_MAX:
        refuse(what, name, f"it lies outside its pack, at {block.offset} with {block.length} bytes")


def _check_overlap(blocks: Sequence[PackBlock], what: str) -> None:
    pack, end = -1, 0
    for index in sorted(range(len(blocks)), key=lambda index: (blocks[index].pack, blocks[index].offset)):
        block = blocks[index]
        if block.pack == pack and block.offset < end:
            refuse(what, f"block {index}", "two blocks share bytes of a pack")
        pack, end = block.pack, block.offset + block.length


def _check_places(
    filled: Sequence[FileRow], places: Sequence[ContentPlace], blocks: Sequence[PackBlock], what: str
) -> None:
    parts: list[tuple[int, int, int, str]] = []  # block, start, end, path: what each file takes
    for row, place in zip(filled, places, strict=True):
        if not 0 <= place.block < len(blocks) or place.start < 0:
            refuse(what, row.path, f"its place is block {place.block} of {len(blocks)}, byte {place.start}")
        block = blocks[place.block]
        if place.start + row.size <= block.size:
            parts.append((place.block, place.start, place.start + row.size, row.path))
            continue
        if place.start:
            refuse(what, row.path, "a file that ends outside its block starts at the block's first byte")
        parts += _run(row, place.block, blocks, what)
    parts.sort()
    for before, part in itertools.pairwise(parts):
        if before[0] == part[0] and before[2] > part[1]:
            refuse(what, part[3], f"it shares bytes with {before[3]!r}")


def _run(row: FileRow, first: int, blocks: Sequence[PackBlock], what: str) -> list[tuple[int, int, int, str]]:
    """Return the blocks that a large file fills."""
    parts, left, index = [], row.size, first
    while left:
        if index >= len(blocks):
            refuse(what, row.path, "it goes on after the last block")
        size = blocks[index].size
        if size > left:
            refuse(what, row.path, "the blocks of a large file hold nothing else")
        parts.append((index, 0, size, row.path))
        left, index = left - size, index + 1
    return parts
