"""Refuses a run that no node known in the last day could ever serve, before the run is queued.

    nodes heard of within `KNOWN_S`, drained and silent ones included ─▶ one could serve it   ─▶ queued
                                                                      └▶ none could           ─▶ NoSuitableNode
    no node known, or a node of the engine has not said hello yet     ─▶ queued; asked again once that is over

A run with `wait` is queued in any case and ends after `unsatisfiable_after` (`unsatisfiable.py`), as does a run whose
node goes away while it waits. What was found to be possible is remembered for some seconds: of a thousand equal
requests one is looked at.

Remembers for some seconds which runs some node could serve, and which runs were queued before that was known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import NoSuitableNode
from serverless_gpu.model.scheduling.feasibility import Shortage, like, shortage
from serverless_gpu.model.scheduling.values import QueuedRun
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.identity import uid_sharing
from serverless_gpu.server.lifecycle.liveness import Presence
from serverless_gpu.server.nodes import capacity
from serverless_gpu.server.records import nodes, pools
from serverless_gpu.server.records.runs.runs import StoredRun
from serverless_gpu.server.scheduling.run_demand import Past, wanted

KEPT_S = 10.0
_ALIKE_MAX = 1_000
_UNDECIDED_MAX = 10_000


class FeasibilityMemory:
    """What admission found out. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until_ns: dict[QueuedRun, int] = {}
        self._undecided: dict[str, None] = {}

    def knows(self, alike: QueuedRun, now_ns: int) -> bool:
        """Return whether some node could serve such a run a moment ago."""
        with self._lock:
            return now_ns < self._until_ns.get(alike, 0)

    def note(self, alike: QueuedRun, now_ns: int) -> None:
        """Remember that some node could serve such a run."""
        with self._lock:
            if len(self._until_ns) >= _ALIKE_MAX:
                self._until_ns.clear()
            self._until_ns[alike] = now_ns + round(KEPT_S * 1e9)

    def defer(self, run_id: str) -> None:
        """Remember a run that was queued while not all nodes were known."""
        with self._lock:
            if len(self._undecided) < _UNDECIDED_MAX:
                self._undecided[run_id] = None

    def undecided(self) -> list[str]:
        """Return the runs that were queued while not all nodes were known."""
        with self._lock:
            return list(self._undecided)

    def settle(self, run_id: str) -> None:
        """Forget a run: it is decided, or waits no more."""
        with self._lock:
            self._undecided.pop(run_id, None)


KNOWN_S = 86_400.0
"""A node counts for so long after it was heard of last."""


class Feasibility:
    """Checks that some node could serve a run."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        presence: Presence,
        feasible: FeasibilityMemory,
        engine_nodes: Callable[[], Collection[str]],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._presence = presence
        self._feasible = feasible
        self._engine_nodes = engine_nodes

    def refuse(self, connection: sa.Connection, run: StoredRun) -> bool:
        """Refuse a run that no known node could ever serve.

        Args:
            connection: reading is enough.
            run: as it would be written down.

        Returns:
            Whether the nodes that are known were enough to decide; otherwise `FeasibilityMemory.defer` takes the run.

        Raises:
            NoSuitableNode: no node could serve it.
        """
        if run.spec.wait:
            return True
        serves = uid_sharing.Isolation.of(pools.every(connection), uid_sharing.first_administrator(connection))
        now_ns = self._clock.wall_ns()
        asked = wanted(run, Past(second_principal=serves.is_second(run.owner)), now_ns=now_ns)
        is_decided, found = self.decide(connection, asked)
        if found is not None:
            raise _refusal(run, found)
        return is_decided

    def decide(self, connection: sa.Connection, asked: QueuedRun) -> tuple[bool, Shortage | None]:
        """Return whether the known nodes are enough to decide, and why none of them could ever serve a run."""
        alike, now_ns = like(asked), self._clock.boottime_ns()
        if self._feasible.knows(alike, now_ns):
            return True, None
        times, presence = capacity.now(self._settings, self._clock), self._presence
        known = [
            node
            for node in nodes.every(connection)
            if times.wall_ns - capacity.last_seen_ns(node, presence, times) <= KNOWN_S * 1e9
        ]
        there = capacity.Floor(nodes=tuple(known), pools=tuple(pools.every(connection)), active=())
        found = None
        if known:
            found = shortage(capacity.offers(there, presence, times), [pool.planned for pool in there.pools], asked)
        if known and found is None:
            self._feasible.note(alike, now_ns)
            return True, None
        here = {node.name for node in known if presence.last_ns(node.id) is not None}
        if not known or not here.issuperset(self._engine_nodes()):
            return False, None
        return True, found


def _refusal(run: StoredRun, found: Shortage) -> NoSuitableNode:
    error = NoSuitableNode(f"{found.why}; the run was not queued")
    resources = run.spec.resources
    error.gpus, error.gpu_type, error.pool = resources.gpus, resources.gpu_type, run.pool
    error.choices = tuple(choice.changes() for choice in found.choices)
    return error
