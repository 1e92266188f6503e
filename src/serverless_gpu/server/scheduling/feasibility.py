"""Refuses or ends runs that no node could ever execute.

`Feasibility` checks a run before the server queues it:

    nodes that reported within `KNOWN_S`, also drained and silent ones ─▶ one could serve it   ─▶ queued
                                                                       └▶ none could           ─▶ NoSuitableNode
    no known node, or a node of the engine has not sent hello yet      ─▶ queued; decided later

`FeasibilityCache` caches feasible demands for some seconds. With a thousand equal requests, the server therefore checks
only the first request. The cache also stores the runs that the server queued before it knew any nodes.

The server always queues a run with the `wait` option. `UnsatisfiableRuns` ends a queued run if no node could execute
the run during `unsatisfiable_after`:

    a node leaves, a pool shrinks ─▶ "no node has H100 …" ── no change in time ─▶ FAILED/unsatisfiable
                                     └─ a node joins ─▶ it waits like any other run; the timer is reset

The timer of an unsatisfiable run exists only in memory and starts again after a server restart. Server downtime
therefore does not end a run. The server also counts silent and drained nodes, because they can return.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.engines.base import EngineNode
from serverless_gpu.errors import NoSuitableNode, StaleAttempt
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.lifecycle.run_lifecycle import Unsatisfiable
from serverless_gpu.model.scheduling.feasibility import Shortage, like, shortage
from serverless_gpu.model.scheduling.values import QueuedRun
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.identity import uid_sharing
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.liveness import Presence
from serverless_gpu.server.lifecycle.transitions import Announcer, Note, TransitionResult
from serverless_gpu.server.nodes import capacity
from serverless_gpu.server.records import nodes, pools, principals, runs
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.server.scheduling.queue_snapshot import Past, queued_run
from serverless_gpu.server.scheduling.wait_reasons import WaitReasons

KEPT_S = 10.0
_ALIKE_MAX = 1_000
_UNDECIDED_MAX = 10_000
KNOWN_S = 86_400.0
"""Seconds after its last message during which a silent node counts as known."""
EVERY_S = 30.0
AT_ONCE = 64
_log = logging.getLogger(__name__)


class Feasibility:
    """Checks that at least one node could execute a run."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        presence: Presence,
        feasible: FeasibilityCache,
        engine_nodes: Callable[[], Collection[EngineNode]],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._presence = presence
        self._feasible = feasible
        self._engine_nodes = engine_nodes

    def refuse(self, connection: sa.Connection, run: StoredRun) -> bool:
        """Refuse a run that no known node could ever execute.

        Return True if the server knows enough nodes for a decision. If the result is False, the caller passes the run
        to `FeasibilityCache.defer`.
        """
        if run.spec.wait:
            return True
        serves = uid_sharing.Isolation.of(pools.every(connection), principals.first_administrator(connection))
        now_ns = self._clock.wall_ns()
        asked = queued_run(run, Past(second_principal=serves.is_second(run.owner)), now_ns=now_ns)
        is_decided, found = self.decide(connection, asked)
        if found is not None:
            error = NoSuitableNode(f"{found.why}; the run was not queued")
            resources = run.spec.resources
            error.gpus, error.gpu_type, error.pool = resources.gpus, resources.gpu_type, run.pool
            error.choices = tuple(choice.changes() for choice in found.choices)
            raise error
        return is_decided

    def decide(self, connection: sa.Connection, asked: QueuedRun) -> tuple[bool, Shortage | None]:
        """Return True if the server knows enough nodes for a decision, and the shortage, if any."""
        alike, now_ns = like(asked), self._clock.boottime_ns()
        if self._feasible.knows(alike, now_ns):
            return True, None
        times, presence = capacity.now(self._settings, self._clock), self._presence
        known = [
            node
            for node in nodes.every(connection)
            if times.wall_ns - capacity.last_seen_ns(node, presence, times) <= KNOWN_S * 1e9
        ]
        there = capacity.CapacitySnapshot(nodes=tuple(known), pools=tuple(pools.every(connection)), active=())
        found = None
        if known:
            found = shortage(capacity.offers(there, presence, times), [pool.planned for pool in there.pools], asked)
        if known and found is None:
            self._feasible.note(alike, now_ns)
            return True, None
        here = {node.name for node in known if presence.last_ns(node.id) is not None}
        if not known or not here.issuperset(node.name for node in self._engine_nodes()):
            return False, None
        return True, found


