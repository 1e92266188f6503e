"""Concurrency limits: the runs that may start in this tick under policies and budgets.

    queue, in order ─▶ GPUs at once: what runs + others like it before it + its own  >  cap? ─▶ held back, and why
                  └──▶ rooms of budgets: is its first reservation left?  ── no ──────────────▶ held back, and why
                  └──▶ let through; what it takes is counted before the next one is looked at

A run let through may start in this tick, or not: what it takes is kept for it until the next look. So no two runs
of one tick are let through for the same money. Runs of a user under a cap that want the same devices come in the order
of the queue: the first that does not fit is not passed by those behind it, or a large run would never start. Two that
want different devices may both be let through where there is room for one; `is_full` is asked once more when one of
them is placed.

Values only. `server/scheduling/queue_snapshot.py` gives the runs, and what budgets have left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec

from serverless_gpu.model.billing.budget import Subject

Key = tuple[str, str]
"""A policy and an owner: a cap is for one user's runs under one policy."""
_Line = tuple[str, str, str | None, str]


class WaitingRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that waits."""

    run_id: str
    subject: Subject  # what decides which caps and budgets it counts for
    gpus: int | None  # how many devices it wants; None for all of a node's
    gpu_type: str | None = None  # of what type; None for whatever there is
    grace_s: float = 0.0  # how long it may take to stop
    cpus: int = 0  # cores that it asks for, 0 where it asks for no number of them
    memory_bytes: int = 0
    mandatory: tuple[str, ...] = ()  # policies that apply beside that of the subject
    name: str = ""  # of the run: earlier ones of its owner and name say how long it takes

    @property
    def policies(self) -> tuple[str, ...]:
        """Return the policies whose caps it counts for."""
        return (self.subject.policy, *self.mandatory)


class BudgetRooms(Protocol):
    """The rest of each budget, counted down while the queue is read."""

    def take(self, candidate: WaitingRun) -> str:
        """Take what the first reservation of a run needs; return why that is not there, or "" where it was taken."""
        ...


def held_back(
    queue: Iterable[WaitingRun], using: Mapping[Key, int], caps: Mapping[str, int], rooms: BudgetRooms | None = None
) -> dict[str, str]:
    """Return who may not start in this tick, and why: sentences by run."""
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
    """Return whether so many more devices are more than a user has at once under a policy.

    `cap` None means no limit.
    """
    return cap is not None and used + count > cap


class _Counting:
    """Devices counted for a user under a policy, while the queue is read.

    What was let through is counted for those behind it that want the same kind of devices, of the same pool: whoever
    waits for other devices may start long before it. What both together may not have is found when they are placed.
    """

    def __init__(self, using: Mapping[Key, int], caps: Mapping[str, int]) -> None:
        self._using, self._caps = using, caps
        self._taken: dict[_Line, int] = {}
        self._blocked: set[_Line] = set()  # a run waits for room there, and is not passed

    def why_not(self, candidate: WaitingRun) -> str:
        found = (self._why_not(candidate, policy) for policy in candidate.policies)
        return next((why for why in found if why), "")

    def _why_not(self, candidate: WaitingRun, policy: str) -> str:
        owner = candidate.subject.owner
        cap = self._caps.get(policy)
        if cap is None:
            return ""
        allowed = f"usage policy {policy!r} allows {owner} {cap} GPUs at once"
        if candidate.gpus is None or candidate.gpus > cap:  # it was asked for before the policy said so
            wants = "every GPU of a node" if candidate.gpus is None else f"{candidate.gpus}"
            return f"{allowed}, and the run wants {wants}"
        line = _line(candidate, policy)
        used, taken = self._using.get((policy, owner), 0), self._taken.get(line, 0)
        if line not in self._blocked and used + taken + candidate.gpus <= cap:
            return ""
        ahead = ", and others of theirs come first" if taken or line in self._blocked else ""
        self._blocked.add(line)
        return f"{allowed}: {used} are in use{ahead}"

    def count(self, candidate: WaitingRun) -> None:
        for policy in candidate.policies if candidate.gpus is not None else ():
            if policy in self._caps:
                line = _line(candidate, policy)
                self._taken[line] = self._taken.get(line, 0) + (candidate.gpus or 0)


def _line(candidate: WaitingRun, policy: str) -> _Line:
    return policy, candidate.subject.owner, candidate.gpu_type, candidate.subject.pool
