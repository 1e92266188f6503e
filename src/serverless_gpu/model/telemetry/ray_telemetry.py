"""What Ray tells of a node: its values, the names they have in MLflow, and the file in which a node leaves them.

<attempt>/ray/<node rank>.metrics.json ─▶ read_ray() ─▶ RaySample ─▶ a Sample's `ray` ─▶ ray/node_<i>/…
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import msgspec

RAY_BYTES_MAX = 1 << 16
"""Of the file; one that is larger is none of ours."""

_FRESH_NS = 30 * 1_000_000_000  # three of the monitor's looks


class RaySample(msgspec.Struct, frozen=True, array_like=True):
    """One node's Ray at one moment; None is "not known".

    Tasks are counted where they run, those that wait or have ended where their owner is. What only the head knows has
    values on its node: placement groups, and actors that do not run yet or any more.

    Attributes:
        cpus: CPUs Ray has to give.
        cpus_used: given to tasks, actors and placement groups.
        gpus: GPUs Ray has to give.
        gpus_used: given to tasks, actors and placement groups.
        object_store_bytes: used of the object store.
        object_store_free_bytes: free in the object store.
        objects: in the object store.
        spilled_bytes: of objects that lie on the disk because the object store was full.
        tasks_pending: which wait for arguments, for resources or for their turn.
        tasks_running: which run.
        tasks_finished: which have ended, since the cluster began.
        tasks_failed: which have failed, since the cluster began.
        tasks_infeasible: which ask for more than any node has, and wait for ever.
        actors: which run.
        actors_pending: which wait to be made.
        actors_restarting: which are made again.
        actors_dead: which have ended.
        placement_groups: which are made.
        placement_groups_pending: which wait for resources.
        workers: processes of workers.
        workers_out_of_memory: workers Ray has ended because the node's memory ran out.
        cpu_percent: of the node, as Ray sees it.
        memory_bytes: of the node, as Ray sees it.
        memory_total_bytes: of the node, as Ray sees it.
    """

    cpus: float | None = None
    cpus_used: float | None = None
    gpus: float | None = None
    gpus_used: float | None = None
    object_store_bytes: float | None = None
    object_store_free_bytes: float | None = None
    objects: float | None = None
    spilled_bytes: float | None = None
    tasks_pending: float | None = None
    tasks_running: float | None = None
    tasks_finished: float | None = None
    tasks_failed: float | None = None
    tasks_infeasible: float | None = None
    actors: float | None = None
    actors_pending: float | None = None
    actors_restarting: float | None = None
    actors_dead: float | None = None
    placement_groups: float | None = None
    placement_groups_pending: float | None = None
    workers: float | None = None
    workers_out_of_memory: float | None = None
    cpu_percent: float | None = None
    memory_bytes: float | None = None
    memory_total_bytes: float | None = None


_MEGABYTES = {
    "object_store_bytes": "object_store_usage_megabytes",
    "object_store_free_bytes": "object_store_available_megabytes",
    "spilled_bytes": "object_store_spilled_megabytes",
    "memory_bytes": "memory_usage_megabytes",
    "memory_total_bytes": "memory_total_megabytes",
}
_OTHERS = {"cpu_percent": "cpu_utilization_percentage"}


def ray_series(node_rank: int, sample: RaySample) -> dict[str, float]:
    """Return a sample's values by the names they have in MLflow; what is not known has no entry."""
    values: dict[str, float] = {}
    for field, name, per in _named(node_rank):
        value = getattr(sample, field)
        if value is not None:
            values[name] = value / per
    return values


def read_ray(data: bytes, now_ns: int) -> RaySample | None:
    """Return what a node's file says; None where it says nothing of now, or is not such a file.

    Args:
        data: of the file.
        now_ns: boottime of this machine, whose moments the file has.
    """
    if len(data) > RAY_BYTES_MAX:
        return None
    try:
        file = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if abs(now_ns - file.at_ns) > _FRESH_NS:
        return None
    known = {name: file.figures[name] for name in RaySample.__struct_fields__ if name in file.figures}
    return RaySample(**{name: round(value, 2) for name, value in known.items() if math.isfinite(value)})


class _File(msgspec.Struct, frozen=True):
    at_ns: int
    figures: Mapping[str, float]


_decoder = msgspec.json.Decoder(_File)


@functools.lru_cache(maxsize=256)
def _named(node_rank: int) -> tuple[tuple[str, str, float], ...]:
    """Return field, name and divisor of each series of a node."""
    prefix = f"ray/node_{node_rank}/"
    return tuple(
        (field, prefix + (_MEGABYTES.get(field) or _OTHERS.get(field) or field), 1e6 if field in _MEGABYTES else 1.0)
        for field in RaySample.__struct_fields__
    )
