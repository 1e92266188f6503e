"""What nothing that has joined can ever serve is told so at once, and ends when that has lasted for long enough.

    a node leaves, a pool shrinks ─▶ "no node has H100 …" ─── as long as it is so ──▶ FAILED/unsatisfiable
                                     └─ a node joins ─▶ it waits as any other, and counts from the beginning

How long it has been so is counted by the server that is there, in its memory: one that is started again begins anew, so
that a run does not end because of what nobody looked at meanwhile. A node that is silent or drained can still come
back, and counts as there until it is forgotten.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import StaleAttempt
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.lifecycle.run_lifecycle import Unsatisfiable
from serverless_gpu.model.scheduling.feasibility import like
from serverless_gpu.model.scheduling.values import QueuedRun
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.transitions import Announcer, Note, TransitionResult
from serverless_gpu.server.records.runs import runs
from serverless_gpu.server.scheduling.feasibility import Feasibility, FeasibilityMemory
from serverless_gpu.server.scheduling.wait_reasons import Sentences

EVERY_S = 30.0
AT_ONCE = 64
_log = logging.getLogger(__name__)


class UnsatisfiableRuns:
    """Since when runs wait for what can never be. For one thread."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        sentences: Sentences,
        feasible: FeasibilityMemory,
        announcer: Announcer,
        feasibility: Feasibility,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._sentences = sentences
        self._feasible = feasible
        self._announcer = announcer
        self._feasibility = feasibility
        self._since: dict[str, int] = {}
        self._ends_ns: dict[str, int] = {}
        self._looked_ns: int | None = None
        sentences.end_by(self.ends_ns)

    def look(self, waiting: Mapping[str, QueuedRun], now_ns: int) -> int:
        """End some of those that have waited long enough; return how many there were.

        Args:
            waiting: everybody who waits.
            now_ns: boottime, nanoseconds.
        """
        self._decide_deferred(waiting)
        after_s = self._settings.unsatisfiable_after_s
        is_due = self._looked_ns is None or now_ns - self._looked_ns >= EVERY_S * 1e9
        if not after_s or not is_due:
            return 0
        self._looked_ns = now_ns
        why = self._never(waiting.values())
        self._since = {run_id: self._since.get(run_id, now_ns) for run_id in why}
        self._ends_ns = {run_id: at_ns for run_id, at_ns in self._ends_ns.items() if run_id in why}
        over = [run_id for run_id, since_ns in self._since.items() if now_ns - since_ns >= after_s * 1e9]
        for run_id in over[:AT_ONCE]:
            self._end(run_id, why[run_id])
        return len(over)

    def _decide_deferred(self, waiting: Mapping[str, QueuedRun]) -> None:
        """End runs that were queued before nodes were known, and that none of these could ever serve."""
        for run_id in self._feasible.undecided():
            wanted = waiting.get(run_id)
            if wanted is None:
                self._feasible.settle(run_id)
                continue
            is_decided, found = self._database.read(functools.partial(self._feasibility.decide, asked=wanted))
            if is_decided:
                self._feasible.settle(run_id)
            if found is not None:
                self._end(run_id, self._sentences.impossible(wanted) or found.why)

    def ends_ns(self, run_id: str) -> int | None:
        """Return when a run that can never be served ends, nanoseconds since 1970; None for never."""
        after_s, clock = self._settings.unsatisfiable_after_s, self._clock
        if not after_s:
            return None
        if run_id not in self._ends_ns:
            since_ns = self._since.setdefault(run_id, clock.boottime_ns())
            self._ends_ns[run_id] = clock.wall_ns() + since_ns + round(after_s * 1e9) - clock.boottime_ns()
        return self._ends_ns[run_id]

    def _never(self, waiting: Iterable[QueuedRun]) -> dict[str, str]:
        """Return why those can never be served for whom that is so; the same for all that want the same."""
        known: dict[QueuedRun, str] = {}
        found: dict[str, str] = {}
        for wanted in waiting:
            alike = like(wanted)
            if alike not in known:
                known[alike] = self._sentences.impossible(alike)
            if known[alike]:
                found[wanted.run_id] = known[alike]
        return found

    def _end(self, run_id: str, detail: str) -> None:
        note = Note(at_ns=self._clock.wall_ns(), detail=detail)

        def work(connection: sa.Connection) -> TransitionResult | None:
            run = runs.find(connection, run_id)
            if run is None or run.state is not State.QUEUED:
                return None
            try:
                return transitions.tell(connection, run, Unsatisfiable(), note=note)
            except StaleAttempt:
                return None

        told = self._database.write(work)
        if told is not None:
            self._announcer.announce(told)
            _log.warning("run %s ended: nothing could ever serve it: %s", run_id, detail)
