"""Garbage collection: condemns objects that no snapshot needs, and deletes them in a later collection.

    announce ─▶ a second one? ─▶ list, read what stays ─▶ plan ─▶ delete ─▶ the list: undated, then dated ─▶ withdraw
                    │ yes                               (pure)
                    └─▶ do nothing

    snapshots that are young or in use ─▶ their units ─▶ their packs        needed
    an object put less than a grace period ago                              needed: a capture may soon point at it
    any other object            not on the list ─▶ condemned                added to the list
                                on the list for less than the grace period  waits
                                an existing object points at it             waits
                                neither, and not put again since            deleted

A young unit keeps its packs, because a capture that reuses the unit does not check the packs again. Regardless of the
condemned list, a collection never deletes an object before the objects that refer to it. A new snapshot may need a
condemned unit, and may be old itself before the next collection.

A collection deletes snapshots before units, and units before packs. Existing objects therefore never refer to missing
objects. A later collection finds the leftovers of a killed collection. A new entry of the condemned list gets its date
after the list has been stored. Every capture that starts after the date of an entry therefore reads the entry.
`condemned_objects.py` explains why captures may run during a collection. A capture must take less time than the grace
period.

Failure cases: If a needed document is unreadable, the collection reports the document and keeps all objects to which
the document may refer. If another collection is running, a collection does nothing (`busy`). A collection without
progress raises StoreUnavailable. The next collection continues the work of the failed collection. If the clocks of two
machines differ by several minutes, collections may delete unused objects late.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple

import msgspec

from serverless_gpu.environment.documents import ProgressPoint, Report, ignore_progress
from serverless_gpu.environment.stores.base import Stored
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.codec import ITEMS_MAX
from serverless_gpu.environment.stores.condemned_objects import (
    COLLECTOR,
    LEASE_S,
    CondemnedEntry,
    CondemnedList,
    collectors,
    read_condemned,
    write_condemned,
)
from serverless_gpu.errors import EnvironmentProblem, EnvironmentRejected, StoreUnavailable

KEEP_S = 30 * 24 * 3600
"""Number of seconds for which an unused snapshot stays after its capture."""
GRACE_S = 24 * 3600
"""Grace period in seconds before condemning an object, and again before deleting it: four times a capture's limit.
"""
_KINDS = ("snapshots", "units", "packs")
# Requests within the store's time limit complete before the lease ends.
_DELETE_AT_ONCE = 16
_READ_AT_ONCE = 8
_READ_BATCH = 64
_RENEW_S = 60


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """Object counts and object sizes in a store."""

    snapshots: int = 0
    units: int = 0
    packs: int = 0
    bytes: int = 0


class CollectionResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a garbage collection or of a dry run."""

    kept: Tally = Tally()
    condemned: Tally = Tally()
    waiting: Tally = Tally()
    deleted: Tally = Tally()
    deleted_keys: tuple[str, ...] = ()
    condemned_keys: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    busy: bool = False
    dry_run: bool = False  # True for a dry run, which does not change the store


def collect(
    blobs: StoreBlobs,
    *,
    in_use: Collection[str] = (),
    keep_s: int = KEEP_S,
    grace_s: int = GRACE_S,
    dry_run: bool = False,
    report: Report = ignore_progress,
) -> CollectionResult:
    """Condemn unused objects, and delete objects whose grace period since their condemnation has ended.

    Collections keep the snapshots `in_use` (of running attempts and live zygotes) at any age, and others for `keep_s`
    seconds. The collection condemns an unneeded object `grace_s` seconds after its last put. A later collection
    deletes the condemned object after another `grace_s` seconds. The grace period `grace_s` must be longer than any
    capture.

    Raises:
        StoreUnavailable: the store does not answer, or the collection took too long. The next collection continues.
        EnvironmentRejected: a newer version wrote the list.
    """
    work = _Collection(blobs, CollectionTerms(frozenset(in_use), max(keep_s, grace_s) * 10**9, grace_s * 10**9), report)
    if dry_run:
        return msgspec.structs.replace(work.collected(work.look()), dry_run=True)
    with work.announced() as alone:
        if not alone:
            return CollectionResult(busy=True)
        plan = work.look()
        work.delete(plan.deleted)
        work.write_list(plan)
    return work.collected(plan)


class CollectionTerms(msgspec.Struct, frozen=True):
    """Conditions for keeping objects: snapshots in use, young snapshots, and recently put objects."""

    in_use: frozenset[str]
    keep_ns: int
    grace_ns: int


