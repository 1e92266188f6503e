"""Removes altered objects from a store, so that the next capture stores them again.

    a snapshot, unit or pack does not match its name, even when it is read again: delete it
    a unit points at a missing or altered pack: delete the unit, before the pack
    a unit points at packs with other content than its rows: delete the unit

A server repairs its own store (`Store.repair`), because the server's clients may not remove objects. A server checks
the reported objects itself instead of trusting its clients. A repair deletes only objects that no restore can use. An
object's name is the digest of its content, so a client with the content can store the object again. A repair keeps the
snapshots that list a deleted unit. A snapshot with a deleted unit is complete again once a client has stored the unit
again.

A unit's address depends on its rows, but not on its packs. A unit with a correct address may therefore refer to packs
with different content. No restore can use a unit with the wrong packs, even if each pack matches its name. Only
`check_content` detects units with the wrong packs. The content check reads each pack once, in the order of the capture,
with one pack in memory at a time.

Failure cases: If the store is read-only, the error's hint names the altered objects. `ContentMismatch` names the first
row whose content differs.
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
"""Maximum number of extra pack reads per check, beyond one read per pack.

The check rejects units whose blocks alternate between packs.
"""
ReadPack = Callable[[str, int], bytes]
"""Callback that returns the first bytes of a pack. The callback's arguments are the pack's digest and the number of
bytes."""
NAMED_MAX = 3
_AGAIN = "to send these objects again, run `sgpu env capture` on the machine where the environment is installed"


class ContentMismatch(Exception):
    """The packs' content does not match the unit's rows."""


class _Part(NamedTuple):
    """A part of a file in a block: bytes `start` to `end`, and True for the last part of the file."""

    row: FileRow
    start: int
    end: int
    is_last: bool = True


def check_content(unit: Unit, read: ReadPack) -> None:
    """Compare a unit's whole content with its rows.

    Raises ContentMismatch: the content of a row differs, or a block cannot be read.
    """
    parts = _parts_by_block(unit)
    extents: dict[int, int] = defaultdict(int)
    for index in parts:
        block = unit.blocks[index]
        extents[block.pack] = max(extents[block.pack], block.offset + block.length)
    pack, data, reads = -1, memoryview(b""), 0
    digest = hashlib.sha256()  # Digest of the current file, whose content may fill several consecutive blocks.
    for index in sorted(parts):
        block = unit.blocks[index]
        if block.pack != pack:
            reads += 1
            if reads > len(extents) + PACK_READS_FREE:
                raise ContentMismatch("the unit's blocks alternate between packs")
            data = memoryview(b"")  # This assignment first frees the previous pack, so only one pack is in memory.
            pack, data = block.pack, memoryview(read(unit.packs[block.pack], extents[block.pack]))
        content = _content(data[block.offset : block.offset + block.length], block.size, parts[index][0].row)
        for part in parts[index]:
            digest.update(content[part.start : part.end])
            if not part.is_last:
                continue
            if digest.digest() != part.row.sha256:
                raise ContentMismatch(f"the unit's packs do not have the content of {part.row.path!r}")
            digest = hashlib.sha256()


def _content(frame: memoryview, size: int, row: FileRow) -> memoryview:
    try:
        content = decompress(frame, size)
    except EnvironmentRejected as error:
        raise ContentMismatch(f"the content of {row.path!r} cannot be read: {error.message}") from None
    if len(content) != size:
        raise ContentMismatch(f"the block of {row.path!r} has {len(content)} bytes instead of {size}")
    return memoryview(content)


def _parts_by_block(unit: Unit) -> Mapping[int, list[_Part]]:
    """Return the file parts in each block. Like a restore, the function skips blocks without a file."""
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
    """Return a snapshot, or remove the snapshot from the store if it is altered."""
    try:
        return blobs.read_snapshot(address)
    except EnvironmentCorrupt as error:
        key = f"snapshots/{address}"
        raise _explained(error, _repaired(blobs, [key]), blobs, [key]) from None


def error_after_repair(error: EnvironmentProblem, blobs: StoreBlobs, addresses: Iterable[str]) -> EnvironmentProblem:
    """Remove altered objects among a snapshot's units and packs, and return the error to raise.

    `error` is the failed fetch's error about a missing or altered object.
    """
    wanted = tuple(addresses)
    try:
        removed = _repaired(blobs, [f"units/{address}" for address in wanted])
        bad = damaged(blobs, wanted) if removed is None else ()
    except EnvironmentProblem:
        return error  # The server does not answer the repair request.
    return _explained(error, removed, blobs, bad) if removed or bad else error


def repair_units(blobs: StoreBlobs, addresses: Iterable[str]) -> tuple[str, ...]:
    """Check the stored objects of some units, and remove objects that no restore can use.

    Raises StoreUnavailable: the store does not answer, or is read-only.
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
    """Return the keys of unusable objects in their deletion order, units before packs.

    `check` raises `ContentMismatch` if the content of a unit with intact packs differs from the unit's rows.
    """
    units: list[str] = []
    packs: dict[str, str] = {}  # Maps each pack digest to "", "altered" or "missing".
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
    """Return True if a unit's intact packs contain the content of its rows."""
    try:
        check(unit, lambda digest, length: blobs.read_range(digest, 0, length))
    except (ContentMismatch, EnvironmentCorrupt):
        return False
    return True


def _repaired(blobs: StoreBlobs, keys: Collection[str]) -> tuple[str, ...] | None:
    """Return the keys that the server has removed, or None if the caller must remove objects."""
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
    """Return the error to raise, with a hint about the removed objects."""
    bad = list(found if removed is None else removed)
    if not bad:
        return error
    few = ", ".join(key[: key.index("/") + 13] for key in bad[:NAMED_MAX])
    more = f" and {len(bad) - NAMED_MAX} more" if len(bad) > NAMED_MAX else ""
    try:
        if removed is None:
            blobs.remove(bad)
    except ServerlessGpuError as problem:
        hint = (
            f"remove {few}{more} from the store as another user, because this user cannot ({problem.message}); {_AGAIN}"
        )
    else:
        hint = f"removed from the store: {few}{more}; {_AGAIN}. If objects are altered again, check the store's disk"
    return type(error)(error.message, hint=hint)
