"""Helpers of the tests of lifecycle that other tests use as well."""

from __future__ import annotations

import msgspec

from serverless_gpu.model.lifecycle.attempt import (
    Attempt,
    Event,
    Failure,
    GangPlaced,
    Limits,
    Phase,
    RankExecuting,
    Reason,
    State,
)
from serverless_gpu.model.lifecycle.attempt_lifecycle import SETTLE_NS, AttemptInstruction, advance

S = 1_000_000_000
START, RELEASE, TERMINATE, KILL, CONCLUDE = (
    AttemptInstruction.START_RANKS,
    AttemptInstruction.RELEASE_RANKS,
    AttemptInstruction.TERMINATE_RANKS,
    AttemptInstruction.KILL_TREE,
    AttemptInstruction.CONCLUDE,
)
LIMITS = Limits(timeout_ns=100 * S, grace_ns=30 * S, failure_grace_ns=2 * S, start_ns=300 * S)
QUEUED = Attempt(run_id="r", fence=1, world_size=2, limits=LIMITS)
STARTING = msgspec.structs.replace(QUEUED, state=State.STARTING, wake_ns=300 * S)
RUNNING = msgspec.structs.replace(STARTING, state=State.RUNNING, exec_ns=10 * S, wake_ns=80 * S)


def drive(attempt: Attempt, *happenings: tuple[int, Event]) -> tuple[Attempt, tuple[AttemptInstruction, ...]]:
    issued: list[AttemptInstruction] = []
    for now_ns, event in happenings:
        attempt, instructions = advance(attempt, event, now_ns)
        issued += instructions
    return attempt, tuple(issued)


def changed(attempt: Attempt, **fields: object) -> Attempt:
    return msgspec.structs.replace(attempt, **fields)


def raised(rank: int, at_ns: int, *, peer_lost: bool = False) -> Failure:
    return Failure(rank=rank, reason=Reason.RANK_RAISED, at_ns=at_ns, peer_lost=peer_lost, detail="ValueError: x")


def ended(
    attempt: Attempt, *, state: State, reason: Reason, stop_ns: int, phase: Phase = Phase.NONE, **fields: object
) -> Attempt:
    return changed(attempt, state=state, reason=reason, stop_ns=stop_ns, wake_ns=None, phase=phase, **fields)


TO_RUNNING: tuple[tuple[int, Event], ...] = ((0, GangPlaced()), (10 * S, RankExecuting(0)), (11 * S, RankExecuting(1)))
LOST = raised(0, 20 * S, peer_lost=True)
SETTLING = changed(RUNNING, phase=Phase.SETTLING, wake_ns=20 * S + SETTLE_NS, failures=(LOST,))
