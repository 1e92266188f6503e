"""The Ray cluster of one run: what is asked of it, and how large it is made.

Ray counts CPUs, GPUs and memory; it isolates none of them. So the figures here say what a node offers to the tasks of
this run, and what is measured (memory, room in /dev/shm) comes from outside.
"""

from __future__ import annotations

from serverless_gpu.model.spec import OBJECT_STORE_BYTES_MAX, OBJECT_STORE_BYTES_MIN
from serverless_gpu.units import format_bytes

_OF_MEMORY = 0.3  # Ray's own default share
_OF_SHARED = 0.9  # of what /dev/shm has for the run; a store that does not fit there falls back to the disk


def object_store_bytes(memory_bytes: int, shared_bytes: int, asked: int | None = None) -> int:
    """Return how large a node's object store is made.

    What was asked for is only ever cut to what /dev/shm has for the run.
    """
    wanted = asked if asked is not None else round(memory_bytes * _OF_MEMORY)
    bounded = min(wanted, round(shared_bytes * _OF_SHARED), OBJECT_STORE_BYTES_MAX)
    return max(OBJECT_STORE_BYTES_MIN, bounded)


def part_of_shared(size: int, free: int, devices: int, of_type: int) -> int:
    """Return how much of /dev/shm there is for a run: the part that goes with its devices, as far as it is free.

    Ray takes pages there when it needs them, so runs that were each promised all of it would kill each other.
    """
    least = round(OBJECT_STORE_BYTES_MIN / _OF_SHARED) + 1  # less is of no use to a Ray
    return min(free, max(least, size * devices // of_type))


def store_note(size: int, shared_bytes: int, asked: int | None) -> str:
    """Return why a node's object store has not the size that was asked for, or is the least there can be; else ""."""
    if size == OBJECT_STORE_BYTES_MAX and asked is not None and asked > size:
        return f"the object store is {format_bytes(size)}, the most there can be, and not {format_bytes(asked)}"
    small = size == OBJECT_STORE_BYTES_MIN and size > round(shared_bytes * _OF_SHARED)
    if not small and (asked is None or asked <= size):
        return ""
    instead = "" if asked is None or asked <= size else f", not {format_bytes(asked)}"
    where = ", and lies in /tmp" if size > shared_bytes else ""
    store = f"so Ray's object store is {format_bytes(size)}{instead}{where}"
    return f"/dev/shm has {format_bytes(shared_bytes)} for this run, {store}; in a container --shm-size gives it more"


def cluster_cpus(cores: int, devices: int) -> int:
    """Return how many CPUs a node offers to Ray's scheduler.

    At least one for every device and one more: Ray counts CPUs and would otherwise hold a task back for ever on a small
    machine, where a trainer and its workers ask for one each.
    """
    return max(cores, devices + 1)
