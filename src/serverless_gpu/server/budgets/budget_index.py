"""Which budgets count a run (`BudgetIndex`), and what they have left within one tick (`BudgetsLeft`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from serverless_gpu.model.billing.budget import BudgetUse, Standing, Subject, keys, may_start, no_room_text
from serverless_gpu.model.hardware import CPU
from serverless_gpu.model.scheduling.concurrency_limits import WaitingRun
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.server.records import pools
from serverless_gpu.server.records.budgets import StoredBudget
from serverless_gpu.server.records.pools import StoredPool
from serverless_gpu.server.records.runs import StoredRun


class BudgetIndex:
    """The budgets, and which of them count a run.

    It needs the pools, too: a run that names none may come to any that is not reserved.
    """

    def __init__(self, there: Iterable[StoredBudget], pools_there: Iterable[StoredPool] = ()) -> None:
        self.budgets = {one.name: one.budget for one in there}
        self._index: dict[tuple[str, str], list[str]] = {}
        for name, budget in self.budgets.items():
            self._index.setdefault((budget.scope.kind, budget.scope.name), []).append(name)
        self._reserved = {pool.name for pool in pools_there if pool.kind == pools.RESERVED}

    def names(self, subject: Subject) -> tuple[str, ...]:
        """Return the budgets that count a run, by name."""
        return self._sorted({name for key in keys(subject) for name in self._index.get(key, ())}, subject)

    def names_of_waiting(self, subject: Subject) -> tuple[str, ...]:
        """Return the budgets that may count a run which waits: one that names no pool may come to several."""
        found = set(self.names(subject))
        if not subject.pool:
            for (kind, pool), names in self._index.items():
                if kind == "pool" and pool not in self._reserved:
                    found.update(names)
        return self._sorted(found, subject)

    def _sorted(self, names: set[str], subject: Subject) -> tuple[str, ...]:
        counted = (name for name in names if not subject.is_cpu or self.budgets[name].limit_gpu_ms is None)
        return tuple(sorted(counted))


class BudgetsLeft:
    """What budgets have left, counted down along the queue (`concurrency_limits.BudgetRooms`)."""

    def __init__(
        self,
        index: BudgetIndex,
        standings: dict[str, Standing],
        holds: Callable[[WaitingRun], BudgetUse],
    ) -> None:
        self._index, self._standings, self._hold = index, standings, holds

    def take(self, candidate: WaitingRun) -> str:
        """Take what the first minute of a run needs; return why there is no room, or "" if it was taken."""
        names = self._index.names_of_waiting(candidate.subject)
        if not names:
            return ""
        hold = self._hold(candidate)
        for name in names:
            if not may_start(self._standings[name], hold):
                return no_room_text(name, self._standings[name])
        self._count(names, hold)
        return ""

    def keep(self, candidate: WaitingRun) -> None:
        """Take the same for a run that is about to be placed, also without room."""
        self._count(self._index.names_of_waiting(candidate.subject), self._hold(candidate))

    def _count(self, names: Iterable[str], hold: BudgetUse) -> None:
        for name in names:
            self._standings[name] = with_hold(self._standings[name], hold)


def subject_of(owner: str, spec: RunSpec, *, team: str, pool: str, member_of: tuple[str, ...]) -> Subject:
    """Return the properties of a run that decide which budgets count it."""
    is_cpu = spec.resources.gpu_type == CPU
    return Subject(
        owner=owner,
        team=team,
        pool=pool,
        policy=spec.policy or "",
        tags=spec.tags,
        is_cpu=is_cpu,
        member_of=member_of,
    )


def subject_of_run(run: StoredRun) -> Subject:
    """Return the same for a stored run."""
    return subject_of(run.owner, run.spec, team=run.team, pool=run.pool, member_of=run.member_of)


def with_hold(standing: Standing, hold: BudgetUse) -> Standing:
    """Return a standing with one more hold."""
    return msgspec.structs.replace(standing, held=standing.held + hold, ahead=standing.ahead + hold)
