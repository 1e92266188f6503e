"""Manages the units on a node, which all environments share read-only.

    ensure ─ present, and checked in this boot of the machine a short time ago? nothing to do
           ├ its lock is free: fetch it   (many processes at once: each takes units that no other process fetches)
           └ another process fetches it: wait until it is present, or until that process has exited
    look   ─ one sweep over its files: was a file modified? (`unit_integrity.py`) then read every byte
    verify ─ compare the disk with the unit's rows; a rename replaces a damaged unit, and its present readers
             keep the old one
    evict  ─ remove the least recently used units; never a unit in use

`UnitFetch` fetches units from a store:

    all missing units ─ free space above the minimum of free disk; the least recently used units are removed first
      each: its lock is free? ─ .new-<address>, every byte verified ─▶ <address>, which any process may then use
            another process fetches it? check it again after the others; the report names the awaited unit

A single stream transfers all units (`unpack_each`), which avoids a round trip for each small unit. A killed process
leaves the directory `.new-<address>`. The kernel releases the lock of the killed process. The next process that
acquires the lock unpacks the unit again.

`cache_directory.py` defines the paths, `unit_integrity.py` checks units, and `eviction.py` removes them.

Failure cases: If the disk is full, the cache raises a StorageError that names the disk, and discards the unfinished
unit (F27). If a unit is damaged on disk, the cache fetches the unit again (F29). If a fetching process is killed, the
next process keeps the finished units. If a fetched unit is corrupt, the cache fetches the unit once more, then raises
EnvironmentCorrupt. If another process fetches one unit for over an hour, the cache raises a StorageError.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.environment.documents import ProgressPoint, Report, Snapshot, Unit, ignore_progress, unit_address
from serverless_gpu.environment.restore.bytecode import CompileJob, compile_all
from serverless_gpu.environment.restore.cache import eviction
from serverless_gpu.environment.restore.cache.cache_directory import (
    CachePaths,
    LastLook,
    UnitNote,
    delete,
    exchange,
    free_bytes,
    full,
    is_full,
    lock,
    locked,
    make_public,
    occupied_bytes,
    put_aside,
    read_document,
    total_bytes,
    try_lock,
    write_document,
    write_to_disk,
)
from serverless_gpu.environment.restore.cache.eviction import LOCK_WAIT_S, evicting_lock
from serverless_gpu.environment.restore.cache.unit_integrity import (
    LOOK_S,
    Sweep,
    damage,
    drop_bytecode,
    expose,
    exposed_since,
    known_bytecode,
    note_bytecode,
    sweep_unit,
)
from serverless_gpu.environment.restore.cache.unit_metadata import UnitOutline, outline
from serverless_gpu.environment.restore.cache.unpack import unpack_each
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.errors import EnvironmentCorrupt, StorageError
from serverless_gpu.units import format_bytes

CACHE_BYTES_MAX = 100 * 10**9
"""Default limit for the disk space of all units on a node in bytes."""
ENVIRONMENTS_MAX = 32
"""Maximum number of unused environments in the cache.
"""
FLOOR_BYTES_MAX = 10**9
_FLOOR_SHARE = 20  # Fraction (one twentieth) of a small disk that stays free.
_READERS = 8
WAIT_S = 3600.0  # Seconds after which a unit's fetch counts as hung.
_PAUSE_S = 0.02
_TRIES = 2
_SMALL_FILE_BYTES = 4 * 1024 * 1024
_ROW_BYTES = 250  # Estimated size of one row in the cached documents.

_Document = TypeVar("_Document", bound=msgspec.Struct)
MakeSpace = Callable[[int], None]
"""Callback that frees the given number of bytes, or raises a StorageError."""
IsGood = Callable[[str], bool]
"""Callback that returns True if the cache has an intact unit. The caller holds the unit's lock."""


