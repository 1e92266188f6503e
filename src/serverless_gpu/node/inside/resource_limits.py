"""Resource limits of ranks that run as a principal (isolation levels `user` and `sandbox`).

    limit     soft limit                        hard limit
    core      0                                 0: a memory image would contain the secrets of the run
    nofile    the caller's (`rank.py`)          the node's, at most 1,048,576
    memlock   the hard limit                    the node's: `ibv_reg_mr` counts the memory of InfiniBand transfers
    nproc     the hard limit                    the node's; without a pids cgroup, at most the limit of an attempt

All other limits are the node's. The kernel counts `nproc` for all attempts of a principal together. A pids cgroup
limits each attempt separately, so `nproc` has a value only where no pids controller exists. A stem never raises a hard
limit, because only a process with CAP_SYS_RESOURCE may raise it.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping

DESCRIPTORS_MAX = 1 << 20
"""The default value of fs.nr_open, which bounds the limit of each process."""
_KINDS = (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_NPROC)


def limit_resources(tasks_max: int) -> None:
    """Set the limits of this process and its descendants. A pids cgroup replaces `tasks_max` (then 0)."""
    current = {kind: resource.getrlimit(kind) for kind in _KINDS}
    for kind, limits in wanted_limits(current, tasks_max).items():
        resource.setrlimit(kind, limits)


def wanted_limits(current: Mapping[int, tuple[int, int]], tasks_max: int) -> dict[int, tuple[int, int]]:
    """Return the soft and hard limits of a rank for the current limits of its stem."""
    hard = {kind: limits[1] for kind, limits in current.items()}
    descriptors = _lower(hard[resource.RLIMIT_NOFILE], DESCRIPTORS_MAX)
    tasks = _lower(hard[resource.RLIMIT_NPROC], tasks_max or resource.RLIM_INFINITY)
    return {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NOFILE: (_lower(current[resource.RLIMIT_NOFILE][0], descriptors), descriptors),
        resource.RLIMIT_MEMLOCK: (hard[resource.RLIMIT_MEMLOCK], hard[resource.RLIMIT_MEMLOCK]),
        resource.RLIMIT_NPROC: (tasks, tasks),
    }


def _lower(one: int, other: int) -> int:
    if resource.RLIM_INFINITY in (one, other):
        return other if one == resource.RLIM_INFINITY else one
    return min(one, other)
