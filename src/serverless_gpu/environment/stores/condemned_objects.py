"""Reports to captures which objects garbage collection will delete, and if a collection is running.

    gc/condemned           objects that no snapshot needed at the last collection; a later one may delete them
    gc/collector-<digits>  a running collection; put again every minute, void some time after the last put

For each object, a capture checks once if the object is condemned. The capture treats a condemned object as missing, and
puts the object again. A capture that checked before the object was listed ends before the object may be deleted (grace
period). The collection then sees the capture's snapshot. A capture that checked later puts the object again, and the
collection sees the new put. If the put and the deletion happen at the same moment, the capture must wait for the
collection and check again (`StoreBlobs.write_snapshot`).

The list has keys of all users' objects, and a key is enough to read an object. A server therefore returns the list only
to operators. The server answers captures only about the keys that they name (`base.CollectionGuard`).
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
"""Seconds after a collection's last announcement in which the collection may still delete objects."""


class CondemnedEntry(msgspec.Struct, frozen=True, array_like=True):
    """An object on the list of condemned objects."""

    key: str
    since_ns: int  # Time at which the object was certainly on the list; 0 while unknown.
    put_ns: int  # Time of the object's last put. A later put means that a capture needed the object.


class CondemnedList(msgspec.Struct, frozen=True, kw_only=True):
    """The list of condemned objects."""

    entries: tuple[CondemnedEntry, ...] = ()
    version: int = VERSION


def read_condemned(store: Store) -> CondemnedList:
    """Return the list of condemned objects, or an empty list if the object is missing."""
    try:
        return decode(store.get(CONDEMNED), CondemnedList, LIST_NAME)
    except KeyError:
        return CondemnedList()


def write_condemned(store: Store, condemned: CondemnedList) -> None:
    """Replace the list of condemned objects."""
    store.put({CONDEMNED: encode(condemned)})


def collectors(store: Store, now_ns: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the keys of collections that may be deleting now, and the keys of expired collections."""
    found = [stored for stored in store.list("gc") if stored.key.startswith(COLLECTOR)]
    at_work = tuple(stored.key for stored in found if abs(now_ns - stored.put_ns) < LEASE_S * 10**9)
    return at_work, tuple(stored.key for stored in found if stored.key not in at_work)