class EnsuredUnits(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `ensure`: unit directories, and the numbers of fetched units and bytes."""

    directories: dict[str, Path]
    fetched: int = 0
    fetched_bytes: int = 0


class UnitCache(CachePaths):
    """The cache of units and environments on a node.

    The cache leaves `floor_bytes` of the disk free. The default is 1 GB, or a twentieth of a small disk.
    """

    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int = CACHE_BYTES_MAX,
        floor_bytes: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(root)
        self._max_bytes = max_bytes
        self._floor_bytes = floor_bytes
        self.clock = clock or SystemClock()
        self.boot = self.clock.boot_id()

    def hold(self, snapshot: str) -> int:
        """Return a file descriptor that protects an environment and its units from eviction while open.

        The environment may still be missing from the cache.
        """
        make_public(self.root)
        make_public(self.locks)
        return lock(self.use_lock(snapshot), shared=True, wait_s=LOCK_WAIT_S)

    def register(self, snapshot: Snapshot) -> None:
        """Record an environment's units before the fetch. The caller holds the environment's lock."""
        place = self.environment(snapshot.address)
        make_public(self.trees)
        with locked(evicting_lock(self), shared=True, wait_s=LOCK_WAIT_S):
            make_public(place)
            write_document(place / "members", list(snapshot.addresses()))
            write_document(place / "snapshot", snapshot)
            self.touch(snapshot.address)

    def touch(self, snapshot: str) -> None:
        """Record the current time as an environment's last use."""
        now = self.clock.wall_ns()
        stamp = self.environment(snapshot) / "used"
        stamp.touch()
        os.utime(stamp, ns=(now, now))

    def document(self, address: str) -> Unit:
        """Return the rows of a cached unit."""
        return self._own(address, "unit", Unit)

    def outline(self, address: str) -> UnitOutline:
        """Return the outline of a cached unit."""
        return self._own(address, "outline", UnitOutline)

    def ensure(
        self,
        addresses: Iterable[str],
        blobs: StoreBlobs,
        report: Report = ignore_progress,
        *,
        accept: Callable[[Unit], None] = lambda unit: None,
    ) -> EnsuredUnits:
        """Check cached units, and fetch missing units.

        The caller holds the lock of an environment that contains the units. `accept` raises an error if a unit does not
        match the snapshot. The cache calls `accept` before the first transfer.

        Raises:
            StorageError: the disk has too little space, even after the eviction of unused units.
            EnvironmentCorrupt: the store's copy was altered.
            EnvironmentMissing: the store does not have a unit.
        """
        wanted = tuple(dict.fromkeys(addresses))
        missing = [address for address in wanted if not self._is_good(address)]
        fetched: list[Unit] = []
        if missing:
            with ThreadPoolExecutor(_READERS) as pool:
                units = list(pool.map(blobs.read_unit, missing))
            for unit in units:
                accept(unit)
            make_public(self.root)
            make_public(self.units)
            make_space = partial(self.make_space, keep=wanted)
            fetch = UnitFetch(self, blobs, clock=self.clock, make_space=make_space, report=report)
            fetch.run(units, self._survived)
            fetched = fetch.fetched
        return EnsuredUnits(
            directories={address: self.unit(address) for address in wanted},
            fetched=len(fetched),
            fetched_bytes=sum(map(moved_bytes, fetched)),
        )

    def verify(self, address: str, blobs: StoreBlobs, report: Report = ignore_progress, *, read: bool = True) -> str:
        """Compare a unit with its rows, and replace a damaged unit.

        Return a description of the damage, or "". If `read` is false, compare only the files' metadata.
        """
        with locked(self.unit_lock(address), wait_s=WAIT_S):
            wrong = self._damage(address, read=read)
            if not wrong:
                return ""
            place = self.unit(address)
            self.forget_made_of(address)
            try:
                fetch = UnitFetch(
                    self, blobs, clock=self.clock, make_space=partial(self.make_space, keep=[address]), report=report
                )
                fresh = fetch.bring(blobs.read_unit(address))
            except BaseException:
                if place.exists():
                    # Moving the damaged unit aside prevents new uses. Current users keep the old directory until the
                    # next sweep.
                    put_aside(place)
                raise
            if place.exists():
                exchange(fresh, place)
                put_aside(fresh)
            else:
                fresh.rename(place)
        eviction.sweep(self)
        return wrong

    def evict(self, max_bytes: int | None = None, free_floor_bytes: int | None = None) -> int:
        """Evict the least recently used units until the cache and the disk are within their limits.

        Call `evict` after a restore rather than before, because some file systems create files slowly after many
        deletions.
        """
        eviction.sweep(self)
        eviction.forget(self, ENVIRONMENTS_MAX)
        size = sum(unit.size for unit in eviction.units(self))
        limit = self._max_bytes if max_bytes is None else max_bytes
        floor = self.floor_bytes if free_floor_bytes is None else free_floor_bytes
        excess = max(size - limit, room(self, 0, floor))
        return eviction.evict(self, excess) if excess > 0 else 0

    def make_space(self, needed: int, *, keep: Collection[str]) -> None:
        """Evict unused units until the disk has `needed` free bytes above the required minimum.

        Raises StorageError if the disk is still too full after the eviction of all unused units.
        """
        if short := room(self, needed, self.floor_bytes):
            eviction.sweep(self)
            eviction.evict(self, short, keep)
            if room(self, needed, self.floor_bytes):
                raise full(self.units, needed, self.floor_bytes)

    def settle(self, addresses: Iterable[str]) -> None:
        """Sync units to the disk, which saves a full verification after the next boot.

        Call `settle` while the node is idle, because the sync may take seconds.
        """
        notes = {address: note for address in addresses if (note := self.note(address)) and not note.settled}
        if notes:
            write_to_disk(self.units)
        for address, note in notes.items():
            with contextlib.suppress(FileNotFoundError):
                self.write_note(address, msgspec.structs.replace(note, settled=True))

    def sizes(self) -> tuple[int, int]:
        """Return the number of units in the cache, and their total disk space in bytes."""
        units = eviction.units(self)
        return len(units), sum(unit.size for unit in units)

    @property
    def floor_bytes(self) -> int:
        """Return the number of bytes that must stay free on the disk."""
        if self._floor_bytes is not None:
            return self._floor_bytes
        return min(FLOOR_BYTES_MAX, total_bytes(self.root) // _FLOOR_SHARE)

    def look(self, snapshot: Snapshot) -> tuple[str, ...]:
        """Check the units of an environment, and move modified units aside.

        The cache checks each unit once per boot, and again after `LOOK_S` seconds. `trees.py` checks linked units
        before each use.

        The caller holds the environment's lock.
        """
        stamp = self.looked(snapshot.address)
        last = read_document(stamp, LastLook)
        if last is not None and last.boot == self.boot and self._is_fresh(last.at_ns):
            return ()
        found = []
        for address in snapshot.addresses():
            note = self.note(address)
            if note is not None and not self._is_known(note):
                with locked(self.unit_lock(address), wait_s=WAIT_S):
                    found.append(self._look(address))
        if stamp.parent.is_dir():
            write_document(stamp, LastLook(boot=self.boot, at_ns=self.clock.boottime_ns()))
        return tuple(filter(None, found))

    def compile(self, work: Mapping[str, Sequence[CompileJob]], python: str, report: Report = ignore_progress) -> int:
        """Compile files of units, record the bytecode, and return the number of files with bytecode."""
        with locked(self.compiling_lock(), shared=True, wait_s=LOCK_WAIT_S):
            made = compile_all([job for jobs in work.values() for job in jobs], python, report=report)
            for address, jobs in work.items():
                with locked(self.unit_lock(address), wait_s=WAIT_S), contextlib.suppress(FileNotFoundError):
                    note_bytecode(self.unit(address), [job.target for job in jobs])
        return made

    def expose(self, addresses: Iterable[str]) -> None:
        """Record that trees link to files of units. The caller holds the linking lock."""
        for address in addresses:
            expose(self.unit(address))
        self.linked.touch()

    def forget_made_of(self, address: str) -> None:
        """Invalidate all trees and overlays of a damaged unit, so that the next restore replaces the trees."""
        for environment in eviction.environments(self):
            if address in environment.units:
                place = self.environment(environment.address)
                (place / "tree.ready").unlink(missing_ok=True)
                (place / "overlay" / "ready").unlink(missing_ok=True)

    def _own(self, address: str, name: str, kind: type[_Document]) -> _Document:
        value = read_document(self.unit(address) / name, kind)
        if value is None:
            raise EnvironmentCorrupt(
                f"unit {address[:12]} in the cache {self.units} has no valid documents",
                hint=f"remove the directory {self.unit(address)} (the next restore fetches the unit again)",
            )
        return value

    def _is_good(self, address: str) -> bool:
        note = self.note(address)
        if note is None:
            return False
        if self._is_known(note):
            return True
        with locked(self.unit_lock(address), wait_s=WAIT_S):
            return self._survived(address)

    def _is_fresh(self, looked_ns: int) -> bool:
        return 0 <= self.clock.boottime_ns() - looked_ns < LOOK_S * 10**9

    def _is_known(self, note: UnitNote) -> bool:
        """Return True if the cache has checked a unit in this boot within the last `LOOK_S` seconds."""
        return note.boot == self.boot and self._is_fresh(note.looked_ns)

    def _survived(self, address: str) -> bool:
        """Return True if the cache has an intact unit. The caller holds the unit's lock."""
        return self.note(address) is not None and not self._look(address)

    def _look(self, address: str) -> str:
        """Check a locked unit. Move a damaged unit aside, and return a description of the damage, or ""."""
        note, unit = self.note(address), self.unit(address)
        if note is None or self._is_known(note):
            return ""
        if note.boot != self.boot and not note.settled:
            drop_bytecode(unit)  # After a reboot, unsynced files may be empty.
        try:
            seal = sweep_unit(unit)
        except FileNotFoundError:
            wrong = "the unit's documents are missing"
        else:
            wrong = self._changed(address, note, seal)
        if wrong:
            self.forget_made_of(address)
            put_aside(unit)
            return wrong
        changed = "" if exposed_since(unit) else self._mend_bytecode(address, seal)
        self.write_note(
            address,
            msgspec.structs.replace(
                note,
                boot=self.boot,
                looked_ns=self.clock.boottime_ns(),
                files=seal.files,
                documents=seal.documents,
            ),
        )
        return changed

    def _changed(self, address: str, note: UnitNote, seal: Sweep) -> str:
        """Describe a unit's damage, or return "". Read the whole unit if the seal differs or is inconclusive."""
        is_new_boot = note.boot != self.boot
        if exposed_since(self.unit(address)):  # Creating a link also updates a file's change time.
            return self._damage(address, read=not note.settled) if is_new_boot else ""
        if (seal.files, seal.documents) == (note.files, note.documents) and not (is_new_boot and not note.settled):
            return ""
        wrong = self._damage(address, read=True)
        if not wrong and note.documents and seal.documents != note.documents:
            wrong = "the unit's documents were modified"
        return wrong

    def _mend_bytecode(self, address: str, seal: Sweep) -> str:
        """Remove unrecorded or modified bytecode, and return the path of the first modified file.

        Killed processes and earlier versions of serverless-gpu leave unrecorded bytecode behind.
        """
        unit = self.unit(address)
        known = known_bytecode(unit)
        wrong = sorted(path for path, is_now in seal.bytecode.items() if known.get(path) != is_now)
        lock = try_lock(self.compiling_lock()) if wrong else None
        if lock is None:
            return ""  # If another process is compiling, the next check removes the bytecode.
        try:
            for path in wrong:
                (unit / path).unlink(missing_ok=True)
            self.forget_made_of(address)  # The next restore compiles the removed files again.
        finally:
            os.close(lock)
        return next((f"{path} was modified" for path in wrong if path in known), "")

    def _damage(self, address: str, *, read: bool) -> str:
        unit = read_document(self.unit(address) / "unit", Unit)
        if unit is None or read_document(self.unit(address) / "outline", UnitOutline) is None:
            return "the unit's documents are missing"
        if read and unit_address(unit.rows) != address:
            return "the unit's rows do not match the unit's address"
        return damage(self.unit(address), unit.rows, read=read)


class UnitFetch:
    """Fetches units for one call, while other processes may fetch units concurrently.

    The fetch calls `make_space` with the number of needed bytes at the start and before each unit.
    """

    def __init__(
        self,
        places: CachePaths,
        blobs: StoreBlobs,
        *,
        clock: Clock,
        make_space: MakeSpace,
        report: Report = ignore_progress,
    ) -> None:
        self._places = places
        self._blobs = blobs
        self._clock = clock
        self._make_space = make_space
        self._report = report
        self._locks: dict[str, int] = {}
        self._waiting: dict[str, Unit] = {}
        self._before = self._total = ProgressPoint(phase="fetch")
        self._waits_for = ""
        self.fetched: list[Unit] = []

    def run(self, units: Iterable[Unit], is_good: IsGood) -> None:
        """Fetch all given units into the cache, and list the newly fetched units in `fetched`.

        The fetch calls `is_good` while holding the unit's lock.
        """
        self._waiting = {unit.address: unit for unit in units}
        self._total = totals(self._waiting.values())
        self._make_space(sum(map(size_of, self._waiting.values())))
        deadline = time.monotonic() + WAIT_S
        while self._waiting:
            count = len(self._waiting)
            self._try(lambda: self._round(self._jobs(is_good)))
            if len(self._waiting) < count:
                deadline = time.monotonic() + WAIT_S
            elif time.monotonic() > deadline:
                address = next(iter(self._waiting))
                raise StorageError(
                    f"Another process has been fetching unit {address[:12]} for more than an hour.",
                    hint=f"find the fetching process: fuser {self._places.unit_lock(address)}",
                )
            if self._waiting:
                if len(self._waiting) < count or not self._waits_for:
                    largest = max(self._waiting.values(), key=size_of)
                    more = f" and {len(self._waiting) - 1} more" if len(self._waiting) > 1 else ""
                    self._waits_for = f"unit {largest.address[:12]} ({format_bytes(size_of(largest))}){more}"
                time.sleep(_PAUSE_S)

    def bring(self, unit: Unit) -> Path:
        """Unpack a locked unit next to its final directory, and return the temporary path."""

        def once() -> None:
            for directory in unpack_each(self._prepared(unit), self._blobs, report=self._report):
                self._describe(directory, unit)

        self._try(once)
        return self._fresh(unit.address)

    def _try(self, work: Callable[[], None]) -> None:
        """Run `work`, and run `work` again after corrupt data or a full disk."""
        for left in range(_TRIES - 1, -1, -1):
            try:
                return work()
            except EnvironmentCorrupt:
                if not left:
                    raise
            except (OSError, StorageError) as error:
                needed = sum(map(size_of, self._waiting.values()))
                cause = error if isinstance(error, OSError) else error.__cause__
                if not (isinstance(cause, OSError) and is_full(cause)):
                    if isinstance(error, StorageError):
                        raise
                    message = f"{error.filename or self._places.units} cannot be written: {error.strerror}."
                    raise StorageError(message) from error
                if not left:
                    raise full(self._places.units, needed, 0) from error
                self._make_space(needed)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _round(self, jobs: Iterator[tuple[Unit, Path]]) -> None:
        self._before = totals(self.fetched)
        try:
            for directory in unpack_each(jobs, self._blobs, report=self._tell, totals=self._total):
                unit = self._waiting[directory.name.removeprefix(".new-")]
                self._describe(directory, unit)
                self._publish(directory, unit)
        finally:
            for address, fd in self._locks.items():
                delete(self._fresh(address))
                os.close(fd)
            self._locks.clear()

    def _jobs(self, is_good: IsGood) -> Iterator[tuple[Unit, Path]]:
        for address, unit in list(self._waiting.items()):
            fd = try_lock(self._places.unit_lock(address))
            if fd is None:
                continue
            self._locks[address] = fd
            self._waits_for = ""
            if is_good(address):
                del self._waiting[address]
                os.close(self._locks.pop(address))
                continue
            yield from self._prepared(unit)

    def _prepared(self, unit: Unit) -> Iterator[tuple[Unit, Path]]:
        fresh = self._fresh(unit.address)
        make_public(fresh.parent)
        delete(fresh)
        self._make_space(size_of(unit))
        yield unit, fresh

    def _describe(self, fresh: Path, unit: Unit) -> None:
        write_document(fresh / "unit", unit)
        write_document(fresh / "outline", outline(unit, lambda path: _read_small(fresh / path)))
        seal = sweep_unit(fresh)
        note = UnitNote(
            size=size_of(unit),
            boot=self._clock.boot_id(),
            looked_ns=self._clock.boottime_ns(),
            files=seal.files,
            documents=seal.documents,
        )
        write_document(fresh / "note", note)
        now_ns = self._clock.wall_ns()
        os.utime(fresh / "note", ns=(now_ns, now_ns))

    def _publish(self, fresh: Path, unit: Unit) -> None:
        place = self._places.unit(unit.address)
        if place.exists():
            put_aside(place)
        fresh.rename(place)
        self.fetched.append(unit)
        del self._waiting[unit.address]
        os.close(self._locks.pop(unit.address))

    def _fresh(self, address: str) -> Path:
        return self._places.unit(address).with_name(f".new-{address}")

    def _tell(self, progress: ProgressPoint) -> None:
        """Report the progress of all rounds, and the unit that the fetch is waiting for."""
        before = self._before
        self._report(
            msgspec.structs.replace(
                progress,
                bytes_done=before.bytes_done + progress.bytes_done,
                files_done=before.files_done + progress.files_done,
                moved_bytes=before.moved_bytes + progress.moved_bytes,
                waits_for=self._waits_for,
            )
        )


def totals(units: Iterable[Unit]) -> ProgressPoint:
    """Return the progress that a complete fetch of the units would report."""
    size = files = moved = 0
    for unit in units:
        size += sum(row.size for row in unit.rows)
        files += sum(row.has_content for row in unit.rows)
        moved += moved_bytes(unit)
    return ProgressPoint(
        phase="fetch", bytes_done=size, bytes_total=size, files_done=files, files_total=files, moved_bytes=moved
    )


def size_of(unit: Unit) -> int:
    """Estimate the disk space of a unit and its documents in bytes."""
    return occupied_bytes(sum(row.size for row in unit.rows) + _ROW_BYTES * len(unit.rows), len(unit.rows))


def moved_bytes(unit: Unit) -> int:
    """Return the number of compressed bytes that a fetch of a unit transfers."""
    return sum(block.length for block in unit.blocks)


def room(places: CachePaths, needed: int, floor: int) -> int:
    """Return the number of bytes to free, so that `floor` bytes stay free after a write of `needed` bytes."""
    return max(0, needed + floor - free_bytes(places.root))


def _read_small(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return file.read(_SMALL_FILE_BYTES)
