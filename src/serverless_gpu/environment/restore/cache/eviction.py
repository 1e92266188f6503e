"""Removes units when the cache is too large or the disk too full, and leftovers of killed processes.

    evicting (exclusive) ─ list everything · for each unit: lock it, move its environments aside, then the unit
    released             ─ delete the directories that were moved aside

The last use of a unit is its fetch, or the last restore of an environment that contains it. The cache evicts the least
recently used unit first, together with the environments that contain it. The cache never evicts a unit in use.

A restore records the units that it will use while it shares the lock `evicting` and holds the lock of its environment.
Therefore either the eviction reads the restore's record, or the restore starts later and detects the removed units.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from serverless_gpu.environment.restore.cache.cache_directory import (
    CachePaths,
    delete,
    locked,
    put_aside,
    read_document,
    try_lock,
)
from serverless_gpu.environment.restore.cache.unit_integrity import expose, exposed_since, linking_lock, suspects
from serverless_gpu.environment.restore.cache.unit_metadata import sweep_layers

LOCK_WAIT_S = 60.0
_ADDRESS = re.compile(r"[0-9a-f]{64}")
_LEFT = re.compile(r"\.(?P<what>new|old)-(?P<address>[0-9a-f]{64})(-[0-9a-f]{8})?")


def evict(places: CachePaths, excess: int, keep: Collection[str] = ()) -> int:
    """Remove units and their environments until `excess` bytes are freed or no more units can be removed."""
    gone: list[Path] = []
    freed = 0
    with locked(evicting_lock(places), wait_s=LOCK_WAIT_S):
        for step in plan_eviction(environments(places), units(places), excess=excess, keep=keep):
            aside = _carry_out(places, step)
            gone += aside
            freed += step.size if aside and aside[-1].parent.parent == places.units else 0
    for directory in gone:
        _delete_with_links(places, directory)
    if gone:
        sweep_layers(places)
    return freed


def forget(places: CachePaths, keep: int) -> None:
    """Remove unused environments except the `keep` most recently used, but keep their units."""
    gone: list[Path] = []
    with locked(evicting_lock(places), wait_s=LOCK_WAIT_S):
        unused = [each for each in environments(places) if not each.held]
        for each in sorted(unused, key=lambda each: each.used_ns, reverse=True)[keep:]:
            gone += _put_environment_aside(places, each.address) or []
    for directory in gone:
        _delete_with_links(places, directory)


def sweep(places: CachePaths) -> None:
    """Delete unfinished directories of dead processes, and replaced directories that no process uses."""
    # Without this lock, a concurrent sweep would briefly hold the same locks, and every environment would look in use.
    with locked(evicting_lock(places), wait_s=LOCK_WAIT_S):
        in_use = frozenset[str]().union(*(seen.units for seen in environments(places) if seen.held))
    for parent in (*_directories(places.units), places.trees):
        for directory in _directories(parent):
            if match := _LEFT.fullmatch(directory.name):
                address = match["address"]
                if match["what"] == "new":
                    _delete_if_free(places, directory, places.unit_lock(address))
                elif parent == places.trees:
                    _delete_if_free(places, directory, places.use_lock(address))
                elif address not in in_use:
                    delete(directory)


def evicting_lock(places: CachePaths) -> Path:
    """Return the lock of an eviction, which a restore shares while it records its units."""
    return places.locks / "evicting"


def units(places: CachePaths) -> list[CachedUnit]:
    """Return all units of the cache."""
    found = []
    for parent in _directories(places.units):
        for directory in _directories(parent):
            note = places.note(directory.name) if _ADDRESS.fullmatch(directory.name) else None
            if note is not None:
                with contextlib.suppress(FileNotFoundError):
                    used_ns = (directory / "note").stat().st_mtime_ns
                    found.append(CachedUnit(address=directory.name, size=note.size, used_ns=used_ns))
    return found


def environments(places: CachePaths) -> list[CachedEnvironment]:
    """Return all environments that this node has restored, with their last use and current use."""
    found = []
    for directory in _directories(places.trees):
        members = read_document(directory / "members", list[str]) if _ADDRESS.fullmatch(directory.name) else None
        if members is None:
            continue
        lock = try_lock(places.use_lock(directory.name))
        if lock is not None:
            os.close(lock)
        used_ns = 0
        with contextlib.suppress(FileNotFoundError):
            used_ns = (directory / "used").stat().st_mtime_ns
        environment = CachedEnvironment(
            address=directory.name, units=frozenset(members), used_ns=used_ns, held=lock is None
        )
        found.append(environment)
    return found


class CachedEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """A restored environment: its units, the time of its last use, and True while a process uses it."""

    address: str
    units: frozenset[str]
    used_ns: int
    held: bool


class CachedUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A unit in the cache: its size on the disk, and the time of its fetch."""

    address: str
    size: int
    used_ns: int


