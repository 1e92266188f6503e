"""Which units of a node's cache go when it is too large, or the disk too full: pure, from what was seen to a list.

A unit was last used when the last environment that holds it was restored, or when it was fetched. The unit that has not
been used for longest goes first, together with the environments made of it; what somebody uses now never goes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec


class CachedEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """An environment that was restored: its units, when it was last asked for, and whether somebody uses it now."""

    address: str
    units: frozenset[str]
    used_ns: int
    held: bool


class CachedUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A unit in the cache: the bytes it takes, and when it was fetched."""

    address: str
    size: int
    used_ns: int


class EvictionStep(msgspec.Struct, frozen=True, kw_only=True):
    """One unit to remove, after the environments that were made of it."""

    unit: str
    environments: tuple[str, ...]
    size: int


def plan(
    environments: Sequence[CachedEnvironment], units: Sequence[CachedUnit], *, excess: int, keep: Collection[str] = ()
) -> tuple[EvictionStep, ...]:
    """Return what to remove, in this order, until enough is gone.

    Args:
        environments: all that were restored here.
        units: all in the cache.
        excess: bytes that should go.
        keep: units that stay in any case.
    """
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
