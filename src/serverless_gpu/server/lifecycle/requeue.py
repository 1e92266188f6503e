"""Cancels start orders that the server has not sent, and returns their runs to the queue.

    an order: allowed to leave (`send`) ──▶ sent: never canceled
       └─ held back until an engine has reserved the gang        └─ canceled (`hold`): never sent

`OrderDeliveries` exists only in memory. The current server process never cancels the orders of an earlier process,
which may have sent the orders.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.engines.base import Engine
from serverless_gpu.model.lifecycle.attempt import ACTIVE, STOPPED_BY, Reason
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.transitions import Announcer, Note, TransitionResult
from serverless_gpu.server.records import crews, runs

_log = logging.getLogger(__name__)


class OrderDeliveries:
    """Tracks start orders by gang.

    The server either sends or cancels each order, never both. If a gang uses an engine's node, the server holds back
    the gang's start orders until the engine has reserved the gang. The server asks the engine before it sends an order,
    even after a restart.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._sent: set[tuple[str, int]] = set()
        self._held: set[tuple[str, int]] = set()
        self._mine: set[tuple[str, int]] = set()

    def watch(self, engine: Engine) -> None:
        """Hold back start orders on nodes of an engine until the engine has reserved the gangs."""
        self._engine = engine

    def is_held_back(self, run_id: str, fence: int, nodes: Iterable[str]) -> bool:
        """Return True if an order must wait until the engine has reserved the order's gang."""
        engine = self._engine
        if engine is None or not any(engine.has(node) for node in nodes):
            return False
        return f"{run_id}:{fence}" not in engine.recover()

    def made(self, run_id: str, fence: int) -> None:
        """Record that the current server process created an order."""
        with self._lock:
            self._mine.add((run_id, fence))

    def send(self, run_id: str, fence: int) -> bool:
        """Return True if the server may send an order now, and mark the order as sent."""
        with self._lock:
            if (run_id, fence) in self._held:
                return False
            self._sent.add((run_id, fence))
            return True

    def never_left(self, run_id: str, fence: int) -> bool:
        """Return True if no server process has sent an order."""
        with self._lock:
            return (run_id, fence) in self._mine and (run_id, fence) not in self._sent

    def hold(self, run_id: str, fence: int) -> bool:
        """Cancel an unsent order, and return True if the server will never send the order."""
        with self._lock:
            if (run_id, fence) in self._sent or (run_id, fence) not in self._mine:
                return False
            self._held.add((run_id, fence))
            return True

    def is_taken_back(self, run_id: str, fence: int) -> bool:
        """Return True if the server has canceled the order."""
        with self._lock:
            return (run_id, fence) in self._held

    def known(self) -> frozenset[tuple[str, int]]:
        """Return all gangs with tracked orders."""
        with self._lock:
            return frozenset(self._sent | self._held | self._mine)

    def forget(self, gangs: Collection[tuple[str, int]]) -> None:
        """Stop tracking the orders of ended gangs.

        Callers must read the tracked gangs *before* they read the active gangs from the database. If a caller read the
        database first, a newly placed gang would look like an ended gang. Without tracking, the server could send a
        canceled order or cancel a sent order.
        """
        with self._lock:
            for known in (self._sent, self._held, self._mine):
                known.difference_update(gangs)


class Requeue:
    """Returns runs with unsent start orders to the queue."""

    def __init__(
        self, *, clock: Clock, database: Transactions, deliveries: OrderDeliveries, announcer: Announcer
    ) -> None:
        self._clock = clock
        self._database = database
        self._deliveries = deliveries
        self._announcer = announcer

    def give_back_on(self, node_id: str, why: str, *, boot_id: str | None = None) -> None:
        """End every attempt on a node with an unsent start order.

        With `boot_id`, end only attempts of the node's boot with this identifier.
        """
        there = self._database.read(lambda connection: crews.open_on(connection, node_id))
        for crew in there:
            if boot_id in (None, crew.boot_id):
                self.give_back(crew.run_id, crew.fence, why)

    def give_back(self, run_id: str, fence: int, why: str) -> bool:
        """End an attempt with an unsent start order, and cancel the order.

        The run returns to the queue, or ends if it has a stop request.

        Returns:
            True if this call ended the attempt.
        """
        if not self._deliveries.hold(run_id, fence):
            return False
        at_ns = self._clock.wall_ns()

        def refuse(connection: sa.Connection) -> TransitionResult | None:
            run = runs.find(connection, run_id)
            if run is None or run.attempt is None or run.fence != fence or run.state not in ACTIVE:
                return None
            reason, note = Reason.REFUSED, Note(at_ns=at_ns, detail=why)
            if run.stop is not None:
                reason, note = STOPPED_BY[run.stop], Note(at_ns=at_ns, detail=run.detail)
            told = transitions.apply(connection, run, AttemptEnded(reason=reason, began=False), note=note)
            # Nodes send no receipt for an attempt that never started.
            transitions.settle_all(connection, run.attempt, at_ns=at_ns)
            return told

        told = self._database.write(refuse)
        if told is not None:
            self._announcer.announce(told)
            _log.warning("attempt %s:%s did not start: %s", run_id, fence, why)
        return told is not None
