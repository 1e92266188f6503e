"""Retention of run directories: deletes by age first, then the oldest until the rest fits.

    entries (id, ended when, how large) · policy (age, bytes, spared) · now   →   ids, oldest first

Pure: who looks at directories and deletes them is `node/attempt/retention.py`. Never deleted: what has not ended, and
what ended less than `spared_ns` ago (its caller may not have read the results yet). Only ended runs count against the
size, so that one huge running job does not cost the history of all others. A clock that was set back makes ages
negative, which deletes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from serverless_gpu.model.calendars import DAY_NS, HOUR_NS

DEFAULT_DAYS = 30.0
DEFAULT_GIB = 20.0


class RunDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """One run directory."""

    run_id: str
    ended_ns: int | None  # when it ended, nanoseconds since 1970; None while it has not
    size_bytes: int


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The retention of ended runs."""

    age_ns: int | None = round(DEFAULT_DAYS * DAY_NS)  # those that ended longer ago are deleted; None for no limit
    size_bytes_max: int | None = round(DEFAULT_GIB * 2**30)  # what all ended runs together may take; None for no limit
    spared_ns: int = HOUR_NS  # what ended less long ago is kept in any case


def to_delete(entries: Iterable[RunDirectory], policy: Policy, now_ns: int) -> tuple[RunDirectory, ...]:
    """Return what the policy no longer keeps, oldest first."""
    dated = [(entry.ended_ns, entry.run_id, entry) for entry in entries if entry.ended_ns is not None]
    ended = sorted(dated, key=lambda row: row[:2])
    total = sum(entry.size_bytes for _, _, entry in ended)
    chosen: list[RunDirectory] = []
    for ended_ns, _, entry in ended:
        age_ns = now_ns - ended_ns
        too_old = policy.age_ns is not None and age_ns > policy.age_ns
        too_much = policy.size_bytes_max is not None and total > policy.size_bytes_max
        if age_ns < policy.spared_ns:
            break  # and so is everything after it
        if too_old or too_much:
            chosen.append(entry)
            total -= entry.size_bytes
    return tuple(chosen)
