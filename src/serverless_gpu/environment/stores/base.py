"""What every store can do: six calls on keys and bytes, nothing about what the bytes mean (`blobs.py` does that).

Keys are `packs/<digest>`, `units/<address>`, `snapshots/<address>`, `gc/condemned` and `gc/collector-<digits>`. Any
other is refused before anything is looked at, so no key leads out of its place. A key is never visible before all of
its bytes are, and never half of them; putting the same bytes twice, from two places at once, is the normal case.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from serverless_gpu.errors import EnvironmentRejected

OBJECT_BYTES_MAX = 256 * 1024 * 1024
"""The largest object a store is asked to hold."""
PREFIXES = ("packs", "units", "snapshots", "gc")
"""What keys start with: kinds of objects, and what can be listed."""

_KEY = re.compile(r"(?:packs|units|snapshots)/[0-9a-f]{64}|gc/(?:condemned|collector-[0-9a-f]{32})")


class Stored(NamedTuple):
    """One object in a store: its key, its size in bytes, and when it was last put (nanoseconds since 1970)."""

    key: str
    size: int
    put_ns: int


class Store(abc.ABC):
    """A place for objects; safe to use from several threads and by several processes at once.

    Every method raises `StoreUnavailable` when the store does not answer within its bound or refuses, and
    `StorageError` when it is full.

    Attributes:
        url: what a person would type to name it, without secrets.
    """

    url: str

    @abc.abstractmethod
    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return an object, or a range of it.

        Args:
            key: which object.
            start: first byte.
            length: how many bytes; None means to the end. Fewer come when the object ends before.

        Raises:
            KeyError: there is no such object.
            EnvironmentRejected: that would be more than `OBJECT_BYTES_MAX`.
        """

    @abc.abstractmethod
    def put(self, objects: Mapping[str, bytes | memoryview]) -> None:
        """Put objects, durably and at once, in place of what may be there.

        Several cost far less together than one after another. Each becomes visible by itself, in any order, so what
        points at something is put after that, in another call. When this fails, some of them may be there.

        Args:
            objects: bytes by key.

        Raises:
            EnvironmentRejected: one is larger than `OBJECT_BYTES_MAX`, or its key is none; then nothing was put.
        """

    @abc.abstractmethod
    def present(self, keys: Collection[str]) -> frozenset[str]:
        """Return which of these objects are there, without listing anything."""

    @abc.abstractmethod
    def list(self, prefix: str) -> Iterator[Stored]:
        """Return everything below `prefix/`, one of `PREFIXES`, in any order; for garbage collection only."""

    @abc.abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there are no error."""

    @abc.abstractmethod
    def free_bytes(self) -> int | None:
        """Return how much more it can hold, or None where that is not known."""

    def repair(self, keys: Collection[str]) -> tuple[str, ...] | None:
        """Check snapshots and units, content included, and remove what no restore can use.

        Only a server does this, for clients that may remove nothing.

        Returns:
            The keys that were removed; None where the caller has to look for itself.
        """
        return None


class CollectionGuard(abc.ABC):
    """A store that answers what garbage collection is doing, for keys that the caller names, and lists nothing.

    The list of condemned objects has keys of other users' objects, and a key is all it takes to read one.
    """

    @abc.abstractmethod
    def condemned(self, keys: Collection[str]) -> frozenset[str]:
        """Return which of these objects garbage collection has condemned."""

    @abc.abstractmethod
    def is_collecting(self) -> bool:
        """Return whether a collection may be deleting at this moment."""


def check_key(key: str) -> str:
    """Return a key that a store may be asked for.

    Raises:
        EnvironmentRejected: it is none.
    """
    if not _KEY.fullmatch(key):
        raise EnvironmentRejected(f"{key[:100]!r} is not a key of a store")
    return key


def check_prefix(prefix: str) -> str:
    """Return a prefix that a store may be asked to list.

    Raises:
        EnvironmentRejected: it is none.
    """
    if prefix not in PREFIXES:
        raise EnvironmentRejected(f"{prefix[:100]!r} is not a prefix of a store; these are: {', '.join(PREFIXES)}")
    return prefix


def check_range(key: str, start: int, length: int) -> None:
    """Refuse a range that no object may have.

    Raises:
        EnvironmentRejected: it starts before the object, or is larger than any.
    """
    if start < 0 or not 0 <= length <= OBJECT_BYTES_MAX:
        raise EnvironmentRejected(f"{length} bytes from byte {start} of {key} are not a range that can be read")


def check_size(key: str, data: bytes | memoryview) -> memoryview:
    """Return what is to be put, as bytes.

    Raises:
        EnvironmentRejected: it is more than a store is asked to hold.
    """
    view = memoryview(data).cast("B")
    if len(view) > OBJECT_BYTES_MAX:
        raise EnvironmentRejected(f"{key} has {len(view)} bytes, {OBJECT_BYTES_MAX} are the most")
    return view
