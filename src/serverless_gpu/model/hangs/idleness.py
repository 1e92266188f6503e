"""Idle detection from telemetry, output and attached clients.

    telemetry: works ─┐
    progress ─────────┼─▶ from zero ── telemetry: idle ──▶ 4/5 of the limit: WARN ──▶ the limit: STOP
    a client attaches ┘                     ▲
    no telemetry ──── the time does not count

For a gang on several nodes, each node reports its idle level. The lowest idle level of all nodes applies to the gang
(`of_gang`).

The module contains only values and functions that return the next value. The functions use no clocks, sockets or user
messages. The supervisor warns the user or stops the run, and gives the ranks time to save a checkpoint.

Only *observed* idle time counts. Missing telemetry, a restarted monitor or a suspended machine does not prove idleness.
The supervisor always warns before it stops an idle run.

Failure cases: A rank that waits in a busy loop on its GPU keeps the GPU busy. A busy loop is a hang
(`hang_detection.py`) and not idleness. Idle detection does not stop a program that prints while its GPU is idle,
because the program makes progress.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

import msgspec

from serverless_gpu.model.spec import Command, Function, Kernel, Payload, RunSpec

_WARN_AT = 0.8  # Fraction of the idle limit after which the supervisor warns. Sessions use the same fraction.
# Maximum gap between telemetry samples in nanoseconds. A longer gap without samples does not count as idle time.
_UNOBSERVED_NS = 30_000_000_000

KERNEL_LIMIT_S = 1800.0
LIMITS_S: dict[type[Payload], float | None] = {Function: None, Command: None, Kernel: KERNEL_LIMIT_S}
"""Default idle limit in seconds by payload type, or None for no limit.

The default limit of sessions is 3600 seconds.
"""


class IdleVerdict(StrEnum):
    """Action of the supervisor after a telemetry sample."""

    GO_ON = "go on"
    WARN = "warn"
    STOP = "stop"


_ORDER = (IdleVerdict.GO_ON, IdleVerdict.WARN, IdleVerdict.STOP)


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """The observed idle time of a run's devices."""

    limit_ns: int  # Idle time in nanoseconds after which the supervisor stops the run.
    heard_ns: int  # Boot time of the last telemetry observation.
    idle_ns: int = 0  # Observed idle nanoseconds since a device last worked.
    warned: bool = False  # True after the supervisor has warned about idle devices.

    @property
    def left_ns(self) -> int:
        """Return the idle nanoseconds that remain until the supervisor stops the run."""
        return max(0, self.limit_ns - self.idle_ns)


def limit_s(spec: RunSpec) -> float | None:
    """Return the maximum idle seconds of a run, or None without a limit."""
    return LIMITS_S[type(spec.payload)] if spec.idle_timeout_s is None else spec.idle_timeout_s


def begin(spec: RunSpec, now_ns: int) -> Idle | None:
    """Return the initial idle state at the start of user code, or None without an idle limit."""
    limit = limit_s(spec)
    return None if limit is None else Idle(limit_ns=round(limit * 1e9), heard_ns=now_ns)


def seen(idle: Idle, now_ns: int, *, busy: bool) -> Idle:
    """Return the idle state after a telemetry sample."""
    if busy:
        return used(idle, now_ns)
    gap_ns = now_ns - idle.heard_ns
    counts_ns = gap_ns if 0 <= gap_ns <= _UNOBSERVED_NS else 0
    return msgspec.structs.replace(idle, heard_ns=now_ns, idle_ns=idle.idle_ns + counts_ns)


def used(idle: Idle, now_ns: int) -> Idle:
    """Return the idle state after output, or after a client attached."""
    return msgspec.structs.replace(idle, heard_ns=now_ns, idle_ns=0, warned=False)


def decide(idle: Idle) -> tuple[Idle, IdleVerdict]:
    """Return the next idle state and the action: a warning first, then a stop."""
    if idle.warned:
        return idle, IdleVerdict.STOP if idle.idle_ns >= idle.limit_ns else IdleVerdict.GO_ON
    if idle.idle_ns >= idle.limit_ns * _WARN_AT:
        return msgspec.structs.replace(idle, warned=True), IdleVerdict.WARN
    return idle, IdleVerdict.GO_ON


def level(idle: Idle) -> IdleVerdict:
    """Return the idle level of one node, from the node's own observations."""
    if idle.idle_ns >= idle.limit_ns:
        return IdleVerdict.STOP
    return IdleVerdict.WARN if idle.idle_ns >= idle.limit_ns * _WARN_AT else IdleVerdict.GO_ON


def of_gang(levels: Collection[IdleVerdict], told: IdleVerdict | None) -> IdleVerdict:
    """Return the action for a gang, which is idle only if all nodes are idle."""
    least = min(levels, key=_ORDER.index, default=IdleVerdict.GO_ON)
    return IdleVerdict.WARN if least is IdleVerdict.STOP and told in (None, IdleVerdict.GO_ON) else least
