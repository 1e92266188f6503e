"""Refuses a run that no node known in the last day could ever serve, before the run is queued.

    nodes heard of within `KNOWN_S`, drained and silent ones included ─▶ one could serve it   ─▶ queued
                                                                      └▶ none could           ─▶ NoSuitableNode
    no node known, or a node of the engine has not said hello yet     ─▶ queued; asked again once that is over

A run with `wait` is queued in any case and ends after `unsatisfiable_after` (`unsatisfiable.py`), as does a run whose
node goes away while it waits. What was found to be possible is remembered for some seconds: of a thousand equal
requests one is looked at.
"""

from __future__ import annotations

import sqlalchemy as sa

from serverless_gpu.errors import NoSuitableNode
from serverless_gpu.model.scheduling.feasibility import Shortage, like, shortage
from serverless_gpu.model.scheduling.values import QueuedRun
from serverless_gpu.server import floor, isolation, nodes, pools
from serverless_gpu.server.runs import StoredRun
from serverless_gpu.server.services import Services
from serverless_gpu.server.wanting import Past, wanted

KNOWN_S = 86_400.0
"""A node counts for so long after it was heard of last."""


def refuse(connection: sa.Connection, services: Services, run: StoredRun) -> bool:
    """Refuse a run that no known node could ever serve.

    Args:
        connection: reading is enough.
        services: the server's.
        run: as it would be written down.

    Returns:
        Whether the nodes that are known were enough to decide; otherwise `services.feasible.defer` takes the run.

    Raises:
        NoSuitableNode: no node could serve it.
    """
    if run.spec.wait:
        return True
    serves = isolation.Isolation.of(pools.every(connection), isolation.first_administrator(connection))
    now_ns = services.clock.wall_ns()
    asked = wanted(run, Past(second_principal=serves.is_second(run.owner)), now_ns=now_ns)
    is_decided, found = decide(connection, services, asked)
    if found is not None:
        raise _refusal(run, found)
    return is_decided


def decide(connection: sa.Connection, services: Services, asked: QueuedRun) -> tuple[bool, Shortage | None]:
    """Return whether the known nodes are enough to decide, and why none of them could ever serve a run."""
    alike, now_ns = like(asked), services.clock.boottime_ns()
    if services.feasible.knows(alike, now_ns):
        return True, None
    times, presence = floor.now(services), services.presence
    known = [
        node
        for node in nodes.every(connection)
        if times.wall_ns - floor.last_seen_ns(node, presence, times) <= KNOWN_S * 1e9
    ]
    there = floor.Floor(nodes=tuple(known), pools=tuple(pools.every(connection)), active=())
    found = None
    if known:
        found = shortage(floor.offers(there, presence, times), [pool.planned for pool in there.pools], asked)
    if known and found is None:
        services.feasible.note(alike, now_ns)
        return True, None
    here = {node.name for node in known if presence.last_ns(node.id) is not None}
    if not known or not here.issuperset(services.engine_nodes()):
        return False, None
    return True, found


def _refusal(run: StoredRun, found: Shortage) -> NoSuitableNode:
    error = NoSuitableNode(f"{found.why}; the run was not queued")
    resources = run.spec.resources
    error.gpus, error.gpu_type, error.pool = resources.gpus, resources.gpu_type, run.pool
    error.choices = tuple(choice.changes() for choice in found.choices)
    return error
