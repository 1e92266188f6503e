"""Taking back an order that has not left this process: its attempt is over before it was anywhere."""

from __future__ import annotations

import logging

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.model.lifecycle.attempt import ACTIVE, STOPPED_BY, Reason
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.liveness import Deliveries
from serverless_gpu.server.lifecycle.transitions import Announcer, Note, TransitionResult
from serverless_gpu.server.records.runs import crews, runs

_log = logging.getLogger(__name__)


class Requeue:
    """Returns runs to the queue whose order has not left the server."""

    def __init__(self, *, clock: Clock, database: Transactions, deliveries: Deliveries, announcer: Announcer) -> None:
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

        Args:
            run_id: the run.
            fence: number of the attempt.
            why: for people; the last one of several is why the run ended.

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
            told = transitions.tell(connection, run, AttemptEnded(reason=reason, began=False), note=note)
            transitions.settle_all(connection, run.attempt, at_ns=at_ns)  # nothing comes of what was nowhere
            return told

        told = self._database.write(refuse)
        if told is not None:
            self._announcer.announce(told)
            _log.warning("attempt %s:%s did not start: %s", run_id, fence, why)
        return told is not None
