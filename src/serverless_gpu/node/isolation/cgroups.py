"""Containment of a zygote: the cgroups it starts in, and the end of everything that is left in them.

    launcher enters ──▶ zygote, its start-up code, what that starts ──▶ killed with the zygote
                          └─ stem ──▶ moves to cgroups of its own, and lives on

`.pth` files, `sitecustomize` and the modules that a zygote preloads are the user's code and may start processes. Those
belong to no run: no run pays for them, and no supervisor ends them.

Failure cases: no cgroup can be made (the zygote's descendants are killed instead: what detached itself is one of them
as long as the zygote lives); a stem could not leave (it and its ranks are spared).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from serverless_gpu.node.inside.linux import descendants
from serverless_gpu.node.processes.process_tree import Left, cgroup_pids, kill_cgroup, look_at, remove_cgroup

LEAVING_S = 5.0  # in which a stem that was forked last has to have left
_STEMS_MAX = 4_096


class Containment:
    """Containment of one zygote: its cgroups, the v2 one first; none where nothing can be made."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self.paths = paths
        self._pid = 0
        self._stems: dict[int, Left] = {}
        self._all_can_leave = True
        self._ended_ns = 0

    def hold(self, pid: int) -> None:
        """Note which process it contains."""
        self._pid = pid

    def note_stem(self, pid: int) -> None:
        """Note a stem, which leaves and outlives the zygote."""
        seen = look_at(pid)
        if seen is not None:
            self._stems[pid] = seen
        while len(self._stems) > _STEMS_MAX:
            self._stems.pop(next(iter(self._stems)))

    def note_stem_cgroups(self, paths: tuple[Path, ...]) -> None:
        """Note what a stem is to move to; without a cgroup of its own it stays in these."""
        self._all_can_leave = self._all_can_leave and len(paths) >= len(self.paths)

    def end(self, now_ns: int) -> bool:
        """Kill all processes in it, except stems that have not left yet; return whether nothing is left.

        Call it again until it returns True; `now_ns` is boottime.
        """
        self._ended_ns = self._ended_ns or now_ns
        stems = [pid for pid, stem in self._stems.items() if stem.is_there()]
        spared = {*stems, *(pid for stem in stems for pid in descendants(stem))}
        if not self.paths:
            _kill(pid for pid in descendants(self._pid) if pid not in spared)
            return True
        if self._all_can_leave and now_ns - self._ended_ns > LEAVING_S * 1e9:
            spared = set()
        for path in self.paths:
            pids = cgroup_pids(path)
            if not spared.intersection(pids):
                kill_cgroup(path)
            _kill(pid for pid in pids if pid not in spared)
        return all([remove_cgroup(path) for path in self.paths])


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
