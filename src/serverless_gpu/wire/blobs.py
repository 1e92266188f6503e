"""Bytes: parts of payloads and outputs, and the objects of captured environments.

    POST /blobs/missing        DigestList → DigestList      which of these parts have to be sent
    PUT  /blobs/{digest}       bytes, up to BLOB_PART_BYTES → 204; durable, and checked against its name (BLAKE3)

A blob is sent as parts and named by the list of them (`BlobReference`), so an upload that breaks off goes on with the
parts that are missing. No route gives a part by its digest: payloads are read through their attempt, outputs through
their run. But a run that names parts as its payload gets their bytes, so the server shows no digests.

    GET    /environments/objects/{key}?start&length          → bytes
    PUT    /environments/objects/{key}                       bytes → 204
    POST   /environments/present         KeyList → KeyList   which of these are there
    POST   /environments/repair          KeyList → KeyList   check these; what no restore can use is removed, and named
    POST   /environments/condemned       KeyList → CondemnedAnswer             which of these are condemned
    GET    /environments/list/{prefix}                       → StoredList      (operators)
    POST   /environments/delete          KeyList → 204                         (operators)
    GET    /environments/free                                → Free

Keys are those of `environment.stores.base`. A key is all it takes to read an object, so no route lists keys to members:
what garbage collection noted (`gc/…`) is read by operators, too.
"""

from __future__ import annotations

from serverless_gpu.wire.base import Answer, Request

NAMES_MAX = 10_000
"""Digests or keys in one request."""


class DigestList(Request, frozen=True, kw_only=True):
    """Digests of parts."""

    digests: tuple[str, ...]


class KeyList(Request, frozen=True, kw_only=True):
    """Keys of a store."""

    keys: tuple[str, ...]


class CondemnedAnswer(Answer, frozen=True, kw_only=True):
    """What garbage collection is about to do with the keys that were asked about.

    Attributes:
        keys: those that are condemned.
        collecting: whether a collection may be deleting at this moment.
    """

    keys: tuple[str, ...]
    collecting: bool


class StoredView(Answer, frozen=True, kw_only=True):
    """One object of a store."""

    key: str
    size: int
    put_ns: int


class StoredList(Answer, frozen=True, kw_only=True):
    """Objects of a store."""

    objects: tuple[StoredView, ...]


class Free(Answer, frozen=True, kw_only=True):
    """How much more fits, or None where that is not known."""

    bytes: int | None
