"""Reads and writes the snapshots, units and packs of a store, and checks each on its way in and out.

    read_*    bounded, decoded strictly, checked by its rules and against its address before a caller sees it; what is
              wrong is read once more (a line that cut or flipped it), then it is an error
    write_*   checked by the same rules; packs before the units that point into them, units before the snapshot that
              lists them, so every object is whole, whichever process was killed and when
    missing_* what a capture has to send: what is not there, and what garbage collection has condemned

One object serves one capture or one restore: it asks once about each key whether it is condemned. Safe to use from
several threads.

Failure cases: not there (EnvironmentMissing), altered in the store (EnvironmentCorrupt), breaks the rules or is of a
newer version (EnvironmentRejected), no answer (StoreUnavailable), no space (StorageError).
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
from serverless_gpu.environment.snapshot_rules import check_snapshot, check_unit
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
"""How long after its first question a capture may publish; garbage collection leaves it four times as long."""
PREFIX_DIGITS_MIN = 4
_PAUSE_S = 1.0

_Value = TypeVar("_Value")


class StoreBlobs:
    """What a store holds, as values."""

    def __init__(
        self, store: Store, *, clock: Clock | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.store = store
        self.clock = clock or SystemClock()
        self._sleep = sleep
        self._lock = threading.Lock()
        self._condemned: frozenset[str] | None = None
        """The whole list, of a store that is read directly."""
        self._answers: dict[str, bool] = {}
        """Whether a key is condemned, of a store that answers about single keys."""
        self._began_ns: int | None = None
        self._there: set[str] = set()
        """Keys that were there and not condemned, or put by this object."""
        self._written: dict[str, tuple[str, ...]] = {}
        """Keys of units that were put by this object, and of their packs."""
        self._rescued: set[str] = set()
        """Condemned keys that this object put again, and that may yet be deleted."""

    def read_snapshot(self, address: str) -> Snapshot:
        """Return a snapshot."""
        key, what = check_key(f"snapshots/{address}"), f"snapshot {address[:12]}"

        return self._twice(lambda: snapshot_of(self._get(key, what), address), what)

    def read_unit(self, address: str) -> Unit:
        """Return a unit."""
        key, what = check_key(f"units/{address}"), f"unit {address[:12]}"

        return self._twice(lambda: unit_of(self._get(key, what), address), what)

    def read_pack(self, digest: str) -> bytes:
        """Return a whole pack."""
        key, what = check_key(f"packs/{digest}"), f"pack {digest[:12]}"

        def read() -> bytes:
            data = self._get(key, what)
            pack_of(data, digest)
            return data

        return self._twice(read, what)

    def read_range(self, digest: str, start: int, length: int) -> bytes:
        """Return a part of a pack. It is as long as asked for; only its content can say whether it is right."""
        key, what = check_key(f"packs/{digest}"), f"pack {digest[:12]}"

        def read() -> bytes:
            data = self._get(key, what, start, length)
            if len(data) != length:
                raise AlteredObject("it ends too early")
            return data

        return self._twice(read, what)

    def write_pack(self, data: bytes | memoryview) -> str:
        """Put a pack and return its name, which is the BLAKE3 of its bytes."""
        digest = blake3(data).hexdigest()
        self.write_packs({digest: data})
        return digest

    def write_packs(self, packs: Mapping[str, bytes | memoryview]) -> None:
        """Put packs, by the names that the caller has just worked out; together they cost little more than one."""
        self._put({f"packs/{digest}": data for digest, data in packs.items()})

    def write_unit(self, unit: Unit) -> None:
        """Put a unit as `write_units` does."""
        self.write_units((unit,))

    def write_units(self, units: Collection[Unit]) -> None:
        """Put units, whose packs are there.

        Raises:
            EnvironmentRejected: one breaks the rules of what a unit may be; none was put then.
            EnvironmentMissing: a pack one points into is not there.
            StoreUnavailable: garbage collection came in between; capture again.
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
        """Put a snapshot, whose units are there: from now on it can be restored, and what it needs is kept.

        Raises:
            EnvironmentRejected: it breaks the rules of what a snapshot may be.
            EnvironmentMissing: a unit it lists is not there.
            StoreUnavailable: something was deleted since it was looked at; what is there need not be sent again.
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
        """Return which of these units a capture has to write, in the order asked."""
        return self._missing("units", addresses)

    def missing_packs(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Return which of these packs a capture has to write, in the order asked."""
        return self._missing("packs", digests)

    def condemned(self, keys: Collection[str]) -> frozenset[str]:
        """Return which of these keys garbage collection has condemned."""
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
        """Return whether a collection may be deleting at this moment."""
        if isinstance(self.store, CollectionGuard):
            return self.store.is_collecting()
        return bool(collectors(self.store, self.clock.wall_ns())[0])

    def remove(self, keys: Collection[str]) -> None:
        """Remove objects that are not what their names say; from now on they count as missing."""
        self.store.delete([check_key(key) for key in keys])
        self.forget(keys)

    def forget(self, keys: Collection[str]) -> None:
        """Take objects for missing that the store has removed by itself."""
        self._there -= set(keys)

    def find_snapshot(self, prefix: str) -> str:
        """Return the address of the one snapshot that starts so; lists the store, so it is for commands only.

        Raises InvalidValue: it is no start of an address, or too short. Raises EnvironmentMissing: there
        is no such snapshot, or more than one.
        """
        if not re.fullmatch(rf"[0-9a-f]{{{PREFIX_DIGITS_MIN},64}}", prefix):
            raise InvalidValue(
                f"{prefix[:80]!r} is not the address of a snapshot, nor its first {PREFIX_DIGITS_MIN} digits or more",
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
        raise EnvironmentMissing(f"{len(found)} snapshots start with {prefix}: {few}", hint="write more digits")

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
            pass  # on its way or where it lies: the second look tells
        try:
            return read()
        except AlteredObject as error:
            raise EnvironmentCorrupt(
                f"{what} in the store {self.store.url} is altered: {error}",
                hint="look at the disk of the store; a restore removes what is altered, and a capture sends it again",
            ) from None

    def _missing(self, kind: str, names: Iterable[str]) -> tuple[str, ...]:
        asked = {check_key(f"{kind}/{name}"): name for name in names}
        condemned = self.condemned([key for key in asked if key not in self._there])
        look = [key for key in asked if key not in self._there and key not in condemned]
        self._there |= self.store.present(look) if look else frozenset()
        return tuple(name for key, name in asked.items() if key not in self._there)

    def _need(self, keys: Iterable[str], what: str) -> None:
        """Refuse to write a document whose parts are not there."""
        wanted = dict.fromkeys(keys)
        kind = next(iter(wanted), "").partition("/")[0]
        missing = self._missing(kind, [key.partition("/")[2] for key in wanted]) if wanted else ()
        if missing:
            raise EnvironmentMissing(
                f"{what} cannot be written: {len(missing)} of its {kind} are not in the store {self.store.url}, "
                f"for example {missing[0][:12]}",
                hint="capture the environment again",
            )

    def _make_sure(self, units: Iterable[str]) -> None:
        """Look again for all that this capture relies on: a hurried collection, or a restore, may have deleted it."""
        relied_on = {*units, *(key for key in self._there if key.startswith("packs/"))}
        lost = relied_on - self.store.present(relied_on)
        self._there -= lost
        if lost:
            self.remove([unit for unit, packs in self._written.items() if lost.intersection(packs)])
            raise self._interrupted(f"{len(lost)} objects were deleted from the store while this was captured")

    def _began(self) -> int:
        """Return when this object asked its first question, boottime in nanoseconds."""
        if self._began_ns is None:
            self._began_ns = self.clock.boottime_ns()
        return self._began_ns

    def _entries(self) -> tuple[CondemnedEntry, ...]:
        try:
            return read_condemned(self.store).entries
        except EnvironmentRejected as error:
            raise (error if error.hint else AlteredObject(error.message)) from None

    def _settle(self, keys: Iterable[str]) -> None:
        """Make sure that nothing that was put again is being deleted at this moment, before anything points at it."""
        fresh = self._rescued.intersection(keys)
        if not fresh:
            return
        # A collection that began before something was put again may not have seen that: wait for its end, then look.
        # One that begins later sees that it is young.
        deadline_ns = self.clock.boottime_ns() + 2 * LEASE_S * 10**9
        while self.is_collecting():
            if self.clock.boottime_ns() > deadline_ns:
                raise self._interrupted("garbage collection does not end")
            self._sleep(_PAUSE_S)
        if lost := fresh - self.store.present(fresh):
            raise self._interrupted(f"garbage collection deleted {len(lost)} objects while they were sent")
        self._rescued -= fresh

    def _interrupted(self, why: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"{why} (store {self.store.url})", hint="capture again; what has been sent need not be sent again"
        )


def _missing_error(what: str, url: str) -> EnvironmentMissing:
    return EnvironmentMissing(
        f"{what} is not in the store {url}",
        hint="it was never captured there, or has been removed: `sgpu env capture` puts it there (again)",
    )
