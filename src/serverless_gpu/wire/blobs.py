"""Defines bodies for parts of payloads and outputs, and for objects of captured environments.

    POST /blobs/missing        DigestList → DigestList      the parts that the client must send
    PUT  /blobs/{digest}       bytes, up to BLOB_PART_BYTES → 204; durable, and checked against its name (BLAKE3)

A client uploads a blob in parts, so that an interrupted upload can continue with the missing parts. A `BlobReference`
lists the parts of a blob. No route returns a blob part by its digest alone. Nodes read payloads through routes of the
attempt. Clients read outputs through routes of the run. The server keeps digests secret, because any run whose payload
names a digest can read the part.

    GET    /environments/objects/{key}?start&length          → bytes
    PUT    /environments/objects/{key}                       bytes → 204
    POST   /environments/present         KeyList → KeyList   the existing keys
    POST   /environments/repair          KeyList → KeyList   checks keys; removes and returns unusable objects
    POST   /environments/condemned       KeyList → CondemnedAnswer             the condemned keys
    GET    /environments/list/{prefix}                       → StoredList      (operators)
    POST   /environments/delete          KeyList → 204                         (operators)
    GET    /environments/free                                → Free

Object keys have the format that `environment.stores.base` defines. Any caller with a key can read the object, so only
operators may list keys. Only operators read the records of garbage collection (`gc/…`).
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
    """The garbage-collection state of the requested keys.

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
    """The free space of the environment store in bytes, or None if unknown."""

    bytes: int | None
