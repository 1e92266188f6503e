"""Cancels start orders that this process has not sent. Runs of canceled orders wait again.

    an order: allowed to leave (`send`) ──▶ sent: never canceled
       └─ held back until an engine has reserved the gang        └─ canceled (`hold`): never sent

`OrderDeliveries` exists only in memory. An earlier server process may have sent its orders, so this process never
cancels them.
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
    """Tracks start orders by gang. The server either sends or cancels each order, never both.

    If a gang uses a node of an engine, the server holds back its start orders until the engine has reserved the gang.
    Each check queries the engine. After a restart, the server therefore holds back the same orders before it serves
    requests.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._sent: set[tuple[str, int]] = set()
        self._held: set[tuple[str, int]] = set()
        self._mine: set[tuple[str, int]] = set()

    def watch(self, engine: Engine) -> None:
        """Hold back start orders until this engine has reserved their gangs."""
        self._engine = engine

    def is_held_back(self, run_id: str, fence: int, nodes: Iterable[str]) -> bool:
        """Return True if the server must not send an order yet, because an engine has not reserved its gang."""
        engine = self._engine
        if engine is None or not any(engine.has(node) for node in nodes):
            return False
        return f"{run_id}:{fence}" not in engine.recover()

    def made(self, run_id: str, fence: int) -> None:
        """Record that this process created an order. An earlier process may already have sent its orders."""
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
        """Return True if the server has certainly not sent an order."""
        with self._lock:
            return (run_id, fence) in self._mine and (run_id, fence) not in self._sent

    def hold(self, run_id: str, fence: int) -> bool:
        """Cancel an order if it is unsent, and return True if the server will never send the order."""
        with self._lock:
            if (run_id, fence) in self._sent or (run_id, fence) not in self._mine:
                return False
            self._held.add((run_id, fence))
            return True

    def is_taken_back(self, run_id: str, fence: int) -> bool:
        """Return True if the order was canceled, so that the server never sends it."""
        with self._lock:
            return (run_id, fence) in self._held

    def known(self) -> frozenset[tuple[str, int]]:
        """Return all tracked gangs, whose orders are committed."""
        with self._lock:
            return frozenset(self._sent | self._held | self._mine)

    def forget(self, gangs: Collection[tuple[str, int]]) -> None:
        """Forget ended gangs: gangs tracked *before* the server read the database, and not active there.

        A gang that was tracked after that read may be a new placement. Without the entry for a gang, the server could
        cancel an order after sending, or send an order after cancellation.
        """
        with self._lock:
            for known in (self._sent, self._held, self._mine):
                known.difference_update(gangs)


class Requeue:
    """Returns runs to the queue if the server has not sent their orders."""

    def __init__(
        self, *, clock: Clock, database: Transactions, deliveries: OrderDeliveries, announcer: Announcer
    ) -> None:
        self._clock = clock
        self._database = database
        self._deliveries = deliveries
        self._announcer = announcer

    def give_back_on(self, node_id: str, why: str, *, boot_id: str | None = None) -> None:
        """End every attempt on a node whose order is unsent. `boot_id` limits the change to one boot."""
        there = self._database.read(lambda connection: crews.open_on(connection, node_id))
        for crew in there:
            if boot_id in (None, crew.boot_id):
                self.give_back(crew.run_id, crew.fence, why)

    def give_back(self, run_id: str, fence: int, why: str) -> bool:
        """End an attempt whose order is unsent, and cancel the order. The run waits again.

        After a stop request, the run ends instead.

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
            # An attempt that never started on a node sends no receipt from this node.
            transitions.settle_all(connection, run.attempt, at_ns=at_ns)
            return told

        told = self._database.write(refuse)
        if told is not None:
            self._announcer.announce(told)
            _log.warning("attempt %s:%s did not start: %s", run_id, fence, why)
        return told is not None
