"""Idle detection from telemetry, progress and visits, and from how long they have been away.

    telemetry: works ─┐
    progress ─────────┼─▶ from zero ── telemetry: does nothing ──▶ 4/5 of the limit: WARN ──▶ the limit: STOP
    a client attaches ┘                        ▲
    telemetry is silent ── the time does not count

Of a gang on several nodes each crew says how far it is, and all of it is as far as the one that is least (`of_gang`).

What lives here: a value and the functions that return the next one. What must not: clocks, sockets, words for people;
the supervisor carries out what is decided (a warning; a stop like any other, so ranks may save a checkpoint first).

Idle is what was *seen* to be idle: a device that cannot be asked, a monitor that is being restarted or a suspended
machine prove nothing, and their time does not count. A stop is never decided before a warning was.

Failure cases: a rank that waits in a busy loop on its GPU keeps it busy: that is a hang (`hang_detection.py`), not
idleness; a program that prints while its GPU has nothing to do makes progress, and so is not stopped.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

import msgspec

from serverless_gpu.model.spec import Command, Function, Kernel, Payload, RunSpec

_WARN_AT = 0.8  # of the limit, as of a session's
_UNOBSERVED_NS = 30_000_000_000  # telemetry says something every second; a longer gap was not the devices'

KERNEL_LIMIT_S = 1800.0
LIMITS_S: dict[type[Payload], float | None] = {Function: None, Command: None, Kernel: KERNEL_LIMIT_S}
"""Seconds of idle devices until a run is stopped, by what it does, as a default; a session has its own (3600)."""


class IdleVerdict(StrEnum):
    """The action that idleness calls for."""

    GO_ON = "go on"
    WARN = "warn"
    STOP = "stop"


_ORDER = (IdleVerdict.GO_ON, IdleVerdict.WARN, IdleVerdict.STOP)


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """The observed idle time of a run's devices."""

    limit_ns: int  # after which the run is stopped
    heard_ns: int  # boottime of the last that was heard of it
    idle_ns: int = 0  # seen to be idle, since they last worked
    warned: bool = False  # whether that was said

    @property
    def left_ns(self) -> int:
        """Return how much more idle time there is until the run is stopped."""
        return max(0, self.limit_ns - self.idle_ns)


def limit_s(spec: RunSpec) -> float | None:
    """Return after how many seconds of idle devices a run is stopped, or None for never."""
    return LIMITS_S[type(spec.payload)] if spec.idle_timeout_s is None else spec.idle_timeout_s


def begin(spec: RunSpec, now_ns: int) -> Idle | None:
    """Return the value to begin with when user code starts, or None where nothing is to be watched."""
    limit = limit_s(spec)
    return None if limit is None else Idle(limit_ns=round(limit * 1e9), heard_ns=now_ns)


def seen(idle: Idle, now_ns: int, *, busy: bool) -> Idle:
    """Return the value after telemetry said whether a device works."""
    if busy:
        return used(idle, now_ns)
    gap_ns = now_ns - idle.heard_ns
    counts_ns = gap_ns if 0 <= gap_ns <= _UNOBSERVED_NS else 0
    return msgspec.structs.replace(idle, heard_ns=now_ns, idle_ns=idle.idle_ns + counts_ns)


def used(idle: Idle, now_ns: int) -> Idle:
    """Return the value after progress, or after a client attached."""
    return msgspec.structs.replace(idle, heard_ns=now_ns, idle_ns=0, warned=False)


def decide(idle: Idle) -> tuple[Idle, IdleVerdict]:
    """Return the next value and what is to be done now: warn once, and stop only after that."""
    if idle.warned:
        return idle, IdleVerdict.STOP if idle.idle_ns >= idle.limit_ns else IdleVerdict.GO_ON
    if idle.idle_ns >= idle.limit_ns * _WARN_AT:
        return msgspec.structs.replace(idle, warned=True), IdleVerdict.WARN
    return idle, IdleVerdict.GO_ON


def level(idle: Idle) -> IdleVerdict:
    """Return how far a crew is by what was seen on its own node, said or not."""
    if idle.idle_ns >= idle.limit_ns:
        return IdleVerdict.STOP
    return IdleVerdict.WARN if idle.idle_ns >= idle.limit_ns * _WARN_AT else IdleVerdict.GO_ON


def of_gang(levels: Collection[IdleVerdict], told: IdleVerdict | None) -> IdleVerdict:
    """Return what is to be done of a gang: it is idle only where all of its crews are, and stopped only once warned."""
    least = min(levels, key=_ORDER.index, default=IdleVerdict.GO_ON)
    return IdleVerdict.WARN if least is IdleVerdict.STOP and told in (None, IdleVerdict.GO_ON) else least