class _Collection:
    """A single garbage collection, from its announcement to its withdrawal."""

    def __init__(self, blobs: StoreBlobs, terms: CollectionTerms, report: Report) -> None:
        self._blobs = blobs
        self._store = blobs.store
        self._clock = blobs.clock
        self._terms = terms
        self._report = report
        self._key = COLLECTOR + os.urandom(16).hex()
        self._renewed_ns: int | None = None
        self._listed: dict[str, Stored] = {}
        self._condemned = CondemnedList()
        self._unreadable: list[str] = []

    @contextlib.contextmanager
    def announced(self) -> Iterator[bool]:
        """Announce the collection, and yield True if no other collection is running.

        If several collections start at once, all of them withdraw.
        """
        self._renew()
        try:
            at_work, void = collectors(self._store, self._clock.wall_ns())
            if self._key not in at_work:
                raise StoreUnavailable(
                    f"the clocks of this machine and of the store {self._store.url} differ by more than {LEASE_S} s",
                    hint="set this machine's clock; garbage collection compares the ages of objects",
                )
            self._store.delete(void)
            yield at_work == (self._key,)
        finally:
            with contextlib.suppress(StoreUnavailable):  # If the withdrawal fails, the announcement expires later.
                self._store.delete([self._key])

    def look(self) -> CollectionPlan:
        """List all objects, read the documents that the collection keeps, and return the plan."""
        self._condemned = self._read_list()
        listed = {kind: list(self._store.list(kind)) for kind in _KINDS}
        self._listed = {stored.key: stored for kind in _KINDS for stored in listed[kind]}
        now_ns, terms = self._clock.wall_ns(), self._terms
        ages = {"now_ns": now_ns, "grace_ns": terms.grace_ns}
        kept = kept_snapshots(listed["snapshots"], terms.in_use, now_ns=now_ns, keep_ns=terms.keep_ns)
        snapshots = make_plan(listed["snapshots"], kept, (), self._condemned, **ages)
        pointed_at, held = self._read(
            snapshots, kept, lambda key: (f"units/{unit}" for unit in self._blobs.read_snapshot(key).addresses())
        )
        kept = kept_parts(listed["units"], pointed_at, **ages)
        units = make_plan(listed["units"], kept, held, self._condemned, **ages)
        pointed_at, held = self._read(
            units, kept, lambda key: (f"packs/{digest}" for digest in self._blobs.read_unit(key).packs)
        )
        kept = kept_parts(listed["packs"], pointed_at, **ages)
        packs = make_plan(listed["packs"], kept, held, self._condemned, **ages)
        return joined(snapshots, units, packs)

    def delete(self, doomed: Sequence[Stored]) -> None:
        """Delete objects in small batches while this collection's announcement is valid."""
        for done, some in _batches([stored.key for stored in doomed], _DELETE_AT_ONCE):
            self._renew()
            self._store.delete(some)
            self._pulse("deleting", done, len(doomed))

    def write_list(self, plan: CollectionPlan) -> None:
        """Store the new condemned list without dates, then store it again with dates."""
        some = plan.condemned[: ITEMS_MAX - len(plan.waiting)]
        new = tuple(CondemnedEntry(stored.key, 0, stored.put_ns) for stored in some)
        if not new and frozenset(plan.waiting) == frozenset(self._condemned.entries):
            return
        self._renew()
        write_condemned(self._store, CondemnedList(entries=plan.waiting + new))
        if new:
            now_ns = self._clock.wall_ns()
            dated = tuple(CondemnedEntry(sentence.key, now_ns, sentence.put_ns) for sentence in new)
            self._renew()
            write_condemned(self._store, CondemnedList(entries=plan.waiting + dated))

    def collected(self, plan: CollectionPlan) -> CollectionResult:
        """Return the result of this collection for a plan."""
        waiting = [self._listed[sentence.key] for sentence in plan.waiting]
        return CollectionResult(
            kept=_tally(plan.kept),
            condemned=_tally(plan.condemned),
            waiting=_tally(waiting),
            deleted=_tally(plan.deleted),
            deleted_keys=tuple(stored.key for stored in plan.deleted),
            condemned_keys=tuple(stored.key for stored in plan.condemned),
            unreadable=tuple(sorted(self._unreadable)),
        )

    def _read_list(self) -> CondemnedList:
        try:
            return read_condemned(self._store)
        except EnvironmentRejected as error:
            if error.hint:  # This version must not replace a list that a newer version of serverless-gpu wrote.
                raise
            return CondemnedList()  # If the list is unreadable, the collection condemns all unused objects again.

    def _read(
        self, plan: CollectionPlan, kept: Collection[str], parts: Callable[[str], Iterable[str]]
    ) -> tuple[frozenset[str] | None, frozenset[str]]:
        """Return the keys to which kept documents refer (None if unreadable), and the keys of all documents."""
        keys = plan.remaining()
        pointed_at: set[str] = set()
        held: set[str] = set()
        readable = True
        with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
            for done, some in _batches(keys, _READ_BATCH):
                if self._renewed_ns is not None:
                    self._renew()
                for key, result in zip(some, pool.map(lambda key: self._parts(key, parts), some), strict=True):
                    held |= result or frozenset()
                    if key not in kept:
                        continue  # No restore can use an unreadable document outside of the kept documents.
                    pointed_at |= result or frozenset()
                    if result is None:
                        self._unreadable.append(key)
                        readable = False
                self._pulse("looking", done, len(keys))
        return frozenset(pointed_at) if readable else None, frozenset(held)

    def _parts(self, key: str, parts: Callable[[str], Iterable[str]]) -> frozenset[str] | None:
        try:
            return frozenset(parts(key.partition("/")[2]))
        except StoreUnavailable:
            raise
        except EnvironmentProblem:
            return None

    def _renew(self) -> None:
        """Renew this collection's announcement, or stop if the announcement may have expired."""
        now_ns = self._clock.boottime_ns()
        if self._renewed_ns is not None:
            silent_s = (now_ns - self._renewed_ns) / 1e9
            if silent_s < _RENEW_S:
                return
            if silent_s > LEASE_S / 2:
                raise StoreUnavailable(
                    f"garbage collection of {self._store.url} made no progress for {silent_s:.0f} s and stopped",
                    hint="run garbage collection again; the next collection continues from this point",
                )
        self._store.put({self._key: b""})
        self._renewed_ns = now_ns

    def _pulse(self, name: str, done: int, total: int) -> None:
        self._report(ProgressPoint(phase="collect", files_done=done, files_total=total, name=name))


