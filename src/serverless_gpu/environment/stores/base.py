"""Defines the interface of a store: six operations on keys and bytes.

`blobs.py` encodes units, packs and snapshots as bytes for a store. Keys are `packs/<digest>`, `units/<address>`,
`snapshots/<address>`, `gc/condemned` and `gc/collector-<digits>`. A store immediately rejects invalid keys. No key
therefore leads outside of the store. An object becomes visible only after the store has stored all of its bytes.
Putting the same object twice is normal, even from two clients at once.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from serverless_gpu.errors import EnvironmentRejected

OBJECT_BYTES_MAX = 256 * 1024 * 1024
"""Maximum size in bytes of an object in a store."""
PREFIXES = ("packs", "units", "snapshots", "gc")
"""First parts of the keys, one for each kind of object that a store can list."""

_KEY = re.compile(r"(?:packs|units|snapshots)/[0-9a-f]{64}|gc/(?:condemned|collector-[0-9a-f]{32})")


class Stored(NamedTuple):
    """An object in a store: its key, its size in bytes, and the time of the last put (Unix time in ns)."""

    key: str
    size: int
    put_ns: int


class Store(abc.ABC):
    """Stores objects. Several threads and processes may use a store concurrently.

    Every method raises `StoreUnavailable` if the store rejects the request or does not answer in time. Every method
    raises `StorageError` if the store is full.

    Attributes:
        url: the name of the store as a user would type it, without secrets.
    """

    url: str

    @abc.abstractmethod
    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return the bytes of an object, or a range of the bytes.

        Args:
            key: the key of the object.
            start: the first byte.
            length: the number of bytes, or None for all bytes up to the end. The object may end earlier.

        Raises:
            KeyError: the store has no such object.
            EnvironmentRejected: the result would have more than `OBJECT_BYTES_MAX`.
        """

    @abc.abstractmethod
    def put(self, objects: Mapping[str, bytes | memoryview]) -> None:
        """Put objects durably and atomically, replacing existing objects.

        Putting several objects in one call is much faster than several calls. The objects of one call become visible
        separately, in any order. An object that refers to other objects must be in a later call than those objects.
        If the call fails, some of the objects may already exist.

        Args:
            objects: bytes by key.

        Raises:
            EnvironmentRejected: an object is larger than `OBJECT_BYTES_MAX`, or a key is not valid. No object was
                stored.
        """

    @abc.abstractmethod
    def present(self, keys: Collection[str]) -> frozenset[str]:
        """Return the keys of the given objects that exist, without listing the store."""

    @abc.abstractmethod
    def list(self, prefix: str) -> Iterator[Stored]:
        """Return all objects below `prefix/` (one of `PREFIXES`) in any order, for garbage collection only."""

    @abc.abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, ignoring objects that do not exist."""

    @abc.abstractmethod
    def free_bytes(self) -> int | None:
        """Return the free space of the store in bytes, or None if unknown."""

    def repair(self, keys: Collection[str]) -> tuple[str, ...] | None:
        """Check snapshots and units with their content, and remove objects that no restore can use.

        Only a server store supports repairs, because the server's clients may not remove objects.

        Returns:
            The removed keys, or None if the caller must check the objects.
        """
        return None


class CollectionGuard(abc.ABC):
    """A store that reports the garbage collection state of individual keys.

    A guarded store does not return the list of condemned objects. The list of condemned objects contains the keys of
    other users' objects. A key is sufficient to read an object.
    """

    @abc.abstractmethod
    def condemned(self, keys: Collection[str]) -> frozenset[str]:
        """Return the keys of the given objects that garbage collection has condemned."""

    @abc.abstractmethod
    def is_collecting(self) -> bool:
        """Return True if a garbage collection may be deleting objects now."""


def check_key(key: str) -> str:
    """Return the key if it is a valid key of a store.

    Raises:
        EnvironmentRejected: the key is not valid.
    """
    if not _KEY.fullmatch(key):
        raise EnvironmentRejected(f"{key[:100]!r} is not a key of a store")
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix if a store can list it.

    Raises:
        EnvironmentRejected: the prefix is not valid.
    """
    if prefix not in PREFIXES:
        raise EnvironmentRejected(f"{prefix[:100]!r} is not a prefix of a store. Valid prefixes: {', '.join(PREFIXES)}")
    return prefix


def check_range(key: str, start: int, length: int) -> None:
    """Reject a byte range that no object can have.

    Raises:
        EnvironmentRejected: the range starts before the object, or is larger than any object.
    """
    if start < 0 or not 0 <= length <= OBJECT_BYTES_MAX:
        raise EnvironmentRejected(f"{length} bytes from byte {start} of {key} are not a valid range")


def check_size(key: str, data: bytes | memoryview) -> memoryview:
    """Return the content as a view of bytes if the object is not too large.

    Raises:
        EnvironmentRejected: the content is larger than a store accepts.
    """
    view = memoryview(data).cast("B")
    if len(view) > OBJECT_BYTES_MAX:
        raise EnvironmentRejected(f"{key} has {len(view)} bytes, but at most {OBJECT_BYTES_MAX} are allowed")
    return view
