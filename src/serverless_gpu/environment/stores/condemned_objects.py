"""Tells captures which objects garbage collection has condemned, and if a collection is running.

    gc/condemned           objects that no snapshot needed at the last collection; a later one may delete them
    gc/collector-<digits>  a running collection; put again every minute, void some time after the last put

A capture checks for each object once if the object is condemned. A capture treats a condemned object as missing and
puts the object again. If a capture checks an object before the object's condemnation, the capture ends within the
object's grace period. The collection that deletes objects therefore sees the capture's snapshot. If a capture checks an
object after the object's condemnation, the capture puts the object again. The collection detects the new put. Because a
put and a deletion may coincide, the capture waits for the collection and checks again (`StoreBlobs.write_snapshot`).

The condemned list contains keys of all users' objects. A key is sufficient to read an object. A server therefore
returns the condemned list only to operators. For captures, the server reports only on the keys in the request
(`base.CollectionGuard`).
"""

from __future__ import annotations

import msgspec

from serverless_gpu.environment.documents import VERSION
from serverless_gpu.environment.stores.base import Store
from serverless_gpu.environment.stores.codec import decode, encode

CONDEMNED = "gc/condemned"
COLLECTOR = "gc/collector-"
LIST_NAME = "the list of condemned objects"
LEASE_S = 20 * 60
"""Number of seconds after its last announcement in which a collection may still delete objects."""


class CondemnedEntry(msgspec.Struct, frozen=True, array_like=True):
    """An entry of the list of condemned objects."""

    key: str
    since_ns: int  # Time by which the list certainly contained the object, or 0 while unknown.
    # Time of the object's last put before its condemnation. A later put means that a capture needed the object.
    put_ns: int


class CondemnedList(msgspec.Struct, frozen=True, kw_only=True):
    """The list of condemned objects."""

    entries: tuple[CondemnedEntry, ...] = ()
    version: int = VERSION


def read_condemned(store: Store) -> CondemnedList:
    """Read the list of condemned objects, which is empty if it was never stored."""
    try:
        return decode(store.get(CONDEMNED), CondemnedList, LIST_NAME)
    except KeyError:
        return CondemnedList()


def write_condemned(store: Store, condemned: CondemnedList) -> None:
    """Store a new list of condemned objects in place of the old list."""
    store.put({CONDEMNED: encode(condemned)})


def collectors(store: Store, now_ns: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the keys of collections that may still delete objects, and the keys of expired collections."""
    found = [stored for stored in store.list("gc") if stored.key.startswith(COLLECTOR)]
    at_work = tuple(stored.key for stored in found if abs(now_ns - stored.put_ns) < LEASE_S * 10**9)
    return at_work, tuple(stored.key for stored in found if stored.key not in at_work)
