"""Removes from a store what it holds altered: then it counts as missing, and the next capture sends it again.

    a snapshot, unit or pack is not what its name says, also when it was read again: deleted
    a unit points at a pack that is not there, or not right: the unit is deleted, before the pack
    a unit points at packs that hold something else than its rows say: the unit is deleted

A server does all of this itself (`Store.repair`): its clients may remove nothing, and it believes only what it finds.
Only what no restore could ever use is deleted: the name of an object is the digest of its content, so a client that has
the content can put it there again. The snapshot that lists such a unit stays: it is whole again once the unit is.

A unit's address covers its rows and says nothing about the packs that it points into. So a unit whose address is right
may point at packs that hold something else: each pack is what its name says, and no restore can use the unit. Only a
look at the content tells (`check_content`). It reads each pack once, in the order in which a capture fills them, with
one pack in memory at a time.

Failure cases: the store does not let itself be changed (said in the hint, the objects are named); `ContentMismatch`
names the first row whose bytes are others.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from serverless_gpu.environment.compression import decompress
from serverless_gpu.environment.documents import FileRow, Snapshot, Unit
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.errors import (
    EnvironmentCorrupt,
    EnvironmentMissing,
    EnvironmentProblem,
    EnvironmentRejected,
    ServerlessGpuError,
)

PACK_READS_FREE = 16
"""How many more packs are read than a unit has; a unit whose blocks jump between packs is refused."""
ReadPack = Callable[[str, int], bytes]
"""Returns the beginning of a pack: its digest, and how many bytes are needed."""
NAMED_MAX = 3
_AGAIN = "where it is installed, `sgpu env capture` sends that again"


class ContentMismatch(Exception):
    """Packs do not hold what the rows of a unit say."""


class _Part(NamedTuple):
    """What a block holds of a file: its bytes from `start` to `end`, and whether the file ends there."""

    row: FileRow
    start: int
    end: int
    is_last: bool = True


def check_content(unit: Unit, read: ReadPack) -> None:
    """Compare all content of a unit with its rows.

    Raises Unequal: a row's bytes are others, or a block cannot be read.
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
                raise ContentMismatch("its blocks jump between its packs")
            data = memoryview(b"")  # one pack in memory, not two
            pack, data = block.pack, memoryview(read(unit.packs[block.pack], extents[block.pack]))
        content = _content(data[block.offset : block.offset + block.length], block.size, parts[index][0].row)
        for part in parts[index]:
            digest.update(content[part.start : part.end])
            if not part.is_last:
                continue
            if digest.digest() != part.row.sha256:
                raise ContentMismatch(f"its packs hold other bytes than {part.row.path!r} has")
            digest = hashlib.sha256()


def _content(frame: memoryview, size: int, row: FileRow) -> memoryview:
    try:
        content = decompress(frame, size)
    except EnvironmentRejected as error:
        raise ContentMismatch(f"the bytes of {row.path!r} cannot be read: {error.message}") from None
    if len(content) != size:
        raise ContentMismatch(f"the block of {row.path!r} holds {len(content)} bytes instead of {size}")
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


def read_snapshot(blobs: StoreBlobs, address: str) -> Snapshot:
    """Return a snapshot; what is not what its address says is removed from the store."""
    try:
        return blobs.read_snapshot(address)
    except EnvironmentCorrupt as error:
        key = f"snapshots/{address}"
        raise _explained(error, _repaired(blobs, [key]), blobs, [key]) from None


def error_after_repair(error: EnvironmentProblem, blobs: StoreBlobs, addresses: Iterable[str]) -> EnvironmentProblem:
    """Look at all that units need in a store, remove what is altered, and return the error to raise.

    `error` is what was raised when they were fetched: something is altered, or missing.
    """
    wanted = tuple(addresses)
    try:
        removed = _repaired(blobs, [f"units/{address}" for address in wanted])
        bad = damaged(blobs, wanted) if removed is None else ()
    except EnvironmentProblem:
        return error  # it stopped to answer
    return _explained(error, removed, blobs, bad) if removed or bad else error


def repair_units(blobs: StoreBlobs, addresses: Iterable[str]) -> tuple[str, ...]:
    """Check all that units need in a store, and remove what no restore can use.

    Raises StoreUnavailable: the store does not answer, or does not let itself be changed.
    """
    wanted = tuple(addresses)
    removed = _repaired(blobs, [f"units/{address}" for address in wanted])
    if removed is None:
        removed = damaged(blobs, wanted)
        blobs.remove(removed)
    return removed


def damaged(
    blobs: StoreBlobs, addresses: Iterable[str], check: Callable[[Unit, ReadPack], None] = check_content
) -> tuple[str, ...]:
    """Return the keys of what no restore can use, in the order in which it may be deleted: units, then packs.

    `check` compares the content of a unit whose packs are whole with its rows; it raises `ContentMismatch`.
    """
    units: list[str] = []
    packs: dict[str, str] = {}  # digest → "", "altered" or "missing"
    for address in addresses:
        try:
            unit = blobs.read_unit(address)
        except EnvironmentCorrupt:
            units.append(f"units/{address}")
            continue
        except EnvironmentMissing:
            continue
        for digest in unit.packs:
            if digest not in packs:
                packs[digest] = _state(blobs, digest)
        if any(packs[digest] for digest in unit.packs) or not _holds(blobs, unit, check):
            units.append(f"units/{address}")
    return (*units, *(f"packs/{digest}" for digest, state in packs.items() if state == "altered"))


def _holds(blobs: StoreBlobs, unit: Unit, check: Callable[[Unit, ReadPack], None]) -> bool:
    """Return whether packs that are what their names say hold what a unit's rows say."""
    try:
        check(unit, lambda digest, length: blobs.read_range(digest, 0, length))
    except (ContentMismatch, EnvironmentCorrupt):
        return False
    return True


def _repaired(blobs: StoreBlobs, keys: Collection[str]) -> tuple[str, ...] | None:
    """Return what a store has removed by itself; None where that is left to us."""
    removed = blobs.store.repair(keys)
    if removed:
        blobs.forget(removed)
    return removed


def _state(blobs: StoreBlobs, digest: str) -> str:
    try:
        blobs.read_pack(digest)
    except EnvironmentCorrupt:
        return "altered"
    except EnvironmentMissing:
        return "missing"
    return ""


def _explained(
    error: EnvironmentProblem, removed: Collection[str] | None, blobs: StoreBlobs, found: Collection[str]
) -> EnvironmentProblem:
    """Return the error to raise, with what the store has removed by itself, or what was found and is removed now."""
    bad = list(found if removed is None else removed)
    if not bad:
        return error
    few = ", ".join(key[: key.index("/") + 13] for key in bad[:NAMED_MAX])
    more = f" and {len(bad) - NAMED_MAX} more" if len(bad) > NAMED_MAX else ""
    try:
        if removed is None:
            blobs.remove(bad)
    except ServerlessGpuError as problem:
        hint = f"remove {few}{more} from the store, which this user cannot ({problem.message}); {_AGAIN}"
    else:
        hint = f"removed from the store: {few}{more}; {_AGAIN}. If it comes back, look at the disk of the store"
    return type(error)(error.message, hint=hint)
