"""Requeue: takes back orders that have not left this process; the run waits again.

    an order: may leave (`send`) ──▶ sent: never taken back
       └─ held back until an engine has reserved the gang     └─ taken back (`hold`): never leaves

`OrderDeliveries` is memory that is lost with the process: an order of an earlier process may have left, so it is never
taken back.
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
    """Orders to start, by gang, between "may leave" and "may be taken back": each is one or the other, never both.

    A gang on a node of an engine is held back, all of it, until the engine has reserved it. That is looked up and not
    remembered: a server that starts again holds back the same ones, before it has served anybody.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._sent: set[tuple[str, int]] = set()
        self._held: set[tuple[str, int]] = set()
        self._mine: set[tuple[str, int]] = set()

    def watch(self, engine: Engine) -> None:
        """Hold back what an engine has to reserve and has not."""
        self._engine = engine

    def is_held_back(self, run_id: str, fence: int, nodes: Iterable[str]) -> bool:
        """Return whether an order may not leave yet, since an engine has not reserved its gang."""
        engine = self._engine
        if engine is None or not any(engine.has(node) for node in nodes):
            return False
        return f"{run_id}:{fence}" not in engine.recover()

    def made(self, run_id: str, fence: int) -> None:
        """Note that no earlier process let an order leave; without that, it may have left long ago."""
        with self._lock:
            self._mine.add((run_id, fence))

    def send(self, run_id: str, fence: int) -> bool:
        """Return whether an order may leave now, and note that it does."""
        with self._lock:
            if (run_id, fence) in self._held:
                return False
            self._sent.add((run_id, fence))
            return True

    def never_left(self, run_id: str, fence: int) -> bool:
        """Return whether it is certain that an order has not left yet."""
        with self._lock:
            return (run_id, fence) in self._mine and (run_id, fence) not in self._sent

    def hold(self, run_id: str, fence: int) -> bool:
        """Return whether an order has never left and never will, so that it can be taken back."""
        with self._lock:
            if (run_id, fence) in self._sent or (run_id, fence) not in self._mine:
                return False
            self._held.add((run_id, fence))
            return True

    def is_taken_back(self, run_id: str, fence: int) -> bool:
        """Return whether an order never will leave."""
        with self._lock:
            return (run_id, fence) in self._held

    def known(self) -> frozenset[tuple[str, int]]:
        """Return all gangs that something is noted about: their intents are committed."""
        with self._lock:
            return frozenset(self._sent | self._held | self._mine)

    def forget(self, gangs: Collection[tuple[str, int]]) -> None:
        """Forget gangs that are over: known *before* the database was read, and not active there.

        One that became known after that read may just have been placed. Were it forgotten, an order that has left
        could be taken back, or one that was taken back could leave.
        """
        with self._lock:
            for known in (self._sent, self._held, self._mine):
                known.difference_update(gangs)


class Requeue:
    """Returns runs to the queue whose order has not left the server."""

    def __init__(
        self, *, clock: Clock, database: Transactions, deliveries: OrderDeliveries, announcer: Announcer
    ) -> None:
        self._clock = clock
        self._database = database
        self._deliveries = deliveries
        self._announcer = announcer

    def give_back_on(self, node_id: str, why: str, *, boot_id: str | None = None) -> None:
        """End every attempt on a node whose order has not left this process; `boot_id` limits it to that boot's."""
        there = self._database.read(lambda connection: crews.open_on(connection, node_id))
        for crew in there:
            if boot_id in (None, crew.boot_id):
                self.give_back(crew.run_id, crew.fence, why)

    def give_back(self, run_id: str, fence: int, why: str) -> bool:
        """End an attempt whose order has not left this process, and now never will: the run waits again.

        One that is asked to stop has stopped by that.

        Returns:
            Whether that was so.
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
            transitions.settle_all(connection, run.attempt, at_ns=at_ns)  # nothing comes of what was nowhere
            return told

        told = self._database.write(refuse)
        if told is not None:
            self._announcer.announce(told)
            _log.warning("attempt %s:%s did not start: %s", run_id, fence, why)
        return told is not None
