"""Facts: what happened to an attempt on its node, one record for each thing, never changed.

They are what all use and money follows from (`metering.py`, `ledger.py`). Writing them down and sending them is the
node's work and must not be here.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from itertools import pairwise

import msgspec

from serverless_gpu.errors import InvalidValue


class FactKind(StrEnum):
    """The event that a fact records."""

    RESERVED = "reserved"
    HYDRATING = "hydrating"  # the devices wait for the environment
    STARTING = "starting"  # it is there: the ranks are started
    EXEC = "exec"
    HELD = "held"
    ALIVE = "alive"
    STOPPING = "stopping"  # the ranks are to end, or have done what they had to
    EXITED = "exited"
    FREED = "freed"


class Fact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One record of what happened to an attempt on a node.

    Attributes:
        attempt: the attempt, as ``run:fence``.
        seq: number within the attempt; ``(attempt, seq)`` names the fact.
        kind: what happened.
        boot_id: the boot in which `boottime_ns` counts.
        boottime_ns: nanoseconds since boot; all durations come from it.
        wall_ns: nanoseconds since 1970; only places the fact on a calendar.
        gpus: identifiers of the devices lent.
        cpus: cores lent; 0 when they were not limited.
        memory_bytes: host memory lent; 0 when it was not limited.
        grace_ms: of `stopping`, where it was asked of the ranks: how long they may take, which is as long as they are
            billed at most; else None.
    """

    attempt: str
    seq: int
    kind: FactKind
    boot_id: str
    boottime_ns: int
    wall_ns: int
    gpus: tuple[str, ...]
    cpus: int
    memory_bytes: int
    grace_ms: int | None = None


def alive_after(last: Fact, at_ns: int) -> Fact:
    """Return the fact that an attempt was still alive at a boottime, after the last one that is known of it."""
    return msgspec.structs.replace(
        last,
        seq=last.seq + 1,
        kind=FactKind.ALIVE,
        boottime_ns=at_ns,
        wall_ns=last.wall_ns + at_ns - last.boottime_ns,
        grace_ms=None,
    )


def distinct(facts: Iterable[Fact]) -> list[Fact]:
    """Return the facts of one attempt in their order, each once.

    Raises InvalidValue when they are of several attempts, or two different ones share a number.
    """
    ordered = sorted(facts, key=lambda fact: fact.seq)
    for fact, following in pairwise(ordered):
        if fact.attempt != following.attempt:
            attempts = ", ".join(sorted({each.attempt for each in ordered}))
            raise InvalidValue(f"a charge is for one attempt, these facts are of {attempts}")
        if fact.seq == following.seq and fact != following:
            raise InvalidValue(f"two different facts of attempt {fact.attempt} carry the number {fact.seq}")
    return [fact for fact, following in pairwise(ordered) if fact.seq != following.seq] + ordered[-1:]
