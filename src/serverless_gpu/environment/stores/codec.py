"""Encodes a store's objects as bytes, and decodes them strictly.

    bytes ─▶ decoded strictly, within limits ─▶ its own rules ─▶ its address ─▶ Snapshot, Unit, pack

A document is stored as msgpack in one zstd frame with a checksum. A pack is a named byte string.

Decoding is strict, because a decoded document must encode to the same bytes again. A document therefore has exactly one
encoded form, without unknown fields. The decoder checks sizes before it creates any values: For example, 100 MB of
zeros compress to 10 kB. In memory, 30 million empty lists need 2 GB. The encoder enforces the same limits as the
decoder.

Store readers use this module. A server also uses this module to store its clients' objects.

Failure cases: If an object's bytes do not match its name, the codec raises `AlteredObject`, because another copy may be
right. If matching bytes break a rule or have an unknown version, the codec raises `EnvironmentRejected`, because every
copy is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from blake3 import blake3

from serverless_gpu.environment.compression import LEVEL_REMOTE, compress, decompress
from serverless_gpu.environment.documents import (
    SNAPSHOT_VERSION,
    VERSION,
    Snapshot,
    Unit,
    snapshot_address,
    unit_address,
)
from serverless_gpu.environment.snapshot_validation import check_snapshot, check_unit
from serverless_gpu.errors import EnvironmentRejected
from serverless_gpu.json_codec import from_msgpack

DOCUMENT_BYTES_MAX = 256 * 1024 * 1024
"""Maximum size of a document in bytes before compression: a million rows of 250 bytes."""
SNAPSHOT_BYTES_MAX = 32 * 1024 * 1024
"""Maximum size of a snapshot in bytes before compression: thousands of units, and facts about 100,000s of modules."""
SNAPSHOT_VALUES_MAX = 1_000_000
"""Maximum number of values in a snapshot, at any depth. The decoder has no separate limits for lists and maps."""
ITEMS_MAX = 1_000_000
"""Maximum number of items of one kind in a document, for example rows, packs or blocks."""
_Document = TypeVar("_Document", bound=msgspec.Struct)
_FIXED = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_LISTS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
_ANOTHER = "its content does not match its address"


class _Shape(msgspec.Struct):
    """Document fields that the decoder checks first. Every kind of document has some of the listed fields."""

    version: int = 0
    rows: msgspec.Raw = msgspec.Raw()
    packs: msgspec.Raw = msgspec.Raw()
    blocks: msgspec.Raw = msgspec.Raw()
    places: msgspec.Raw = msgspec.Raw()
    roots: msgspec.Raw = msgspec.Raw()
    entries: msgspec.Raw = msgspec.Raw()


def encode(document: msgspec.Struct) -> bytes:
    """Encode a document in the form in which a store keeps it."""
    content = msgspec.msgpack.encode(document)
    if isinstance(document, Snapshot):
        what = f"snapshot {document.address[:12]}"
        if len(content) > SNAPSHOT_BYTES_MAX:
            raise EnvironmentRejected(f"{what} has {len(content)} bytes, but at most {SNAPSHOT_BYTES_MAX} are allowed")
        _check_values(content, what)
    return compress(content, LEVEL_REMOTE)


def decode(data: bytes, kind: type[_Document], what: str) -> _Document:
    """Decode a document from its stored form, without checking the rules of its kind."""
    content = decompress(data, SNAPSHOT_BYTES_MAX if kind is Snapshot else DOCUMENT_BYTES_MAX)
    try:
        if kind is Snapshot:
            _check_values(content, what)
        _check_shape(from_msgpack(content, _Shape), what, SNAPSHOT_VERSION if kind is Snapshot else VERSION)
        document = from_msgpack(content, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EnvironmentRejected(f"{what} cannot be read: {error}") from None
    if msgspec.msgpack.encode(document) != content:
        raise EnvironmentRejected(f"{what} has unknown fields")
    return document


def _check_shape(shape: _Shape, what: str, newest: int) -> None:
    if not 1 <= shape.version <= newest:
        raise EnvironmentRejected(
            f"{what} has format version {shape.version}, but this program reads version {newest}",
            hint="another version wrote this object; upgrade serverless-gpu: `pip install --upgrade serverless-gpu`",
        )
    for name in ("rows", "packs", "blocks", "places", "roots", "entries"):
        if (count := _items(bytes(memoryview(getattr(shape, name))[:5]))) > ITEMS_MAX:
            raise EnvironmentRejected(f"{what} has {count} {name}, but at most {ITEMS_MAX} are allowed")


def _items(head: bytes) -> int:
    """Return the length of a msgpack array from its first bytes, or 0 for any other value."""
    if head[:1] == b"\xdd":
        return int.from_bytes(head[1:5], "big")
    if head[:1] == b"\xdc":
        return int.from_bytes(head[1:3], "big")
    return 0


def _check_values(content: bytes, what: str) -> None:
    """Reject a document with too many values, without creating any of the values."""
    if len(content) <= SNAPSHOT_VALUES_MAX:
        return  # Each msgpack value takes at least one byte.
    values, left, at = 0, 1, 0
    while left:
        values, left = values + 1, left - 1
        if values > SNAPSHOT_VALUES_MAX:
            raise EnvironmentRejected(f"{what} has more than {SNAPSHOT_VALUES_MAX} values")
        size, inside = _value(content, at)
        at, left = at + size, left + inside
        if left > len(content) - at:
            raise EnvironmentRejected(f"{what} cannot be read: its data ends early")


def _value(content: bytes, at: int) -> tuple[int, int]:
    """Return the size of a msgpack value's own bytes, and the number of values directly inside."""
    first = content[at]
    if 0xA0 <= first <= 0xBF:  # first byte of a short text, the most frequent kind of value
        return 1 + (first & 0x1F), 0
    if 0x80 <= first <= 0x8F:
        return 1, 2 * (first & 0x0F)
    if 0x90 <= first <= 0x9F:
        return 1, first & 0x0F
    if first in _BYTES:
        digits = _BYTES[first]
        return 1 + digits + int.from_bytes(content[at + 1 : at + 1 + digits], "big"), 0
    if first in _LISTS:
        digits, each = _LISTS[first]
        return 1 + digits, each * int.from_bytes(content[at + 1 : at + 1 + digits], "big")
    return _FIXED.get(first, 1), 0  # The decoder rejects msgpack types that this package never writes.


