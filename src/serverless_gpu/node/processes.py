"""Ending a tree of processes, and proving that it ended.

An attempt's processes are all below its stem. Where cgroup v2 is writable the stem sits in a cgroup of its own and one
write to `cgroup.kill` ends everything, whatever detached itself; `cgroup.events` says when it is empty. Elsewhere the
stem is the sub-reaper and ends its descendants itself. Nothing is ever ended by name.

    /sys/fs/cgroup[/unified]/<our own place>/serverless_gpu-<home>/<number>/    one per stem

Memory: a limit is set where a memory controller is at hand, v2 first, v1 (hybrid hosts) for want of it. Whether a rank
died of memory is read from the controller's counters, without one from the kernel's global counter, never from an exit
code.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_MOUNT_LINE = re.compile(r"^\d+ \d+ \S+ (?P<root>\S+) (?P<point>\S+) .* - (?P<kind>\S+) \S+ (?P<options>\S+)$")


class CgroupRoot:
    """The directory below which one agent makes a cgroup for each stem.

    Args:
        path: the directory, or None where cgroup v2 cannot be used.
        problem: why not, in words, else "".
    """

    def __init__(self, path: Path | None, problem: str = "") -> None:
        self.path = path
        self.problem = problem
        self._count = 0

    def make(self) -> Path | None:
        """Make a cgroup for one stem, or return None."""
        if self.path is None:
            return None
        self._count += 1
        path = self.path / f"{os.getpid()}-{self._count}"
        try:
            path.mkdir()
        except OSError:
            return None
        return path

    def sweep(self) -> None:
        """Remove cgroups that are empty: what stems of earlier attempts left."""
        if self.path is None:
            return
        with contextlib.suppress(OSError):
            for entry in self.path.iterdir():
                if entry.is_dir():
                    remove_cgroup(entry)


def find_cgroup_root(name: str, *, wanted: bool = True) -> CgroupRoot:
    """Return where this process may make cgroups.

    Args:
        name: directory name below our own place, unique to one user's home.
        wanted: False to go without, as `SERVERLESS_GPU_CGROUPS=0` asks for.
    """
    if not wanted:
        return CgroupRoot(None, "switched off by SERVERLESS_GPU_CGROUPS=0")
    mount = _mount_point("cgroup2", "")
    place = _own_place("")
    if mount is None or place is None:
        return CgroupRoot(None, "cgroup v2 is not mounted")
    path = mount / place.lstrip("/") / name
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        return CgroupRoot(None, f"{path.parent} is not ours to write ({error.strerror})")
    if not (path / "cgroup.kill").exists():
        return CgroupRoot(None, "this kernel has no cgroup.kill (needs 5.14)")
    with contextlib.suppress(OSError):  # controllers our parent does not hand down are simply not used
        (path / "cgroup.subtree_control").write_text("+memory +pids")
    return CgroupRoot(path)


def kill_cgroup(path: Path) -> None:
    """End every process in a cgroup, atomically."""
    with contextlib.suppress(FileNotFoundError):
        (path / "cgroup.kill").write_text("1")


def cgroup_empty(path: Path) -> bool:
    """Return whether no process is left in a cgroup."""
    try:
        return "populated 0" in (path / "cgroup.events").read_text()
    except FileNotFoundError:
        return True


def remove_cgroup(path: Path) -> bool:
    """Remove an empty cgroup and those below it; return whether it is gone."""
    with contextlib.suppress(OSError):
        for entry in path.iterdir():
            if entry.is_dir():
                remove_cgroup(entry)
    with contextlib.suppress(FileNotFoundError):
        try:
            path.rmdir()
        except OSError:
            return False
    return True


class MemoryWatch:
    """The memory limit of one attempt and the kernel's word on whether it was hit.

    Args:
        cgroup: the stem's v2 cgroup, or None.
        stem_pid: the stem, for the v1 controller.
        limit_bytes: the limit, or None for none.
    """

    def __init__(self, cgroup: Path | None, stem_pid: int, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.note = ""
        self._v1: Path | None = None
        self._v2 = cgroup if cgroup is not None and (cgroup / "memory.max").exists() else None
        self._kernel_kills = _kernel_oom_kills()
        if limit_bytes is None:
            return
        if self._v2 is not None:
            (self._v2 / "memory.max").write_text(str(limit_bytes))
            with contextlib.suppress(OSError):
                (self._v2 / "memory.oom.group").write_text("1")
        elif not self._limit_v1(stem_pid, limit_bytes):
            self.note = "memory= is not enforced: no memory controller can be written to on this machine"

    def out_of_memory(self) -> bool:
        """Return whether the kernel ended a process of this attempt for memory, as far as can be known."""
        if self._v2 is not None:
            return _counter(self._v2 / "memory.events", "oom_kill") > 0
        if self._v1 is not None:
            return _counter(self._v1 / "memory.oom_control", "oom_kill") > 0
        return _kernel_oom_kills() > self._kernel_kills

    def peak_bytes(self) -> int | None:
        """Return the attempt's peak of host memory where the controller knows it."""
        for path in (self._v2 and self._v2 / "memory.peak", self._v1 and self._v1 / "memory.max_usage_in_bytes"):
            if path is not None:
                with contextlib.suppress(OSError, ValueError):
                    return int(path.read_text())
        return None

    def close(self) -> None:
        """Remove the v1 group."""
        if self._v1 is not None:
            remove_cgroup(self._v1)

    def _limit_v1(self, stem_pid: int, limit_bytes: int) -> bool:
        mount, place = _mount_point("cgroup", "memory"), _own_place("memory")
        if mount is None or place is None:
            return False
        path = mount / place.lstrip("/") / f"serverless_gpu-{stem_pid}"
        try:
            path.mkdir()
            (path / "memory.limit_in_bytes").write_text(str(limit_bytes))
            (path / "cgroup.procs").write_text(str(stem_pid))
        except OSError:
            remove_cgroup(path)
            return False
        self._v1 = path
        return True


def _mount_point(kind: str, controller: str) -> Path | None:
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            match = _MOUNT_LINE.match(line.strip())
            if match and match["kind"] == kind and (not controller or controller in match["options"].split(",")):
                return Path(match["point"])
    return None


def _own_place(controller: str) -> str | None:
    """Return our cgroup's path below the mount, from lines such as ``0::/user.slice`` or ``4:memory:/x``."""
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controller in controllers.split(","):
                return path
    return None


def _counter(path: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def _kernel_oom_kills() -> int:
    return _counter(Path("/proc/vmstat"), "oom_kill")
