"""Who has to leave so that another one finds room is asked to stop, in order, and goes on later.

    decided ─▶ does the other one still wait? ─▶ StopReason.PREEMPT, by the server, with who for ─▶ its node
            its ranks write a checkpoint ─▶ attempt over: PREEMPTED ─▶ it waits again, as old as before

What was decided on something that is so no more is left out: the next decision finds it so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import AlreadyFinished, StaleAttempt
from serverless_gpu.model.lifecycle.attempt import ACTIVE, State, StopReason
from serverless_gpu.model.scheduling.values import Preemption
from serverless_gpu.server.core.server_metrics import Measures
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.transitions import Announcer, TransitionResult
from serverless_gpu.server.records import audit
from serverless_gpu.server.records.runs import runs

_TOGETHER = 8
_log = logging.getLogger(__name__)


class Preemptor:
    """Stops runs to free devices for others."""

    def __init__(self, *, clock: Clock, database: Transactions, measures: Measures, announcer: Announcer) -> None:
        self._clock = clock
        self._database = database
        self._measures = measures
        self._announcer = announcer

    def preempt(self, preemptions: Sequence[Preemption]) -> int:
        """Ask runs to stop for others that wait; return how many were asked.

        Args:
            preemptions: as they were decided.
        """
        asked = 0
        for first in range(0, len(preemptions), _TOGETHER):
            some = preemptions[first : first + _TOGETHER]
            at_ns = self._clock.wall_ns()

            def work(
                connection: sa.Connection, some: Sequence[Preemption] = some, at_ns: int = at_ns
            ) -> list[TransitionResult | None]:
                return [_ask(connection, one, at_ns) for one in some]

            for one, told in zip(some, self._database.write(work), strict=True):
                if told is not None and told.changed:
                    self._announcer.announce(told)
                    self._measures.preempted.inc()
                    _log.info("run %s makes room for run %s", one.run_id, one.for_run)
                    asked += 1
        return asked


def _ask(connection: sa.Connection, one: Preemption, at_ns: int) -> TransitionResult | None:
    run, other = runs.find(connection, one.run_id), runs.find(connection, one.for_run)
    if run is None or run.state not in ACTIVE or run.stop is not None:
        return None
    if other is None or other.state is not State.QUEUED:
        return None
    try:
        return transitions.ask_to_stop(
            connection, run.id, who=audit.SERVER, why=StopReason.PREEMPT, at_ns=at_ns, because=one.sentence
        )
    except (AlreadyFinished, StaleAttempt):
        return None
