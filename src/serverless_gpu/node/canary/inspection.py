"""Inspects a run of the canary from outside: its processes, its limits, and what it left behind."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from serverless_gpu.model.canary import Trial
from serverless_gpu.node.canary.targets import unlink_queue
from serverless_gpu.node.inside.canary.base import libc
from serverless_gpu.node.processes.process_tree import TASKS_MAX, memory_limit_bytes, mount_point, own_place
from serverless_gpu.units import format_bytes

_IPC_RMID = 0
LEAVE_PROCESS = "leave-process"


def marked(mark: str) -> list[int]:
    """Return the pids of processes with a mark among their arguments, parents first."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return sorted(found, key=lambda pid: (parent(pid) in found, pid))


def parent(pid: int) -> int:
    """Return the parent of a process, or 0."""
    with contextlib.suppress(OSError, ValueError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[1])
    return 0


def name_of(pid: int) -> str:
    """Return the name of a process, or ""."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return ""


def process_limit(pid: int) -> Trial:
    """Return if a process may start more processes than an attempt may have, by its cgroup."""
    for kind, controller in (("cgroup2", ""), ("cgroup", "pids")):
        mount, place = mount_point(kind, controller), own_place(controller, pid)
        if mount is None or place is None:
            continue
        with contextlib.suppress(OSError, ValueError):
            limit = int((mount / place.lstrip("/") / "pids.max").read_text())
            if limit <= TASKS_MAX:
                return Trial("refused", f"at most {limit} processes")
    return Trial("possible", "no cgroup limits the number of processes")


def memory_limit(pid: int) -> Trial:
    """Return if a process may use all memory that this process may use, by its cgroup."""
    limit, own = memory_limit_bytes(pid), memory_limit_bytes()
    if limit is not None and (own is None or limit < own):
        return Trial("refused", f"at most {format_bytes(limit)}")
    return Trial("possible", "no cgroup limits the memory")


def available_memory_bytes() -> int:
    """Return the memory that new programs can use without swapping, or 0 if unknown."""
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def remains(mark: str, key: int) -> dict[str, Trial]:
    """Return what a run left behind, by attempt, and remove the remains."""
    processes = marked(mark)
    for pid in processes:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    segment = libc.shmget(key, 0, 0)
    if segment >= 0:
        libc.shmctl(segment, _IPC_RMID, None)
    found = {
        LEAVE_PROCESS: bool(processes),
        "leave-file": _removed(Path("/tmp", mark)),
        "leave-segment": _removed(Path("/dev/shm", mark)),
        "leave-shared-memory": segment >= 0,
        "leave-message-queue": unlink_queue(mark),
    }
    there, gone = Trial("possible", "it remained after the end"), Trial("refused", "nothing remained after the end")
    return {name: there if left else gone for name, left in found.items()}


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
