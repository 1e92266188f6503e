"""Units, snapshots and the list of the condemned as bytes: msgpack in one zstd frame with a checksum.

Decoding is strict: what comes out, encoded again, must be the same bytes, so a document has no field that nobody
looks at, and no two forms. Sizes are checked before anything is made of them: 100 MB of nothing compress to 10 kB.

Failure: `EnvironmentRejected`, also for a version of the format that this program does not know.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from serverless_gpu.environment.compression import LEVEL_REMOTE, compress, decompress
from serverless_gpu.environment.documents import VERSION
from serverless_gpu.errors import EnvironmentRejected

DOCUMENT_BYTES_MAX = 256 * 1024 * 1024
"""Most bytes of a document before compression: a million rows of 250 bytes."""
ITEMS_MAX = 1_000_000
"""Most rows, packs, blocks, places or other items of one kind."""

_Document = TypeVar("_Document", bound=msgspec.Struct)


class _Shape(msgspec.Struct):
    """What is looked at before the rest is decoded; a document has some of it."""

    version: int = 0
    rows: msgspec.Raw = msgspec.Raw()
    packs: msgspec.Raw = msgspec.Raw()
    blocks: msgspec.Raw = msgspec.Raw()
    places: msgspec.Raw = msgspec.Raw()
    roots: msgspec.Raw = msgspec.Raw()
    entries: msgspec.Raw = msgspec.Raw()


def encode(document: msgspec.Struct) -> bytes:
    """Return a document as it is stored."""
    return compress(msgspec.msgpack.encode(document), LEVEL_REMOTE)


def decode(data: bytes, kind: type[_Document], what: str) -> _Document:
    """Return a document from its stored form; its own rules are not checked here.

    Args:
        data: what the store had.
        kind: `Unit`, `Snapshot` or another struct with a version.
        what: how a message names it.

    Raises:
        EnvironmentRejected: it is none, or of a version that is not known here.
    """
    content = decompress(data, DOCUMENT_BYTES_MAX)
    try:
        _check_shape(msgspec.msgpack.decode(content, type=_Shape), what)
        document = msgspec.msgpack.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EnvironmentRejected(f"{what} cannot be read: {error}") from None
    if msgspec.msgpack.encode(document) != content:
        raise EnvironmentRejected(f"{what} has parts that do not belong there")
    return document


def _check_shape(shape: _Shape, what: str) -> None:
    if shape.version != VERSION:
        raise EnvironmentRejected(
            f"{what} is in version {shape.version} of the format, and this program reads version {VERSION}",
            hint="it was written by another version of serverless-gpu: `pip install --upgrade serverless-gpu`",
        )
    for name in ("rows", "packs", "blocks", "places", "roots", "entries"):
        if (count := _items(bytes(memoryview(getattr(shape, name))[:5]))) > ITEMS_MAX:
            raise EnvironmentRejected(f"{what} has {count} {name}, and {ITEMS_MAX} are the most")


def _items(head: bytes) -> int:
    """Return how many items an array in msgpack says it has, from its first bytes; 0 for anything else."""
    if head[:1] == b"\xdd":
        return int.from_bytes(head[1:5], "big")
    if head[:1] == b"\xdc":
        return int.from_bytes(head[1:3], "big")
    return 0