class EvictionStep(msgspec.Struct, frozen=True, kw_only=True):
    """A unit to remove, after the environments that contain the unit."""

    unit: str
    environments: tuple[str, ...]
    size: int


def plan_eviction(
    environments: Sequence[CachedEnvironment], units: Sequence[CachedUnit], *, excess: int, keep: Collection[str] = ()
) -> tuple[EvictionStep, ...]:
    """Return the units to remove, in order, until `excess` bytes are freed."""
    pinned = set(keep)
    used = {unit.address: unit.used_ns for unit in units}
    holders: dict[str, list[str]] = {}
    for environment in environments:
        if environment.held:
            pinned |= environment.units
        for address in environment.units & used.keys():
            used[address] = max(used[address], environment.used_ns)
            holders.setdefault(address, []).append(environment.address)
    steps: list[EvictionStep] = []
    for unit in sorted(units, key=lambda unit: (used[unit.address], unit.address)):
        if excess <= 0:
            break
        if unit.address not in pinned:
            made = tuple(sorted(holders.get(unit.address, ())))
            steps.append(EvictionStep(unit=unit.address, environments=made, size=unit.size))
            excess -= unit.size
    return tuple(steps)


def _carry_out(places: CachePaths, step: EvictionStep) -> list[Path]:
    """Move a unit's environments aside, then the unit, and return the moved directories.

    The step stops early if a process begins to use one of the environments. If the unit was moved, its directory is the
    last entry of the result.
    """
    aside: list[Path] = []
    for address in step.environments:
        moved = _put_environment_aside(places, address)
        if moved is None:
            return aside
        aside += moved
    lock = try_lock(places.unit_lock(step.unit))
    if lock is not None:
        try:
            with contextlib.suppress(FileNotFoundError):
                aside.append(put_aside(places.unit(step.unit)))
            places.unit_lock(step.unit).unlink(missing_ok=True)
        finally:
            os.close(lock)
    return aside


def _put_environment_aside(places: CachePaths, address: str) -> list[Path] | None:
    """Move an environment aside and remove its locks, or return None if a process uses it again."""
    moved: list[Path] = []
    lock = try_lock(places.use_lock(address))
    if lock is None:
        return None
    try:
        with contextlib.suppress(FileNotFoundError):
            moved.append(put_aside(places.environment(address)))
        making = try_lock(places.making_lock(address))
        if making is not None:
            places.making_lock(address).unlink(missing_ok=True)
            os.close(making)
        places.use_lock(address).unlink(missing_ok=True)
    finally:
        os.close(lock)
    return moved


def _delete_with_links(places: CachePaths, directory: Path) -> None:
    """Delete a directory of links, and record that its unchanged units stay unchanged.

    Removing a link changes the file's change time, so the next check would otherwise suspect the unit.
    """
    match = _LEFT.fullmatch(directory.name)
    if directory.parent != places.trees or match is None:
        delete(directory)
        return
    members = read_document(directory / "members", list[str])
    members = members or read_document(places.environment(match["address"]) / "members", list[str]) or []
    lock = try_lock(linking_lock(places))
    # Another process holds the linking lock. The next check then reads the files whose links this process deletes.
    if lock is None:
        delete(directory)
        return
    try:
        since = {unit: exposed_since(unit) for unit in map(places.unit, members)}
        right = [unit for unit, time in since.items() if time and suspects(unit, time) == ([], [])]
        delete(directory)
        for unit in right:
            expose(unit)
    finally:
        os.close(lock)


def _delete_if_free(places: CachePaths, directory: Path, lock_file: Path) -> None:
    lock = try_lock(lock_file)
    if lock is not None:
        try:
            _delete_with_links(places, directory)
        finally:
            os.close(lock)


def _directories(parent: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield parent / entry.name
