"""Reserves placed gangs with an engine before the server sends the start orders.

    just placed ─▶ `ask`  ─┐
    each tick   ─▶ `look` ─┴▶ engine.submit
         Placed       the order streams of the nodes send the orders (`OrderDeliveries.is_held_back`)
         Waiting      the run's wait reason contains the reason; the next tick retries
         Impossible   the run returns to the queue
    stop request before the reservation ─▶ the attempt ends at once

If a gang also uses nodes outside the engine, the server holds back the orders of all its nodes. Ranks that start before
their peers would fail to connect.

After a crash, the next server process reads the open orders and the engine's stored reservations. If a gang has neither
a reservation nor a confirmed order, no server process has sent its orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import sqlalchemy as sa

from serverless_gpu.engines.base import Engine, Gang, Impossible, Placed, Request, Share
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.scheduling.values import Placement
from serverless_gpu.server.core.hub import Hub, node_key, run_key
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle.requeue import OrderDeliveries, Requeue
from serverless_gpu.server.records import crews, orders, runs
from serverless_gpu.server.records.active_runs import ActiveRun
from serverless_gpu.server.records.nodes import StoredNode

_UNKNOWN = "\0"  # Placeholder for a wait reason that an earlier server process may have stored.


class _Asked(msgspec.Struct, frozen=True):
    """A gang whose nodes the engine must reserve."""

    run_id: str
    fence: int
    request: Request  # The reservation request for the gang's engine nodes.
    node_ids: tuple[str, ...]  # Identifiers of all nodes of the gang.


class EngineReservations:
    """Reserves gangs with an engine. Only `give_back` is thread-safe.

    Machines can also join the server without the engine.
    """

    def __init__(
        self, *, database: Transactions, hub: Hub, deliveries: OrderDeliveries, requeue: Requeue, engine: Engine | None
    ) -> None:
        self._database = database
        self._hub = hub
        self._deliveries = deliveries
        self._requeue = requeue
        self._engine = engine
        self._asked: dict[str, _Asked] = {}
        self._said: dict[str, str] = {}
        self._has_looked = False
        if engine is not None:
            deliveries.watch(engine)

    @property
    def is_waiting(self) -> bool:
        """Return True if gangs still wait for a reservation by the engine."""
        return bool(self._asked)

    def ask(self, placement: Placement, fence: int, stored: Mapping[str, StoredNode]) -> None:
        """Request the reservation of a newly placed gang."""
        shares = [
            (share.node_id, Share(node=stored[share.node_id].name, gpu_type=share.gpu_type, count=share.count))
            for share in placement.shares
        ]
        asked = self._wanted(placement.run_id, fence, shares)
        if asked is not None:
            self._asked[asked.request.gang.id] = asked
            self._ask(asked)

    def look(self, active: Sequence[ActiveRun]) -> None:
        """Request the missing reservations of starting gangs, also for an earlier server process.

        A running gang already has a reservation.
        """
        if self._engine is None:
            return
        reserved = set(self._engine.recover())
        found: list[tuple[ActiveRun, _Asked]] = []
        for run in active:
            if f"{run.id}:{run.fence}" in reserved:
                continue
            shares = [
                (crew.node_id, Share(node=crew.node, gpu_type=run.gpu_type, count=crew.gpus)) for crew in run.crews
            ]
            asked = self._wanted(run.id, run.fence, shares)
            if asked is not None:
                found.append((run, asked))
        self._look_first([run for run, _ in found])
        self._asked = {
            asked.request.gang.id: asked for run, asked in found if run.stop is None and run.state is State.STARTING
        }
        self._said = {gang: sentence for gang, sentence in self._said.items() if gang in self._asked}
        for run, _ in found:
            if run.stop is not None:
                self.give_back(run.id, run.fence, f"a stop was requested ({run.stop}) before the run started")
        for asked in list(self._asked.values()):
            self._ask(asked)

    def give_back(self, run_id: str, fence: int, why: str) -> bool:
        """Requeue a run whose start order is unsent. Return True if the run was requeued."""
        is_over = self._requeue.give_back(run_id, fence, why)
        if is_over and self._engine is not None:
            self._engine.release(f"{run_id}:{fence}")
        return is_over

    def _look_first(self, found: Sequence[ActiveRun]) -> None:
        """Register the unsent orders of gangs that an earlier process placed but did not reserve."""
        if self._has_looked:
            return
        ids = [run.id for run in found]

        def untouched(connection: sa.Connection) -> list[tuple[str, int]]:
            taken = orders.taken(connection, ids)
            return [
                (run.id, run.fence)
                for run in runs.find_many(connection, ids)
                # Skip restored runs, because a run may have started after the server's backup.
                if run.restored_ns is None and (run.id, run.fence) not in taken
            ]

        for run_id, fence in self._database.read(untouched) if ids else ():
            self._deliveries.made(run_id, fence)
            self._said[f"{run_id}:{fence}"] = _UNKNOWN
        self._has_looked = True

    def _wanted(self, run_id: str, fence: int, shares: Sequence[tuple[str, Share]]) -> _Asked | None:
        """Return the engine request for a gang, or None if the gang uses no engine nodes."""
        engine = self._engine
        own = tuple(share for _, share in shares if engine is not None and engine.has(share.node))
        if engine is None or not own:
            return None
        request = engine.plan(Gang(id=f"{run_id}:{fence}", shares=own))
        return _Asked(run_id, fence, request, tuple(node_id for node_id, _ in shares))

    def _ask(self, asked: _Asked) -> None:
        if self._engine is None:
            return
        gang = asked.request.gang.id
        answer = self._engine.submit(asked.request)
        if isinstance(answer, Placed):
            del self._asked[gang]
            self._say(asked, "")
            for node_id in asked.node_ids:
                self._hub.touch(node_key(node_id))
        elif isinstance(answer, Impossible):
            del self._asked[gang]
            if not self.give_back(asked.run_id, asked.fence, answer.sentence):
                # The node will report the outcome of an order that an earlier process may have sent.
                self._say(asked, answer.sentence)
        else:
            self._say(asked, answer.sentence)

    def _say(self, asked: _Asked, sentence: str) -> None:
        """Store the wait reason of a gang if the reason has changed."""
        gang = asked.request.gang.id
        if self._said.get(gang, "") == sentence:
            return
        self._database.write(
            lambda connection: crews.note_all(connection, asked.run_id, asked.fence, sentence=sentence)
        )
        self._said[gang] = sentence
        self._hub.touch(run_key(asked.run_id))
