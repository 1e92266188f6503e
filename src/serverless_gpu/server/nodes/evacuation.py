"""Runs that have to leave their node: it is drained with `--stop`, or it ceases to be shared.

    5 minutes before the turn   the run's owner is told, once; it is written down when the run has to be gone
    then                        the run is asked to stop (DRAIN): grace, checkpoint; with `resume` it goes on elsewhere
    a calendar that is changed  what was told is taken back (`node_admin.py`); the next look says it anew
    `drain --stop`              at once: who asks for that does not want to wait

Nobody leaves without having been told five minutes before, also when the calendar was changed a moment ago or the
server was away over the turn; a server that is killed in between knows from the crew's row who was told.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import sqlalchemy as sa

from serverless_gpu.ambient import Clock, format_soon
from serverless_gpu.errors import AlreadyFinished, StaleAttempt
from serverless_gpu.model.lifecycle.attempt import StopReason
from serverless_gpu.server.core.hub import Hub, run_key
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.liveness import Leases
from serverless_gpu.server.lifecycle.transitions import Announcer, TransitionResult
from serverless_gpu.server.nodes import node_rules
from serverless_gpu.server.records import audit, nodes
from serverless_gpu.server.records.nodes import RuledNode
from serverless_gpu.server.records.runs import crews, runs
from serverless_gpu.server.records.runs.crews import StoredCrew
from serverless_gpu.server.records.runs.runs import StoredRun

TOGETHER = 8
"""Runs that are asked to stop in one transaction: others write, too."""
_Due = tuple[RuledNode, StoredRun, str]
_log = logging.getLogger(__name__)


class Evacuation:
    """Warns and stops runs that have to leave their node."""

    def __init__(self, *, clock: Clock, database: Transactions, hub: Hub, leases: Leases, announcer: Announcer) -> None:
        self._clock = clock
        self._database = database
        self._hub = hub
        self._leases = leases
        self._announcer = announcer

    def look(self) -> None:
        """Tell runs that they have to leave their node soon, and ask those to stop whose time has come."""
        at_ns = self._clock.wall_ns()
        freed = self._leases.freed()
        due: list[_Due] = []
        for node, run in self._database.read(lambda connection: _concerned(connection, at_ns)):
            own = [] if run.attempt is None else [crew for crew in run.attempt.open_crews if crew.node_id == node.id]
            if run.stop is not None or not own or own[0].id in freed:
                continue
            because = self._look_at(node, run, own[0], at_ns)
            if because is not None:
                due.append((node, run, because))
        for first in range(0, len(due), TOGETHER):
            self._ask_together(due[first : first + TOGETHER])

    def _look_at(self, node: RuledNode, run: StoredRun, crew: StoredCrew, at_ns: int) -> str | None:
        """Tell a run's owner that it has to leave, or return why it is to stop now."""
        leave = node_rules.leaves(node.rules, node=node.name, owner=run.owner, at_ns=at_ns)
        if leave is None:
            return None
        if leave.at_ns is None:
            return leave.because
        told_ns = crew.leave_ns
        if told_ns is None or told_ns < leave.at_ns > at_ns:  # never, or of a turn before that it has lived through
            leave_ns = max(leave.at_ns, at_ns + round(node_rules.WARNING_S * 1e9))
            self._database.write(lambda connection: crews.note(connection, crew.id, leave_ns=leave_ns))
            _log.info("run %s has to leave %s at %s", run.id, node.name, format_soon(leave_ns, at_ns))
            self._hub.touch(run_key(run.id))
            return None
        return leave.because if max(told_ns, leave.at_ns) <= at_ns else None

    def _ask_together(self, due: Sequence[_Due]) -> None:
        """Ask runs to stop that are still where they were, and about which nobody has decided otherwise meanwhile."""
        at_ns = self._clock.wall_ns()
        for told in self._database.write(lambda connection: [_ask(connection, one, at_ns) for one in due]):
            if told is not None:
                self._announcer.announce(told)


def _concerned(connection: sa.Connection, at_ns: int) -> list[tuple[RuledNode, StoredRun]]:
    return [
        (node, run)
        for node in nodes.ruled(connection)
        if node_rules.may_concern(node.rules, at_ns)
        for run in runs.on_node(connection, node.id)
    ]


def _ask(connection: sa.Connection, due: _Due, at_ns: int) -> TransitionResult | None:
    node, run, because = due
    there, now = nodes.get(connection, node.id), runs.find(connection, run.id)
    if there is None or there.rules != node.rules or now is None or (now.fence, now.stop) != (run.fence, None):
        return None
    try:
        return transitions.ask_to_stop(
            connection, run.id, who=audit.SERVER, why=StopReason.DRAIN, at_ns=at_ns, because=because
        )
    except (AlreadyFinished, StaleAttempt):
        return None
