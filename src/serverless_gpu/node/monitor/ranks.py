"""Samples what ranks use of the host: CPU and memory of each rank's process and of its descendants.

    /proc ─ every pid once ─▶ whose descendant is it? ─▶ for those of ranks, every second: stat

A process gets its rank when it is first seen: asking every process of a large machine every second would cost more than
all else. A process whose parent has ended stays its rank's.

Failure cases: a process that ends while it is looked at counts no more (its CPU time is its parent's by then, if that
one waited for it); memory that processes share is counted in each, as in any list of processes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import NamedTuple

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Key = tuple[str, int]
"""An attempt, and a global rank of it."""


class RankLook(NamedTuple):
    """One rank with its children at one moment; CPU since the look before, None at the first."""

    cpu_percent: float | None
    memory_bytes: int
    pids: tuple[int, ...]


class Stat(NamedTuple):
    """The parent of a process, and what it has used."""

    parent: int
    cpu_s: float
    memory_bytes: int


class RankProcesses:
    """Looks at the processes of ranks."""

    def __init__(self) -> None:
        self._roots: dict[int, Key] = {}
        self._owners: dict[int, Key | None] = {}
        self._before: dict[Key, tuple[int, float]] = {}

    def look(self, at_ns: int, roots: Mapping[int, Key]) -> dict[Key, RankLook]:
        """Return the usage of each rank; `at_ns` is of a clock that does not jump, `roots` maps pids to ranks."""
        if roots != self._roots:
            # Ranks were forked before it was known that they would be: their children may belong to another rank yet.
            self._roots, self._owners = dict(roots), dict(roots)
        self._find_owners()
        sums: dict[Key, tuple[float, int, tuple[int, ...]]] = {key: (0.0, 0, ()) for key in roots.values()}
        for pid, owner in self._owners.items():
            stat = None if owner is None else read_stat(pid)
            if owner is not None and stat is not None:
                cpu_s, memory_bytes, pids = sums[owner]
                sums[owner] = (cpu_s + stat.cpu_s, memory_bytes + stat.memory_bytes, (*pids, pid))
        looks = {
            key: RankLook(self._cpu_percent(key, at_ns, cpu_s), memory_bytes, pids)
            for key, (cpu_s, memory_bytes, pids) in sums.items()
            if pids
        }
        self._before = {key: (at_ns, sums[key][0]) for key in looks}
        return looks

    def _find_owners(self) -> None:
        if not self._roots:
            self._owners = {}
            return
        there = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._owners = {pid: owner for pid, owner in self._owners.items() if pid in there}
        parents = {pid: stat.parent for pid in there - self._owners.keys() if (stat := read_stat(pid)) is not None}
        for pid in parents:
            self._owners[pid] = self._owner(pid, parents)

    def _owner(self, pid: int, parents: Mapping[int, int]) -> Key | None:
        for _ in range(len(parents) + 1):
            if pid in self._owners:
                return self._owners[pid]
            if pid not in parents:
                return None
            pid = parents[pid]
        return None

    def _cpu_percent(self, key: Key, at_ns: int, cpu_s: float) -> float | None:
        if key not in self._before:
            return None
        before_ns, before_s = self._before[key]
        if at_ns <= before_ns:
            return None
        return round(max(0.0, cpu_s - before_s) / (at_ns - before_ns) * 1e11, 1)


def read_stat(pid: int) -> Stat | None:
    """Return the parent, CPU time and memory of a process, or None where it has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()  # a program may have any name
        # Of children that ended it has their time, once it waited for them.
        ticks = sum(int(field) for field in fields[11:15])
        return Stat(int(fields[1]), ticks * _TICK_S, int(fields[21]) * _PAGE_BYTES)
    return None
