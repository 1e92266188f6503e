"""Ray telemetry of a node: its values, their names in MLflow, and the file in which a node leaves them.

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
    """

    cpus: float | None = None  # CPUs Ray has to give
    cpus_used: float | None = None  # given to tasks, actors and placement groups
    gpus: float | None = None  # GPUs Ray has to give
    gpus_used: float | None = None  # given to tasks, actors and placement groups
    object_store_bytes: float | None = None  # used of the object store
    object_store_free_bytes: float | None = None  # free in the object store
    objects: float | None = None
    spilled_bytes: float | None = None  # of objects that lie on the disk because the object store was full
    tasks_pending: float | None = None  # which wait for arguments, for resources or for their turn
    tasks_running: float | None = None  # which run
    tasks_finished: float | None = None  # which have ended, since the cluster began
    tasks_failed: float | None = None  # which have failed, since the cluster began
    tasks_infeasible: float | None = None  # which ask for more than any node has, and wait for ever
    actors: float | None = None  # which run
    actors_pending: float | None = None  # which wait to be made
    actors_restarting: float | None = None  # which are made again
    actors_dead: float | None = None  # which have ended
    placement_groups: float | None = None  # which are made
    placement_groups_pending: float | None = None  # which wait for resources
    workers: float | None = None
    workers_out_of_memory: float | None = None  # workers Ray has ended because the node's memory ran out
    cpu_percent: float | None = None  # of the node, as Ray sees it
    memory_bytes: float | None = None  # of the node, as Ray sees it
    memory_total_bytes: float | None = None  # of the node, as Ray sees it


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
    """Return what a node's file says; None where it says nothing of now, or is not such a file."""
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
