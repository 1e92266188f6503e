"""Runs of a second principal on nodes that cannot keep principals apart.

A pool with `single_principal` runs the code of one principal. Runs of others wait for it with the reason `isolation`,
which is a decision of an administrator and so never makes a run unsatisfiable.
"""

from __future__ import annotations

import msgspec

from serverless_gpu.model.scheduling.impossible_requests import impossible
from serverless_gpu.model.scheduling.planner_state import PlannerState
from serverless_gpu.model.scheduling.request_shapes import TimedShape
from serverless_gpu.model.scheduling.values import QueuedRun
from serverless_gpu.model.scheduling.wait_messages import isolation_sentence


def never_served(state: PlannerState, wanted: QueuedRun, ask: TimedShape) -> str:
    """Return why no node that has joined can ever serve a run, however pools isolate, or ""."""
    never = impossible(state.floor, wanted, ask)
    if not never or not wanted.second_principal:
        return never
    allowed = _allowed(wanted)
    return impossible(state.floor, allowed, state.queue.ask(allowed))


def isolation_problem(state: PlannerState, wanted: QueuedRun, ask: TimedShape) -> str:
    """Return why isolation keeps a run from every node that would do, and the remedy, or ""."""
    if not wanted.second_principal or not impossible(state.floor, wanted, ask):
        return ""
    pools = state.floor.terms.pools
    reach = state.floor.reach(state.queue.ask(_allowed(wanted)).shape)
    closed = {place.node.pool for place, _types, _lender in reach.places()}
    named = sorted(name for name in closed if name in pools and pools[name].single_principal)
    return isolation_sentence(named or ["default"])


def _allowed(wanted: QueuedRun) -> QueuedRun:
    return msgspec.structs.replace(wanted, second_principal=False)
