"""Decides which zygotes end, and why. The reason becomes the cold-start reason of the next run.

    end of an attempt        ─▶ `abnormal_end`    killed, out of memory, signal, stem or supervisor lost …
    mounts of the zygote     ─▶ `Zygote.damage`   differ from the mounts that the launcher made
    processes of its sandbox ─▶ `strangers`       belong to neither the zygote nor a stem (`isolation/inspection.py`)
    number and memory        ─▶ `excess`          too many zygotes, or too much memory for all zygotes

A zygote runs code of its principal, with capabilities of the principal's own user namespace. A damaged zygote can only
harm later attempts of the same principal. The agent ends the zygote at the first sign of damage, because no check
proves that a process is undamaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from serverless_gpu.model.lifecycle.attempt import MEANINGS, Reason, Stopped
from serverless_gpu.node.agent.zygotes import Key
from serverless_gpu.units import format_bytes

ZYGOTES_MAX = 4
"""Maximum number of one owner's zygotes without an open session."""
ALL_ZYGOTES_MAX = 16
"""Maximum number of all owners' zygotes without an open session."""
MEMORY_SHARE = 4
"""All zygotes together may use one part of this number of parts of the memory, but at least `MEMORY_BYTES_MIN`."""
MEMORY_BYTES_MIN = 1 << 30

ORDERLY = frozenset(
    {
        *(Reason.COMPLETED, Reason.RANK_RAISED, Reason.GPU_OOM, Reason.SYSTEM_EXIT, Reason.RANK_INTERRUPTED),
        *(Reason.RANK_CANCELLED, Reason.RESULT_UNSERIALISABLE, Reason.RESULT_TOO_LARGE, Reason.RESULT_STORAGE),
        *(Reason.COMMAND_FAILED, Reason.CANCELLED, Reason.TIMEOUT, Reason.BUDGET, Reason.PREEMPTED, Reason.DRAINED),
        *(Reason.IDLE, Reason.NODE_PARTITIONED, Reason.PEER_FAILED, Reason.NODES_APART, Reason.RENDEZVOUS),
        *(Reason.GANG_START, Reason.REFUSED, Reason.SESSION_ENDED, Reason.SECRET_MISSING, Reason.NODE_DISK),
        *(Reason.ENV_CORRUPT, Reason.ENV_UNAVAILABLE, Reason.RESULT_UPLOAD, Reason.NO_PROGRESS, Reason.UNSATISFIABLE),
    }
)
"""Reasons after which all ranks of an attempt ended by themselves or on request, or never started."""


def abnormal_end(stopped: Stopped | None) -> str:
    """Return the reason to replace the zygote of an ended attempt, or "". None means an unknown end."""
    if stopped is None:
        return "the end of the previous run of this interpreter is unknown"
    if not stopped.proven:
        return "processes of the previous run of this interpreter could not be ended"
    if stopped.reason not in ORDERLY:
        return f"the previous run of this interpreter ended abnormally: {MEANINGS[stopped.reason].sentence}"
    if stopped.killed:
        return "ranks of the previous run of this interpreter did not stop and were killed"
    return ""


class ZygoteUsage(NamedTuple):
    """Use of one zygote. `is_kept` is True for the zygote of an open session, which does not end."""

    key: Key
    used_ns: int
    memory_bytes: int
    is_kept: bool = False


def excess(zygotes: Sequence[ZygoteUsage], memory_max: int) -> dict[Key, str]:
    """Return the zygotes that end because there are too many or they use too much memory, with the reason.

    The zygote that was used last never ends for another zygote's memory. Of zygotes used at the same time, the first in
    `zygotes` counts as the oldest.
    """
    found: dict[Key, str] = {}
    latest_first = sorted((each for each in zygotes if not each.is_kept), key=lambda each: each.used_ns)[::-1]
    staying: list[str] = []  # Owners of the zygotes that stay.
    for each in latest_first:
        if staying.count(each.key.owner) >= ZYGOTES_MAX:
            found[each.key] = f"{ZYGOTES_MAX} other interpreters were used more recently"
        elif len(staying) >= ALL_ZYGOTES_MAX:
            found[each.key] = f"{ALL_ZYGOTES_MAX} other interpreters were used more recently"
        elif each.memory_bytes > memory_max:
            used = format_bytes(each.memory_bytes)
            found[each.key] = f"the previous interpreter used {used}, more than all interpreters together may use"
        else:
            staying.append(each.key.owner)
    total = sum(each.memory_bytes for each in zygotes if each.key not in found)
    for each in reversed([each for each in latest_first[1:] if each.key not in found]):
        if total > memory_max:
            limit = format_bytes(memory_max)
            found[each.key] = f"all interpreters used more than {limit}, and others were used more recently"
            total -= each.memory_bytes
    return found
