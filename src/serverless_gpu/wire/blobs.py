"""Defines bodies for parts of payloads and outputs, and for objects of captured environments.

    POST /blobs/missing        DigestList → DigestList      the parts that the client must send
    PUT  /blobs/{digest}       bytes, up to BLOB_PART_BYTES → 204; durable, and checked against its name (BLAKE3)

A client sends a blob in parts, and a list of the parts identifies the blob (`BlobReference`). An interrupted upload
therefore continues with the missing parts. No route returns a part by its digest. Nodes read payloads through the
attempt, and clients read outputs through the run. The server keeps digests secret, because a run whose payload names a
digest gets the bytes of the part.

    GET    /environments/objects/{key}?start&length          → bytes
    PUT    /environments/objects/{key}                       bytes → 204
    POST   /environments/present         KeyList → KeyList   the existing keys
    POST   /environments/repair          KeyList → KeyList   checks keys; removes and returns unusable objects
    POST   /environments/condemned       KeyList → CondemnedAnswer             the condemned keys
    GET    /environments/list/{prefix}                       → StoredList      (operators)
    POST   /environments/delete          KeyList → 204                         (operators)
    GET    /environments/free                                → Free

Keys have the form of `environment.stores.base`. A caller with a key can read the key's object, so only operators may
list keys. Only operators read the records of garbage collection (`gc/…`).
"""

from __future__ import annotations

from serverless_gpu.wire.base import Answer, Request

NAMES_MAX = 10_000
"""Maximum number of digests or keys in one request."""


class DigestList(Request, frozen=True, kw_only=True):
    """A list of BLAKE3 digests of payload parts."""

    digests: tuple[str, ...]


class KeyList(Request, frozen=True, kw_only=True):
    """A list of keys in an environment store."""

    keys: tuple[str, ...]


class CondemnedAnswer(Answer, frozen=True, kw_only=True):
    """The state of garbage collection for the requested keys.

    Attributes:
        keys: condemned keys, whose objects garbage collection will delete.
        collecting: True if garbage collection may be deleting objects now.
    """

    keys: tuple[str, ...]
    collecting: bool


class StoredView(Answer, frozen=True, kw_only=True):
    """The key and the properties of one object in an environment store."""

    key: str
    size: int
    put_ns: int


class StoredList(Answer, frozen=True, kw_only=True):
    """A list of objects in an environment store."""

    objects: tuple[StoredView, ...]


class Free(Answer, frozen=True, kw_only=True):
    """Free space of the environment store in bytes, or None if unknown."""

    bytes: int | None
