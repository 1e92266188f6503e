"""Concurrency limits: selects the runs that policies and budgets allow to start in one tick.

    queue, in order ─▶ GPUs at once: running + admitted before it + its own  >  cap?  ── yes ─▶ held back, with a reason
                  └──▶ budgets: do they cover its first reservation?  ── no ──────────────────▶ held back, with a reason
                  └──▶ admitted; its use is counted before the next run is checked

An admitted run need not start in the same tick. The scheduler counts an admitted run's usage until the next tick, and
thus never admits two runs for the same money. Runs of one user that want the same devices under a cap keep their queue
order. Later runs do not overtake the earliest run that exceeds the cap, because a large run would otherwise never
start. The module may admit two runs for different devices although only one run fits under the cap. The scheduler
therefore calls `is_full` again at each placement.

The module uses neither a clock nor a database. `server/scheduling/queue_snapshot.py` passes the waiting runs and the
remaining amount of each budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec

from serverless_gpu.model.billing.budget import Subject

Key = tuple[str, str]
"""Key of a cap: policy and owner, because a cap limits one user's runs under one policy."""
_Line = tuple[str, str, str | None, str]


class WaitingRun(msgspec.Struct, frozen=True, kw_only=True):
    """A waiting run, with the attributes that caps and budgets use."""

    run_id: str
    subject: Subject  # Attributes that decide which caps and budgets apply to the run.
    gpus: int | None  # Requested number of devices, or None for all devices of a node.
    gpu_type: str | None = None  # Requested device type, or None for any type.
    grace_s: float = 0.0  # Grace period in seconds after a stop request.
    cpus: int = 0  # Requested cores, or 0 if the user requested no cores.
    memory_bytes: int = 0
    mandatory: tuple[str, ...] = ()  # Usage policies that apply in addition to the subject's policy.
    name: str = ""  # Run name, by which earlier runs of the same owner predict the duration.

    @property
    def policies(self) -> tuple[str, ...]:
        """Return the policies whose caps apply to the run."""
        return (self.subject.policy, *self.mandatory)


class BudgetRooms(Protocol):
    """The remaining amount of each budget after the holds of admitted runs."""

    def take(self, candidate: WaitingRun) -> str:
        """Deduct a run's first hold from its budgets. Return the reason if a budget refuses the hold, else ""."""
        ...


def held_back(
    queue: Iterable[WaitingRun], using: Mapping[Key, int], caps: Mapping[str, int], rooms: BudgetRooms | None = None
) -> dict[str, str]:
    """Return the runs that may not start in the current scheduler tick, with reasons."""
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
    """Return True if more devices would exceed a user's cap under a policy.

    A `cap` of None stands for no limit.
    """
    return cap is not None and used + count > cap


class _Counting:
    """Counts the devices of each user and policy while the caller iterates over the queue.

    The class counts an admitted run only against later runs for the same device type and pool. Runs for other devices
    may start long before the admitted run. At placement, the scheduler checks the cap against all devices of the user.
    """

    def __init__(self, using: Mapping[Key, int], caps: Mapping[str, int]) -> None:
        self._using, self._caps = using, caps
        self._taken: dict[_Line, int] = {}
        # Keys with a waiting run, which later runs with the same key must not overtake.
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
        # Runs over the cap may have entered the queue before an administrator set the cap.
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
