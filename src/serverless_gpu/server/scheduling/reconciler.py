"""The reconciler: what should be, what is heard, and what follows when the two part.

    a crew silent for longer than the soft limit the run is shown as UNREACHABLE; nothing else happens
    ... than grace + margin                      the node has ended the crew by its own clock: given up (NODE_GONE)
    an order that never left, its node away      taken back: the run is placed elsewhere
    ... that an engine's word holds back         its node's word counts for it: there is nothing else to be heard yet
    a receipt that never comes                   the run is settled without one
    an owner who may start no runs any more      as was decided then: their runs end by themselves, or are stopped
    a node that is drained or not shared         runs that have to leave it are told, and then stopped (`evacuation.py`)
    crews that do not meet                       the gang is called off, and placed again (`rendezvous.py`)
    a gang that is not what its crews amount to  made so, and said: it should not be (`gang_reconciler.py`)
    an engine's events                           nodes to be counted on, or not

Silence is judged by this process's boottime, and everything counts as heard of when it starts (`liveness.py`): a server
that was away for a day gives nobody up for it. Whatever is decided is one transaction with the run as it was read; when
a report was faster, nothing happens, and the next tick looks again.

A crew that is heard of is never ended here, however long it stops or sends its results: its processes are its
node's to count, and the node has a limit of its own for results. How long silence may last is what the attempt was
granted, not what this server grants today.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.engines.base import Engine, NodeLost
from serverless_gpu.errors import StaleAttempt
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.lifecycle.run_lifecycle import Event, GivenUp, IllegalRunTransition, Silent
from serverless_gpu.server.core.hub import SCHEDULER, Hub, run_key
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.gang_progress import GangProgress
from serverless_gpu.server.lifecycle.gang_reconciler import GangReconciler
from serverless_gpu.server.lifecycle.liveness import Deliveries, Leases, Looks, Presence
from serverless_gpu.server.lifecycle.owner_suspension import OwnerSuspension
from serverless_gpu.server.lifecycle.rendezvous import RendezvousService
from serverless_gpu.server.lifecycle.transitions import Announcer, Note, TransitionResult
from serverless_gpu.server.nodes.evacuation import Evacuation
from serverless_gpu.server.records import nodes
from serverless_gpu.server.records.runs import active_runs, crews, runs
from serverless_gpu.server.records.runs.active_runs import Active, ActiveCrew
from serverless_gpu.server.records.runs.crews import CrewId, StoredCrew
from serverless_gpu.server.scheduling.scheduler import Scheduler

EVERY_S = 2.0
SELDOM_S = 60.0
_log = logging.getLogger(__name__)


class Reconciler:
    """Looks after what goes on.

    Args:
        scheduler: takes back what can be.
        engine: whose events are heard.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        hub: Hub,
        leases: Leases,
        looks: Looks,
        presence: Presence,
        deliveries: Deliveries,
        gang_progress: GangProgress,
        announcer: Announcer,
        evacuation: Evacuation,
        gang_reconciler: GangReconciler,
        owner_suspension: OwnerSuspension,
        rendezvous: RendezvousService,
        scheduler: Scheduler,
        engine: Engine | None = None,
    ) -> None:
        self._clock = clock
        self._database = database
        self._hub = hub
        self._leases = leases
        self._looks = looks
        self._presence = presence
        self._deliveries = deliveries
        self._gang_progress = gang_progress
        self._announcer = announcer
        self._evacuation = evacuation
        self._gang_reconciler = gang_reconciler
        self._owner_suspension = owner_suspension
        self._rendezvous = rendezvous
        self._scheduler, self._engine = scheduler, engine
        self._soft_s = settings.soft_expiry_s
        self._grace_s, self._margin_s = settings.partition_grace_s, settings.partition_margin_s
        self._settled_ns: int | None = None
        self._unsettled: dict[CrewId, int] = {}

    def tick(self, now_ns: int) -> int | None:
        """Do everything that is due.

        Args:
            now_ns: boottime, nanoseconds.

        Returns:
            When to look again.
        """
        self._hear_engine()
        # Asked before the database: what is reserved has its intent there, so what is not there is over.
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
        for run in active:
            for crew in run.crews:
                if run.id in held_back and self._presence.is_there(crew.node_id, now_ns=now_ns):
                    self._leases.renew(crew.id, now_ns=now_ns)
                self._look(run, crew, now_ns)
        self._gang_reconciler.reconcile([run.id for run in active if run.num_nodes > 1])
        self._rendezvous.look([run for run in active if run.id not in held_back], now_ns)
        self._owner_suspension.stop_some()
        self._evacuation.look()
        self._release(reserved, gangs)
        if self._settled_ns is None or now_ns - self._settled_ns >= SELDOM_S * 1e9:
            self._settled_ns = now_ns
            self._settle(now_ns)
            self._gang_reconciler.reconcile()
        return now_ns + round(EVERY_S * 1e9)

    def _is_held_back(self, run: Active) -> bool:
        """Return whether a gang is nowhere yet, since the engine has not reserved it."""
        deliveries = self._deliveries
        nodes_of_it = [crew.node for crew in run.crews]
        return deliveries.never_left(run.id, run.fence) and deliveries.is_held_back(run.id, run.fence, nodes_of_it)

    def _look(self, run: Active, crew: ActiveCrew, now_ns: int) -> None:
        heard_ns = self._leases.last_ns(crew.id, now_ns=now_ns)
        silent_s = (now_ns - heard_ns) / 1e9
        if silent_s > self._soft_s and self._take_back(run, crew, now_ns):
            return
        if silent_s > crew.grace_s + self._margin_s:
            detail = f"nothing was heard of it for {silent_s:.0f} s"
            self._tell(crew, GivenUp(reason=Reason.NODE_GONE), heard_ns=heard_ns, detail=detail)
        elif silent_s > self._soft_s and crew.state is not State.UNREACHABLE:
            self._tell(crew, Silent(), heard_ns=heard_ns)

    def _take_back(self, run: Active, crew: ActiveCrew, now_ns: int) -> bool:
        if self._presence.is_there(crew.node_id, now_ns=now_ns):
            # Taken back, and that could not be written down then: it never leaves.
            return self._deliveries.is_taken_back(run.id, run.fence) and self._scheduler.give_back(
                run.id, run.fence, f"its order to {crew.node} was taken back"
            )
        return self._scheduler.give_back(run.id, run.fence, f"{crew.node} went away before it was told")

    def _tell(self, crew: ActiveCrew, event: Event, *, heard_ns: int, detail: str = "") -> None:
        """Tell a run that a crew of it is silent, unless that was heard of meanwhile: who reports was answered."""
        note = Note(at_ns=self._clock.wall_ns(), detail=detail)
        run_id, fence, number = crew.id

        def work(connection: sa.Connection) -> TransitionResult | None:
            found = runs.find(connection, run_id)
            if found is None or found.attempt is None or found.fence != fence:
                return None
            now = found.attempt.crews[number]
            if now.state is not crew.state or now.ended_ns is not None:
                return None
            if self._leases.last_ns(crew.id, now_ns=heard_ns) != heard_ns:
                return None
            return transitions.tell_crew(connection, found, number, event, note=note)

        try:
            told = self._database.write(work)
        except (StaleAttempt, IllegalRunTransition) as error:
            _log.info("nothing was done about run %s: %s", run_id, error)
            return
        if told is not None:
            self._announcer.announce(told)

    def _settle(self, now_ns: int) -> None:
        """Settle crews whose receipt would have come long ago, as this process saw them wait, by its boottime."""
        ended = {one.id: one for one in self._database.read(crews.unsettled)}
        self._unsettled = {crew: self._unsettled.get(crew, now_ns) for crew in ended}
        for crew, one in ended.items():
            if now_ns - self._unsettled[crew] > (self._grace_s + self._margin_s) * 1e9:
                self._settle_without(one)

    def _settle_without(self, crew: StoredCrew) -> None:
        at_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> bool:
            return transitions.settle(connection, crew.id, receipt=None, at_ns=at_ns)

        self._database.write(work)
        self._hub.touch(run_key(crew.run_id))

    def _hear_engine(self) -> None:
        """Note which nodes the engine counts on; a node is what has joined under the engine's name for it."""
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
        """Give back what the engine has reserved for gangs that are over."""
        if self._engine is None:
            return
        going_on = {f"{run_id}:{fence}" for run_id, fence in gangs}
        for gang in reserved:
            if gang not in going_on:
                self._engine.release(gang)