class AlteredObject(Exception):
    """An object's bytes do not match its address."""


def snapshot_of(data: bytes, address: str) -> Snapshot:
    """Decode and check the snapshot with an address."""
    snapshot = document_of(data, Snapshot, f"snapshot {address[:12]}")
    _obey(lambda: check_snapshot(snapshot), lambda: snapshot_address(snapshot) == address)
    if snapshot.address != address:
        raise AlteredObject(_ANOTHER)
    return snapshot


def unit_of(data: bytes, address: str) -> Unit:
    """Decode and check the unit with an address."""
    unit = document_of(data, Unit, f"unit {address[:12]}")
    _obey(lambda: check_unit(unit), lambda: unit_address(unit.rows) == address)
    if unit.address != address:
        raise AlteredObject(_ANOTHER)
    return unit


def pack_of(data: bytes | memoryview, digest: str) -> None:
    """Raise `AlteredObject` if the bytes are not the pack with this name."""
    if blake3(data).hexdigest() != digest:
        raise AlteredObject(_ANOTHER)


def document_of(data: bytes, kind: type[_Document], what: str) -> _Document:
    """Decode a document whose rules and address are not checked yet."""
    try:
        return decode(data, kind, what)
    except EnvironmentRejected as error:
        # If the error has a hint, another version wrote the document. Any other unreadable document is an altered
        # document.
        raise (error if error.hint else AlteredObject(error.message)) from None


def _obey(check: Callable[[], None], is_itself: Callable[[], bool]) -> None:
    try:
        check()
    except EnvironmentRejected:
        if is_itself():
            raise  # The stored document is unaltered, because its writer already broke the rule.
        raise AlteredObject(_ANOTHER) from None
