"""Concurrency limits: the runs that may start in one tick under policies and budgets.

    queue, in order ─▶ GPUs at once: running + admitted before it + its own  >  cap?  ── yes ─▶ held back, with a reason
                  └──▶ budgets: do they cover its first reservation?  ── no ──────────────────▶ held back, with a reason
                  └──▶ admitted; its use is counted before the next run is checked

An admitted run need not start in this tick. Its use stays counted until the next tick, so that no two runs of one tick
are admitted for the same money. Runs of one user under a cap that want the same devices keep the order of the queue.
Later runs do not pass the first run that does not fit, because a large run would otherwise never start. Two runs for
different devices may both be admitted although only one fits. The scheduler calls `is_full` again when it places one of
the two runs.

This module computes from values only. `server/scheduling/queue_snapshot.py` passes the runs and the remaining amount of
each budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec

from serverless_gpu.model.billing.budget import Subject

Key = tuple[str, str]
"""A policy and an owner, because a cap limits one user's runs under one policy."""
_Line = tuple[str, str, str | None, str]


class WaitingRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that waits."""

    run_id: str
    subject: Subject  # Attributes that decide which caps and budgets apply to the run.
    gpus: int | None  # Requested number of devices; None for all devices of a node.
    gpu_type: str | None = None  # Requested type; None for any type.
    grace_s: float = 0.0  # Grace period in seconds, which the run may use to stop.
    cpus: int = 0  # Requested cores; 0 without a requested number.
    memory_bytes: int = 0
    mandatory: tuple[str, ...] = ()  # Usage policies that apply beside the policy of the subject.
    name: str = ""  # Name of the run; earlier runs of the same owner and name show its likely duration.

    @property
    def policies(self) -> tuple[str, ...]:
        """Return the policies whose caps apply to the run."""
        return (self.subject.policy, *self.mandatory)


class BudgetRooms(Protocol):
    """The remaining amount of each budget, reduced by each admitted run."""

    def take(self, candidate: WaitingRun) -> str:
        """Deduct the first reservation of a run from its budgets; return the reason for a failure, or ""."""
        ...


def held_back(
    queue: Iterable[WaitingRun], using: Mapping[Key, int], caps: Mapping[str, int], rooms: BudgetRooms | None = None
) -> dict[str, str]:
    """Return the runs that may not start in this tick, each with its reason."""
    counting = _Counting(using, caps)
    found: dict[str, str] = {}
    for candidate in queue:
        why = counting.why_not(candidate)
        if not why and rooms is not None:
            why = rooms.take(candidate)
        if why:
            found[candidate.run_id] = why
        else:
            counting.count(candidate)
    return found


def is_full(cap: int | None, used: int, count: int) -> bool:
    """Return whether more devices would exceed the cap of a user under a policy.

    `cap` None means no limit.
    """
    return cap is not None and used + count > cap


class _Counting:
    """Counts the devices of each user under a policy while the queue is read.

    An admitted run counts for later runs that want the same kind of devices in the same pool. A run for other devices
    may start long before the admitted run. The scheduler checks the sum of all devices when it places these runs.
    """

    def __init__(self, using: Mapping[Key, int], caps: Mapping[str, int]) -> None:
        self._using, self._caps = using, caps
        self._taken: dict[_Line, int] = {}
        # A run waits for devices under this key. Later runs with the key do not pass the run.
        self._blocked: set[_Line] = set()

    def why_not(self, candidate: WaitingRun) -> str:
        found = (self._why_not(candidate, policy) for policy in candidate.policies)
        return next((why for why in found if why), "")

    def _why_not(self, candidate: WaitingRun, policy: str) -> str:
        owner = candidate.subject.owner
        cap = self._caps.get(policy)
        if cap is None:
            return ""
        allowed = f"usage policy {policy!r} allows {owner} {cap} GPUs at once"
        # The client submitted the run before the policy had this cap.
        if candidate.gpus is None or candidate.gpus > cap:
            wants = "every GPU of a node" if candidate.gpus is None else f"{candidate.gpus}"
            return f"{allowed}, and the run wants {wants}"
        line = _line(candidate, policy)
        used, taken = self._using.get((policy, owner), 0), self._taken.get(line, 0)
        if line not in self._blocked and used + taken + candidate.gpus <= cap:
            return ""
        ahead = ", and other runs of this user come first" if taken or line in self._blocked else ""
        self._blocked.add(line)
        return f"{allowed}: {used} are in use{ahead}"

    def count(self, candidate: WaitingRun) -> None:
        for policy in candidate.policies if candidate.gpus is not None else ():
            if policy in self._caps:
                line = _line(candidate, policy)
                self._taken[line] = self._taken.get(line, 0) + (candidate.gpus or 0)


def _line(candidate: WaitingRun, policy: str) -> _Line:
    return policy, candidate.subject.owner, candidate.gpu_type, candidate.subject.pool
