"""Isolation levels: how far a node separates the runs of different principals."""

from __future__ import annotations

from typing import Literal

Level = Literal["none", "user", "sandbox"]
NONE: Level = "none"
"""All runs of a node share the uid of its agent."""
USER: Level = "user"
"""Each principal has its own uid. All principals see the same files, processes and devices of the node."""
SANDBOX: Level = "sandbox"
"""Each principal has its own uid. Each attempt has private files, processes, devices and interprocess communication."""
LEVELS: tuple[Level, ...] = (NONE, USER, SANDBOX)
"""All levels, the weakest first."""


def reaches(offered: str, minimum: str) -> bool:
    """Return True if a node's level satisfies the minimum of a pool. An unknown level counts as `NONE`."""
    return _rank(offered) >= _rank(minimum)


def lowers(before: str, after: str) -> bool:
    """Return True if a change of a pool's isolation gives principals less protection from each other.

    A value that is not a level, such as `unset`, means that the pool serves one principal without isolation.
    """
    return _rank(after) < _rank(before) or (before not in LEVELS and after == NONE)


def _rank(level: str) -> int:
    return next((number for number, known in enumerate(LEVELS) if known == level), 0)
