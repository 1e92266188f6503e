"""Reads and writes a store's snapshots, units and packs, and checks every object.

The `read_*` methods limit the size of an object, decode the object strictly, and check its rules and address. If an
object is wrong, a method reads it once more, because the bytes may have been altered in transit.

The `write_*` methods check objects against the same rules. A writer puts packs before the units that refer to them, and
units before the snapshot that lists them. A stored object therefore never refers to missing objects, even if a process
is killed.

The `missing_*` methods find objects that a capture must send. A capture must send an object if the store lacks the
object, or if garbage collection has condemned the object.

Use an instance for only one capture or restore, because it caches the condemned keys. Several threads may use one
`StoreBlobs` instance.

Failure cases: The methods raise EnvironmentMissing for a missing object, and EnvironmentCorrupt for an altered object.
The methods raise EnvironmentRejected for an object that breaks the rules or has a newer version. The methods raise
StoreUnavailable if the store does not answer, and StorageError if the store is full.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from blake3 import blake3

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.environment.documents import Snapshot, Unit
from serverless_gpu.environment.snapshot_validation import check_snapshot, check_unit
from serverless_gpu.environment.stores.base import CollectionGuard, Store, check_key
from serverless_gpu.environment.stores.codec import AlteredObject, encode, pack_of, snapshot_of, unit_of
from serverless_gpu.environment.stores.condemned_objects import (
    LEASE_S,
    LIST_NAME,
    CondemnedEntry,
    collectors,
    read_condemned,
)
from serverless_gpu.errors import (
    EnvironmentCorrupt,
    EnvironmentMissing,
    EnvironmentRejected,
    InvalidValue,
    StoreUnavailable,
)

CAPTURE_S_MAX = 6 * 3600
"""Time limit in seconds between a capture's first query and writing its snapshot.

