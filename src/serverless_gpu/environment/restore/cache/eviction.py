"""Evicts units from a large cache or a full disk, and deletes leftovers of killed processes.

    evicting (exclusive) ─ list everything · for each unit: lock it, move its environments aside, then the unit
    released             ─ delete the directories that were moved aside

A unit's last use is its fetch, or the latest restore of an environment that contains the unit. The cache evicts the
least recently used unit first, together with all environments that contain the unit. The cache never evicts a unit in
use.

Before a restore uses units, the restore records the units under the shared lock `evicting`. An eviction holds the lock
`evicting` exclusively. The eviction therefore sees the record of every earlier restore. A later restore sees the
evicted units as missing.
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
    """Evict units and their environments until `excess` bytes are free or all remaining units are in use."""
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
    """Remove unused environments, except the `keep` most recently used, without removing units."""
    gone: list[Path] = []
    with locked(evicting_lock(places), wait_s=LOCK_WAIT_S):
        unused = [each for each in environments(places) if not each.held]
        for each in sorted(unused, key=lambda each: each.used_ns, reverse=True)[keep:]:
            gone += _put_environment_aside(places, each.address) or []
    for directory in gone:
        _delete_with_links(places, directory)


def sweep(places: CachePaths) -> None:
    """Delete unfinished directories of exited processes, and replaced directories without users."""
    # Without the eviction lock, every environment would seem in use while a concurrent sweep holds environment locks.
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
    """Return the lock that an eviction holds, and that restores share while recording their units."""
    return places.locks / "evicting"


def units(places: CachePaths) -> list[CachedUnit]:
    """Return all units in the cache."""
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
    """Return all environments in the cache, with their last use and current use."""
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
    """A restored environment: its units, the time of its last use, and a flag for current use."""

    address: str
    units: frozenset[str]
    used_ns: int
    held: bool


class CachedUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A unit in the cache: address, size on disk, and fetch time."""

    address: str
    size: int
    used_ns: int


class EvictionStep(msgspec.Struct, frozen=True, kw_only=True):
    """Removal of one unit and of all environments that contain the unit."""

    unit: str
    environments: tuple[str, ...]
    size: int


def plan_eviction(
    environments: Sequence[CachedEnvironment], units: Sequence[CachedUnit], *, excess: int, keep: Collection[str] = ()
) -> tuple[EvictionStep, ...]:
    """Choose the units to evict, in order, to free `excess` bytes."""
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
    """Move a unit's environments and the unit aside, and return the moved directories.

    If a process has started to use one of the environments, the eviction step stops early. The last entry of the result
    is the unit's directory, unless the unit stayed in place.
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
    """Move an environment aside and remove its locks, or return None for an environment in use."""
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
    """Delete a moved directory, and record that the linked units are still intact.

    Removing a link changes the file's change time. Without the record of intact links, the next check would suspect the
    unit.
    """
    match = _LEFT.fullmatch(directory.name)
    if directory.parent != places.trees or match is None:
        delete(directory)
        return
    members = read_document(directory / "members", list[str])
    members = members or read_document(places.environment(match["address"]) / "members", list[str]) or []
    lock = try_lock(linking_lock(places))
    # Without the linking lock, the next check must read the files whose links this process deletes.
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
