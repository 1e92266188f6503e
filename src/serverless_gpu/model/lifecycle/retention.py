"""Retention policy that limits the age and the total size of run directories.

    entries (id, end time, size) · policy (age, bytes, spared) · now   →   ids, oldest first

`node/attempt/retention.py` reads and deletes the run directories, but never deletes active runs. The policy also
retains runs for `spared_ns` after their end, because the caller may not have read the results yet. Only ended runs
count toward the size limit. If active runs counted, one huge run would displace all ended runs. The policy deletes
nothing after a clock moves back, because ages are then negative.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from serverless_gpu.model.calendars import DAY_NS, HOUR_NS

DEFAULT_DAYS = 30.0
DEFAULT_GIB = 20.0


class RunDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """Directory of one run, with its size and end time."""

    run_id: str
    ended_ns: int | None  # End time in nanoseconds since 1970, or None before the run ends.
    size_bytes: int


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on age and size of the directories of ended runs."""

    age_ns: int | None = round(DEFAULT_DAYS * DAY_NS)  # Maximum age after the end of the run, or None for no limit.
    # Maximum total size of all ended runs in bytes, or None for no limit.
    size_bytes_max: int | None = round(DEFAULT_GIB * 2**30)
    spared_ns: int = HOUR_NS  # Minimum age of a run directory before deletion.


def to_delete(entries: Iterable[RunDirectory], policy: Policy, now_ns: int) -> tuple[RunDirectory, ...]:
    """Return the run directories that exceed the policy, oldest first."""
    dated = [(entry.ended_ns, entry.run_id, entry) for entry in entries if entry.ended_ns is not None]
    ended = sorted(dated, key=lambda row: row[:2])
    total = sum(entry.size_bytes for _, _, entry in ended)
    chosen: list[RunDirectory] = []
    for ended_ns, _, entry in ended:
        age_ns = now_ns - ended_ns
        too_old = policy.age_ns is not None and age_ns > policy.age_ns
        too_much = policy.size_bytes_max is not None and total > policy.size_bytes_max
        if age_ns < policy.spared_ns:
            break  # All remaining run directories are younger.
        if too_old or too_much:
            chosen.append(entry)
            total -= entry.size_bytes
    return tuple(chosen)
