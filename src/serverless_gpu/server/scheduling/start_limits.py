"""Who of those that wait may not start in this tick, though devices may be free: caps of policies, rooms of budgets.

    roster: queue, what runs ─▶ caps, budgets ─▶ model/scheduling/concurrency_limits.py ─▶ sentences by run

    estimate, for one run that nobody asked for yet ─▶ `why_not`
    scheduler, in the transaction that places a run ─▶ `is_full`: what the user has by now, this run among it

A run that is held back waits beside the line, and its sentence says for what. It is looked at again in each tick.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import sqlalchemy as sa

from serverless_gpu.model.scheduling import concurrency_limits
from serverless_gpu.model.scheduling.concurrency_limits import Candidate, Key, Rooms
from serverless_gpu.server.budgets.budget_index import subject_of_run
from serverless_gpu.server.records import policies
from serverless_gpu.server.records.runs import runs
from serverless_gpu.server.records.runs.crews import CrewId
from serverless_gpu.server.records.runs.runs import StoredRun


def candidate(run: StoredRun) -> Candidate:
    """Return what decides whether a run is let through."""
    resources = run.spec.resources
    return Candidate(
        run_id=run.id,
        subject=subject_of_run(run),
        gpus=resources.gpus,
        gpu_type=resources.gpu_type,
        grace_s=run.spec.grace_s,
        cpus=resources.cpus or 0,
        memory_bytes=resources.memory_bytes or 0,
        mandatory=run.spec.policies,
        name=run.name,
    )


def held_back(
    connection: sa.Connection,
    waiting: Iterable[Candidate],
    running: Iterable[tuple[Candidate, int]],
    rooms: Rooms | None = None,
) -> dict[str, str]:
    """Return who may not start in this tick, and why: sentences by run.

    Args:
        connection: reading is enough.
        waiting: in the order of the queue.
        running: those that have devices, or are about to be given some, and how many.
        rooms: what budgets have left; None where there are none.
    """
    caps = policies.caps(connection)
    if not caps and rooms is None:
        return {}
    using: Counter[Key] = Counter()
    for one, count in running:
        for policy in one.policies:
            using[policy, one.subject.owner] += count
    return concurrency_limits.held_back(waiting, using, caps, rooms)


def why_not(connection: sa.Connection, run: StoredRun, rooms: Rooms | None, freed: frozenset[CrewId]) -> str:
    """Return why a run could not start now, whoever else waits, or "".

    Args:
        connection: reading is enough.
        run: as it is stored, or as it would be.
        rooms: what budgets have left; None where there are none.
        freed: crews that have given their devices back.
    """
    running = [(candidate(other), count) for other, count in _having(connection, run.owner, freed)]
    return held_back(connection, [candidate(run)], running, rooms).get(run.id, "")


def is_full(connection: sa.Connection, run: StoredRun, count: int, freed: frozenset[CrewId]) -> bool:
    """Return whether a run that is about to be placed would be over a policy's cap: others were placed before it.

    Args:
        connection: of the transaction that places it.
        run: it.
        count: devices that it is to have.
        freed: crews that have given their devices back.
    """
    caps = policies.caps(connection)
    capped = [policy for policy in candidate(run).policies if policy in caps]
    if not capped:
        return False
    having = [(candidate(other).policies, held) for other, held in _having(connection, run.owner, freed)]
    return any(
        concurrency_limits.is_full(caps[policy], sum(held for names, held in having if policy in names), count)
        for policy in capped
    )


def _having(connection: sa.Connection, owner: str, freed: frozenset[CrewId]) -> Iterable[tuple[StoredRun, int]]:
    """Return runs of somebody that have devices, and how many."""
    for run in runs.active_of(connection, owner):
        there = () if run.attempt is None else run.attempt.open_crews
        gpus = sum(crew.gpus for crew in there if crew.id not in freed)
        if gpus:
            yield run, gpus
