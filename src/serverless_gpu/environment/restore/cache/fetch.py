"""Bringing units from a store into the cache: space first, unpacked beside their places, then there by a rename.

    all missing units ─ room for them above the floor of free disk; what was not used for longest goes first
      each: its lock is free? ─ .new-<address>, every byte verified ─▶ <address>, from here on anybody may use it
            another fetches it? it is looked at again when the others are done; the report says which is waited for

Units are unpacked as one stream (`unpack_each`), so a small one does not wait for its own round trip. Who is killed
leaves `.new-<address>` and a lock that the kernel has freed: the next who gets the lock begins again.

Failure cases: the disk is full (StorageError, nothing half-visible), what comes is altered (asked for once more, then
EnvironmentCorrupt), the store does not answer, another process fetches for an hour (StorageError).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.environment.documents import Unit
from serverless_gpu.environment.progress import ProgressPoint, Report, ignore_progress
from serverless_gpu.environment.restore.cache.cache_directory import (
    CachePaths,
    UnitNote,
    delete,
    free_bytes,
    full,
    is_full,
    make_public,
    occupied_bytes,
    put_aside,
    try_lock,
    write_document,
)
from serverless_gpu.environment.restore.cache.unit_integrity import sweep_unit
from serverless_gpu.environment.restore.cache.unit_metadata import outline
from serverless_gpu.environment.restore.cache.unpack import unpack_each
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.errors import EnvironmentCorrupt, StorageError
from serverless_gpu.units import format_bytes

WAIT_S = 3600.0  # a fetch of one unit that takes longer hangs
_PAUSE_S = 0.02
_TRIES = 2
_SMALL_FILE_BYTES = 4 * 1024 * 1024
_ROW_BYTES = 250  # a row in the documents of the cache

MakeSpace = Callable[[int], None]
"""Frees what is needed, or raises the StorageError that says how much is missing."""
IsGood = Callable[[str], bool]
"""Whether a unit, whose lock is held, is there already."""


def size_of(unit: Unit) -> int:
    """Return about how many bytes a unit takes on the disk, its documents included."""
    return occupied_bytes(sum(row.size for row in unit.rows) + _ROW_BYTES * len(unit.rows), len(unit.rows))


def moved_bytes(unit: Unit) -> int:
    """Return how many bytes come from the store for a unit."""
    return sum(block.length for block in unit.blocks)


def room(places: CachePaths, needed: int, floor: int) -> int:
    """Return how many bytes are missing to write so many and keep the floor free; 0 when there is room."""
    return max(0, needed + floor - free_bytes(places.root))


class UnitFetch:
    """One call that fetches units, beside other processes that do.

    `make_space` is called with the bytes needed, before the first byte and before each unit.
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
        """Have all of them in the cache; `fetched` says which this call brought.

        `is_good` is asked when a unit's lock is held.
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
                    hint=f"find out which: fuser {self._places.unit_lock(address)}",
                )
            if self._waiting:
                if len(self._waiting) < count or not self._waits_for:
                    largest = max(self._waiting.values(), key=size_of)
                    more = f" and {len(self._waiting) - 1} more" if len(self._waiting) > 1 else ""
                    self._waits_for = f"unit {largest.address[:12]} ({format_bytes(size_of(largest))}){more}"
                time.sleep(_PAUSE_S)

    def bring(self, unit: Unit) -> Path:
        """Unpack one unit, whose lock the caller holds, beside its place, and return where."""

        def once() -> None:
            for directory in unpack_each(self._prepared(unit), self._blobs, report=self._report):
                self._describe(directory, unit)

        self._try(once)
        return self._fresh(unit.address)

    def _try(self, work: Callable[[], None]) -> None:
        """Do it, and once more when that may help: bytes altered on their way, a disk that others filled."""
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
        raise AssertionError("the last try returns or raises")

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
        """Add what earlier rounds brought to what this one says, and for what it waits."""
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
    """Return what fetching units comes to, all of it done."""
    size = files = moved = 0
    for unit in units:
        size += sum(row.size for row in unit.rows)
        files += sum(row.has_content for row in unit.rows)
        moved += moved_bytes(unit)
    return ProgressPoint(
        phase="fetch", bytes_done=size, bytes_total=size, files_done=files, files_total=files, moved_bytes=moved
    )


def _read_small(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return file.read(_SMALL_FILE_BYTES)