class FeasibilityCache:
    """Caches feasible demands and keeps a list of deferred runs. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until_ns: dict[QueuedRun, int] = {}
        self._undecided: dict[str, None] = {}

    def knows(self, alike: QueuedRun, now_ns: int) -> bool:
        """Return True if a recent check found a node for an equal demand."""
        with self._lock:
            return now_ns < self._until_ns.get(alike, 0)

    def note(self, alike: QueuedRun, now_ns: int) -> None:
        """Record a demand that some node could satisfy."""
        with self._lock:
            if len(self._until_ns) >= _ALIKE_MAX:
                self._until_ns.clear()
            self._until_ns[alike] = now_ns + round(KEPT_S * 1e9)

    def defer(self, run_id: str) -> None:
        """Add a run that the server queued before it knew all nodes."""
        with self._lock:
            if len(self._undecided) < _UNDECIDED_MAX:
                self._undecided[run_id] = None

    def undecided(self) -> list[str]:
        """Return the runs that the server queued before it knew all nodes."""
        with self._lock:
            return list(self._undecided)

    def settle(self, run_id: str) -> None:
        """Remove a run from the deferred runs."""
        with self._lock:
            self._undecided.pop(run_id, None)


class UnsatisfiableRuns:
    """Ends waiting runs whose devices no node can provide. Not thread-safe."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        sentences: WaitReasons,
        feasible: FeasibilityCache,
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
        """End some runs that waited too long for a suitable node. Return the number of all overdue runs."""
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
        """Decide deferred runs again, and end the runs that no known node could ever execute."""
        for run_id in self._feasible.undecided():
            run = waiting.get(run_id)
            if run is None:
                self._feasible.settle(run_id)
                continue
            is_decided, found = self._database.read(functools.partial(self._feasibility.decide, asked=run))
            if is_decided:
                self._feasible.settle(run_id)
            if found is not None:
                # The planner may not know the node yet that has just joined.
                self._end(run_id, found.why)

    def ends_ns(self, run_id: str) -> int | None:
        """Return the time at which the server ends an unsatisfiable run (nanoseconds since 1970), or None."""
        after_s, clock = self._settings.unsatisfiable_after_s, self._clock
        if not after_s:
            return None
        if run_id not in self._ends_ns:
            since_ns = self._since.setdefault(run_id, clock.boottime_ns())
            self._ends_ns[run_id] = clock.wall_ns() + since_ns + round(after_s * 1e9) - clock.boottime_ns()
        return self._ends_ns[run_id]

    def _never(self, waiting: Iterable[QueuedRun]) -> dict[str, str]:
        """Return the reason for each run that no node can ever execute."""
        known: dict[QueuedRun, str] = {}
        found: dict[str, str] = {}
        for run in waiting:
            alike = like(run)
            if alike not in known:
                known[alike] = self._sentences.impossible(alike)
            if known[alike]:
                found[run.run_id] = known[alike]
        return found

    def _end(self, run_id: str, detail: str) -> None:
        note = Note(at_ns=self._clock.wall_ns(), detail=detail)

        def work(connection: sa.Connection) -> TransitionResult | None:
            run = runs.find(connection, run_id)
            if run is None or run.state is not State.QUEUED:
                return None
            try:
                return transitions.apply(connection, run, Unsatisfiable(), note=note)
            except StaleAttempt:
                return None

        told = self._database.write(work)
        if told is not None:
            self._announcer.announce(told)
            _log.warning("run %s ended: no node could ever serve it: %s", run_id, detail)