def _batches(keys: Sequence[str], size: int) -> Iterator[tuple[int, list[str]]]:
    """Yield batches of keys, each with the number of keys so far."""
    for first in range(0, len(keys), size):
        some = list(keys[first : first + size])
        yield first + len(some), some


def _tally(listed: Iterable[Stored]) -> Tally:
    count = dict.fromkeys(_KINDS, 0)
    size = 0
    for stored in listed:
        count[stored.key.partition("/")[0]] += 1
        size += stored.size
    return Tally(**count, bytes=size)


class CollectionPlan(NamedTuple):
    """Plan of a collection: the objects to keep, to condemn and to delete."""

    kept: tuple[Stored, ...]
    condemned: tuple[Stored, ...]
    waiting: tuple[CondemnedEntry, ...]
    deleted: tuple[Stored, ...]

    def remaining(self) -> tuple[str, ...]:
        """Return the keys of the objects that this collection does not delete."""
        listed = (stored.key for stored in (*self.kept, *self.condemned))
        return (*listed, *(sentence.key for sentence in self.waiting))


def kept_snapshots(listed: Iterable[Stored], in_use: Collection[str], *, now_ns: int, keep_ns: int) -> frozenset[str]:
    """Return the keys of the snapshots that the collection keeps."""
    used = {f"snapshots/{address}" for address in in_use}
    return frozenset(stored.key for stored in listed if stored.key in used or now_ns - stored.put_ns < keep_ns)


def kept_parts(
    listed: Iterable[Stored], pointed_at: Collection[str] | None, *, now_ns: int, grace_ns: int
) -> frozenset[str]:
    """Return the keys of the units or packs that the collection keeps.

    `pointed_at` contains the keys to which kept documents refer. If a kept document is unreadable, `pointed_at` is None
    and the collection keeps all objects.
    """
    return frozenset(
        stored.key
        for stored in listed
        if pointed_at is None or stored.key in pointed_at or now_ns - stored.put_ns < grace_ns
    )


def make_plan(
    listed: Iterable[Stored],
    kept: Collection[str],
    held: Collection[str],
    condemned: CondemnedList,
    *,
    now_ns: int,
    grace_ns: int,
) -> CollectionPlan:
    """Return the collection's plan for the objects of one kind.

    `held` contains the keys to which existing objects still refer. `grace_ns` is the minimum time between condemning
    and deleting an object.
    """
    sentences: Mapping[str, CondemnedEntry] = {sentence.key: sentence for sentence in condemned.entries}
    plan: tuple[list[Stored], list[Stored], list[CondemnedEntry], list[Stored]] = ([], [], [], [])
    keep, condemn, wait, delete = plan
    for stored in listed:
        sentence = sentences.get(stored.key)
        if stored.key in kept:
            keep.append(stored)
        elif sentence is None or sentence.put_ns != stored.put_ns or not sentence.since_ns:
            condemn.append(stored)
        elif stored.key in held or now_ns - sentence.since_ns < grace_ns:
            wait.append(sentence)
        else:
            delete.append(stored)
    return CollectionPlan(tuple(keep), tuple(condemn), tuple(wait), tuple(delete))


def joined(*plans: CollectionPlan) -> CollectionPlan:
    """Combine the plans for several kinds of objects into one plan."""
    kept, condemned, waiting, deleted = (tuple(chain.from_iterable(parts)) for parts in zip(*plans, strict=True))
    return CollectionPlan(kept, condemned, waiting, deleted)