Garbage collection waits four times this limit before it deletes an object.
"""
PREFIX_DIGITS_MIN = 4
_PAUSE_S = 1.0

_Value = TypeVar("_Value")


class StoreBlobs:
    """Reads and writes a store's objects as Python values."""

    def __init__(
        self, store: Store, *, clock: Clock | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.store = store
        self.clock = clock or SystemClock()
        self._sleep = sleep
        self._lock = threading.Lock()
        self._condemned: frozenset[str] | None = None
        """All condemned keys, if the store returns the whole list."""
        self._answers: dict[str, bool] = {}
        """Key → True if condemned, if the store reports only on single keys."""
        self._began_ns: int | None = None
        self._there: set[str] = set()
        """Keys that exist and are not condemned, including keys that this instance has put."""
        self._written: dict[str, tuple[str, ...]] = {}
        """Keys of units that this instance has put, each with its pack keys."""
        self._rescued: set[str] = set()
        """Condemned keys that this instance has put again.

        A running collection may still delete objects that this instance has put again.
        """

    def read_snapshot(self, address: str) -> Snapshot:
        """Read the snapshot with an address, and check it."""
        key, what = check_key(f"snapshots/{address}"), f"snapshot {address[:12]}"

        return self._twice(lambda: snapshot_of(self._get(key, what), address), what)

    def read_unit(self, address: str) -> Unit:
        """Read the unit with an address, and check it."""
        key, what = check_key(f"units/{address}"), f"unit {address[:12]}"

        return self._twice(lambda: unit_of(self._get(key, what), address), what)

    def read_pack(self, digest: str) -> bytes:
        """Read a whole pack, and check its digest."""
        key, what = check_key(f"packs/{digest}"), f"pack {digest[:12]}"

        def read() -> bytes:
            data = self._get(key, what)
            pack_of(data, digest)
            return data

        return self._twice(read, what)

    def read_range(self, digest: str, start: int, length: int) -> bytes:
        """Read a part of a pack. The method checks only the length, because no digest covers a part of a pack."""
        key, what = check_key(f"packs/{digest}"), f"pack {digest[:12]}"

        def read() -> bytes:
            data = self._get(key, what, start, length)
            if len(data) != length:
                raise AlteredObject("the pack ends too early")
            return data

        return self._twice(read, what)

    def write_pack(self, data: bytes | memoryview) -> str:
        """Put a pack and return its name, which is the BLAKE3 digest of its bytes."""
        digest = blake3(data).hexdigest()
        self.write_packs({digest: data})
        return digest

    def write_packs(self, packs: Mapping[str, bytes | memoryview]) -> None:
        """Put packs with names (digests) that the caller has just computed.

        Putting several packs is hardly slower than putting one pack.
        """
        self._put({f"packs/{digest}": data for digest, data in packs.items()})

    def write_unit(self, unit: Unit) -> None:
        """Put a single unit, with the same checks as `write_units`."""
        self.write_units((unit,))

    def write_units(self, units: Collection[Unit]) -> None:
        """Put units whose packs exist in the store.

        Raises:
            EnvironmentRejected: a unit breaks the rules. No unit was stored.
            EnvironmentMissing: a pack of a unit is missing.
            StoreUnavailable: garbage collection interfered. Capture again.
        """
        for unit in units:
            check_unit(unit)
        packs = list(dict.fromkeys(f"packs/{digest}" for unit in units for digest in unit.packs))
        self._need(packs, ", ".join(f"unit {unit.address[:12]}" for unit in itertools.islice(units, 3)))
        self._settle(packs)
        self._put({f"units/{unit.address}": encode(unit) for unit in units})
        for unit in units:
            self._written[f"units/{unit.address}"] = tuple(f"packs/{digest}" for digest in unit.packs)

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Put a snapshot whose units exist in the store. After this call, restores can use the snapshot.

        Raises:
            EnvironmentRejected: the snapshot breaks the rules.
            EnvironmentMissing: a unit of the snapshot is missing.
            StoreUnavailable: an object was deleted after the check. The caller need not send all objects again.
        """
        check_snapshot(snapshot)
        units = [f"units/{address}" for address in snapshot.addresses()]
        self._need(units, f"snapshot {snapshot.address[:12]}")
        self._settle(units)
        if self.clock.boottime_ns() - self._began() > CAPTURE_S_MAX * 10**9:
            raise self._interrupted(f"this capture took longer than {CAPTURE_S_MAX // 3600} hours")
        self._make_sure(units)
        key = f"snapshots/{snapshot.address}"
        self._put({key: encode(snapshot)})
        self._settle([key])

    def missing_units(self, addresses: Iterable[str]) -> tuple[str, ...]:
        """Return the given units that a capture must write, in the given order."""
        return self._missing("units", addresses)

    def missing_packs(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Return the given packs that a capture must write, in the given order."""
        return self._missing("packs", digests)

    def condemned(self, keys: Collection[str]) -> frozenset[str]:
        """Return the given keys that garbage collection has condemned."""
        asked = [check_key(key) for key in keys]
        with self._lock:
            self._began()
            if isinstance(self.store, CollectionGuard):
                new = [key for key in asked if key not in self._answers]
                there = self.store.condemned(new) if new else frozenset()
                self._answers |= {key: key in there for key in new}
                return frozenset(key for key in asked if self._answers[key])
            if self._condemned is None:
                self._condemned = frozenset(entry.key for entry in self._twice(self._entries, LIST_NAME))
            return self._condemned.intersection(asked)

    def is_collecting(self) -> bool:
        """Return True if a garbage collection may be deleting objects now."""
        if isinstance(self.store, CollectionGuard):
            return self.store.is_collecting()
        return bool(collectors(self.store, self.clock.wall_ns())[0])

    def remove(self, keys: Collection[str]) -> None:
        """Remove objects that do not match their names, so that later checks report these objects as missing."""
        self.store.delete([check_key(key) for key in keys])
        self.forget(keys)

    def forget(self, keys: Collection[str]) -> None:
        """Record that the store has removed objects, so that later checks report these objects as missing."""
        self._there -= set(keys)

    def find_snapshot(self, prefix: str) -> str:
        """Return the address of the only snapshot whose address starts with this prefix.

        Only commands may call this method, because listing the store is slow.

        Raises InvalidValue: the prefix is not a valid start of an address, or is too short. Raises EnvironmentMissing:
        no snapshot or more than one snapshot has the prefix.
        """
        if not re.fullmatch(rf"[0-9a-f]{{{PREFIX_DIGITS_MIN},64}}", prefix):
            raise InvalidValue(
                f"{prefix[:80]!r} is not the address of a snapshot or its first {PREFIX_DIGITS_MIN} or more digits",
                hint="`sgpu env show` prints the address of this environment",
            )
        found = sorted(
            address
            for stored in self.store.list("snapshots")
            if (address := stored.key.partition("/")[2]).startswith(prefix)
        )
        if len(found) == 1:
            return found[0]
        if not found:
            raise _missing_error(f"snapshot {prefix[:12]}", self.store.url)
        few = ", ".join(address[:16] for address in found[:5])
        raise EnvironmentMissing(
            f"{len(found)} snapshots start with {prefix}: {few}", hint="give more digits of the snapshot's address"
        )

    def _get(self, key: str, what: str, start: int = 0, length: int | None = None) -> bytes:
        try:
            return self.store.get(key, start, length)
        except KeyError:
            raise _missing_error(what, self.store.url) from None

    def _put(self, objects: Mapping[str, bytes | memoryview]) -> None:
        condemned = self.condemned(objects.keys())
        self.store.put(objects)
        self._rescued |= condemned
        self._there |= objects.keys()

    def _twice(self, read: Callable[[], _Value], what: str) -> _Value:
        try:
            return read()
        except (AlteredObject, EnvironmentRejected):
            pass  # A second read shows if the object was altered in transit or in the store.
        try:
            return read()
        except AlteredObject as error:
            raise EnvironmentCorrupt(
                f"{what} in the store {self.store.url} is altered: {error}",
                hint="check the store's disk; a restore removes altered objects, and a capture sends them again",
            ) from None

    def _missing(self, kind: str, names: Iterable[str]) -> tuple[str, ...]:
        asked = {check_key(f"{kind}/{name}"): name for name in names}
        condemned = self.condemned([key for key in asked if key not in self._there])
        look = [key for key in asked if key not in self._there and key not in condemned]
        self._there |= self.store.present(look) if look else frozenset()
        return tuple(name for key, name in asked.items() if key not in self._there)

    def _need(self, keys: Iterable[str], what: str) -> None:
        """Raise an error if a new document refers to missing objects."""
        wanted = dict.fromkeys(keys)
        kind = next(iter(wanted), "").partition("/")[0]
        missing = self._missing(kind, [key.partition("/")[2] for key in wanted]) if wanted else ()
        if missing:
            raise EnvironmentMissing(
                f"{what} cannot be written: {len(missing)} of its {kind} are missing in the store "
                f"{self.store.url}, "
                f"for example {missing[0][:12]}",
                hint="run `sgpu env capture` again",
            )

    def _make_sure(self, units: Iterable[str]) -> None:
        """Check again that all objects of the capture exist after a possible garbage collection."""
        relied_on = {*units, *(key for key in self._there if key.startswith("packs/"))}
        lost = relied_on - self.store.present(relied_on)
        self._there -= lost
        if lost:
            self.remove([unit for unit, packs in self._written.items() if lost.intersection(packs)])
            raise self._interrupted(f"{len(lost)} objects were deleted from the store during the capture")

    def _began(self) -> int:
        """Return the time of this instance's first query, in nanoseconds since boot."""
        if self._began_ns is None:
            self._began_ns = self.clock.boottime_ns()
        return self._began_ns

    def _entries(self) -> tuple[CondemnedEntry, ...]:
        try:
            return read_condemned(self.store).entries
        except EnvironmentRejected as error:
            raise (error if error.hint else AlteredObject(error.message)) from None

    def _settle(self, keys: Iterable[str]) -> None:
        """Wait until no garbage collection can delete objects that this instance has put again."""
        fresh = self._rescued.intersection(keys)
        if not fresh:
            return
        # A collection that began before the second put may not have seen the object. The method therefore checks the
        # object after the end of the collection. Later collections detect that the object is young.
        deadline_ns = self.clock.boottime_ns() + 2 * LEASE_S * 10**9
        while self.is_collecting():
            if self.clock.boottime_ns() > deadline_ns:
                raise self._interrupted("garbage collection has not ended in time")
            self._sleep(_PAUSE_S)
        if lost := fresh - self.store.present(fresh):
            raise self._interrupted(f"garbage collection deleted {len(lost)} objects during the capture")
        self._rescued -= fresh

    def _interrupted(self, why: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"{why} (store {self.store.url})", hint="run the capture again; it does not send stored objects again"
        )


def _missing_error(what: str, url: str) -> EnvironmentMissing:
    return EnvironmentMissing(
        f"{what} is not in the store {url}",
        hint="capture the environment with `sgpu env capture`: it was never captured to this store, or it was removed",
    )
