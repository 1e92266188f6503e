"""What garbage collection tells captures: which objects it is going to delete, and that it is at work.

    gc/condemned           objects that no snapshot needed when they were looked at; some time later they may go
    gc/collector-<digits>  a collection is at work; put again every minute, void a while after the last time

A capture asks once about each object, and takes a condemned one for absent: it puts it again. A capture that asked
before an object came on the list ends before the object may be deleted (the grace), so its snapshot is seen. One that
asked after puts the object again, and a collection sees that it was put since. Only when the two happen at the same
moment does a capture have to wait for the collection and look again (`StoreBlobs.write_snapshot`).

The list has keys of objects of every user, and a key is all it takes to read an object. So a server shows it to
operators only, and answers captures about the keys that they name (`base.CollectionGuard`).
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
"""How long after it last said so a collection may still be deleting."""


class CondemnedEntry(msgspec.Struct, frozen=True, array_like=True):
    """One object on the list."""

    key: str
    since_ns: int  # when it was on the list for certain; 0 while that is not known
    put_ns: int  # when it had been put; another time means that a capture needed it since


class CondemnedList(msgspec.Struct, frozen=True, kw_only=True):
    """The list."""

    entries: tuple[CondemnedEntry, ...] = ()
    version: int = VERSION


def read_condemned(store: Store) -> CondemnedList:
    """Return the list; an empty one if missing."""
    try:
        return decode(store.get(CONDEMNED), CondemnedList, LIST_NAME)
    except KeyError:
        return CondemnedList()


def write_condemned(store: Store, condemned: CondemnedList) -> None:
    """Put the list in place of the one that is there."""
    store.put({CONDEMNED: encode(condemned)})


def collectors(store: Store, now_ns: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the keys of the collections that may be deleting at this moment, and of those that are void."""
    found = [stored for stored in store.list("gc") if stored.key.startswith(COLLECTOR)]
    at_work = tuple(stored.key for stored in found if abs(now_ns - stored.put_ns) < LEASE_S * 10**9)
    return at_work, tuple(stored.key for stored in found if stored.key not in at_work)
