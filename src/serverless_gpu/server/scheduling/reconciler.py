"""Compares the intended state with the reports of nodes every two seconds.

    an attempt without reports                   unreachable, canceled or given up (`lifecycle/liveness.py`)
    a receipt that never arrives                 the server settles the run without it (`lifecycle/liveness.py`)
    a suspended owner                            the owner's runs finish or are stopped (`owner_suspension.py`)
    a node that is drained or not shared         its runs get a notice, then a stop request (`node_rules.py`)
    nodes that cannot connect to each other      the gang is called off and placed again (`rendezvous.py`)
    an engine's events                           nodes become available or lost

Each decision is one transaction, which first checks that the run has not changed since the read. If the run has
changed, the reconciler leaves the decision to the next tick.
"""

from __future__ import annotations

from collections.abc import Sequence

from serverless_gpu.ambient import Clock
from serverless_gpu.engines.base import Engine, NodeLost
from serverless_gpu.server.core.hub import SCHEDULER, Hub
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle.gang_hangs import GangProgress
from serverless_gpu.server.lifecycle.liveness import Leases, LivenessMonitor, Presence
from serverless_gpu.server.lifecycle.owner_suspension import OwnerSuspension
from serverless_gpu.server.lifecycle.rendezvous import RendezvousService
from serverless_gpu.server.lifecycle.requeue import OrderDeliveries
from serverless_gpu.server.lifecycle.transitions import Announcer, ReportRequests
from serverless_gpu.server.nodes.node_rules import Evacuation
from serverless_gpu.server.records import active_runs, nodes
from serverless_gpu.server.records.active_runs import ActiveRun
from serverless_gpu.server.scheduling.scheduler import Scheduler

EVERY_S = 2.0
SELDOM_S = 60.0


class Reconciler:
    """Compares running attempts with the reports of nodes."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        hub: Hub,
        leases: Leases,
        looks: ReportRequests,
        presence: Presence,
        deliveries: OrderDeliveries,
        gang_progress: GangProgress,
        announcer: Announcer,
        evacuation: Evacuation,
        owner_suspension: OwnerSuspension,
        rendezvous: RendezvousService,
        scheduler: Scheduler,
        engine: Engine | None = None,
    ) -> None:
        self._database = database
        self._hub = hub
        self._leases = leases
        self._looks = looks
        self._presence = presence
        self._deliveries = deliveries
        self._gang_progress = gang_progress
        self._evacuation = evacuation
        self._owner_suspension = owner_suspension
        self._rendezvous = rendezvous
        self._engine = engine
        self._settled_ns: int | None = None
        self._liveness = LivenessMonitor(
            settings=settings,
            clock=clock,
            database=database,
            hub=hub,
            leases=leases,
            presence=presence,
            deliveries=deliveries,
            announcer=announcer,
            take_back=scheduler.give_back,
        )

    def tick(self, now_ns: int) -> int | None:
        """Run all due checks, and return the time of the next tick."""
        self._hear_engine()
        # Read the reservations before the database. A reservation without a run is obsolete, because the server stores
        # a run before it reserves nodes.
        reserved = self._engine.recover() if self._engine is not None else ()
        known = self._deliveries.known()
        active = self._database.read(active_runs.active_briefly)
        gangs = {(run.id, run.fence) for run in active}
        there = {crew.id for run in active for crew in run.crews}
        self._leases.keep(there)
        self._looks.keep(there)
        self._gang_progress.keep(gangs)
        self._deliveries.forget(known - gangs)
        held_back = {run.id for run in active if self._is_held_back(run)}
        self._liveness.check(active, held_back, now_ns)
        self._rendezvous.look([run for run in active if run.id not in held_back], now_ns)
        self._owner_suspension.stop_some()
        self._evacuation.look()
        self._release(reserved, gangs)
        if self._settled_ns is None or now_ns - self._settled_ns >= SELDOM_S * 1e9:
            self._settled_ns = now_ns
            self._liveness.settle_overdue(now_ns)
        return now_ns + round(EVERY_S * 1e9)

    def _is_held_back(self, run: ActiveRun) -> bool:
        """Return True if the server holds back a gang's orders until an engine has reserved the gang."""
        deliveries = self._deliveries
        nodes_of_it = [crew.node for crew in run.crews]
        return deliveries.never_left(run.id, run.fence) and deliveries.is_held_back(run.id, run.fence, nodes_of_it)

    def _hear_engine(self) -> None:
        """Record which nodes the engine reports as lost or found."""
        if self._engine is None:
            return
        heard = self._engine.events()
        if not heard:
            return
        joined = {node.name: node for node in self._database.read(nodes.every)}
        for event in heard:
            node = joined.get(event.node if isinstance(event, NodeLost) else event.node.name)
            if node is not None and isinstance(event, NodeLost):
                self._presence.lose(node.id, event.sentence)
            elif node is not None:
                self._presence.find(node.id)
        self._hub.touch(SCHEDULER)

    def _release(self, reserved: Sequence[str], gangs: set[tuple[str, int]]) -> None:
        """Release the engine reservations of ended gangs."""
        if self._engine is None:
            return
        going_on = {f"{run_id}:{fence}" for run_id, fence in gangs}
        for gang in reserved:
            if gang not in going_on:
                self._engine.release(gang)
