"""Inspects the sandbox of a running zygote: its processes and its memory.

    keeper ─ member (1) ─ holder (…, 1) ─ zygote (…, 2) ─ stem (…, …, 1) ─ ranks      pids in nested namespaces
                              └─ any other process with two inner pids belongs to no run

All processes of a sandbox are descendants of its keeper, because no process can leave its pid namespace. A process that
code of `.pth` files starts is therefore visible here, even if it is in no cgroup of a run.

Failure cases: If a process ends during the inspection, the result lacks it. If the zygote ends, its
memory is 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from serverless_gpu.node.inside.linux import children
from serverless_gpu.node.inside.sandbox import PRINCIPAL_DEPTH
from serverless_gpu.node.processes.process_tree import look_at, namespace_pids

ZYGOTE_PID = 2
"""Pid of a zygote in the pid namespace of its sandbox. Pid 1 is the holder, which forks only the zygote."""
_PROCESSES_MAX = 1_000
_NAMED_MAX = 3


class SandboxProcess(NamedTuple):
    """A process of a sandbox. `pids` are its pids in each pid namespace, this node's first."""

    pids: tuple[int, ...]
    name: str


def strangers(processes: Iterable[SandboxProcess], stems: Collection[int]) -> tuple[SandboxProcess, ...]:
    """Return the processes of a sandbox that neither the sandbox nor an attempt needs.

    `stems` are pids of this node. `processes` lacks the processes below `stems`, which belong to attempts.
    """
    return tuple(each for each in processes if each.pids[0] not in stems and not _is_needed(each.pids[1:]))


def _is_needed(inner: tuple[int, ...]) -> bool:
    """Return True for the keeper, the first process of each namespace of the sandbox, and the zygote."""
    if len(inner) > PRINCIPAL_DEPTH:
        return False  # The process is in an attempt's namespace, below a stem that the zygote did not report.
    return not inner or inner[-1] == 1 or (len(inner) == PRINCIPAL_DEPTH and inner[-1] == ZYGOTE_PID)


def strangers_text(found: Sequence[SandboxProcess]) -> str:
    """Return the reason to replace a zygote whose sandbox contains processes of no run."""
    names = ", ".join(repr(each.name) for each in found[:_NAMED_MAX])
    more = f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
    return f"processes of no run were in the sandbox of the previous interpreter: {names}{more}"


def sandbox_processes(keeper: int, stems: Collection[int]) -> list[SandboxProcess]:
    """Return the processes of a sandbox, without the processes below `stems`."""
    found: list[SandboxProcess] = []
    queue = [keeper]
    while queue and len(found) < _PROCESSES_MAX:
        pid = queue.pop()
        seen = look_at(pid)
        if seen is not None:
            found.append(SandboxProcess(tuple(namespace_pids(pid)) or (pid,), seen.name))
        queue += [] if pid in stems else children(pid)
    return found


def memory_of(pids: Iterable[int]) -> int:
    """Return the memory of processes in bytes, where each sharer of a page counts for its part (PSS)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):  # The process has ended.
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
            total += next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
    return total
