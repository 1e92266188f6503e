"""Remembers for some seconds which runs some node could serve, and which runs were queued before that was known."""

from __future__ import annotations

import threading

from serverless_gpu.model.scheduling.values import QueuedRun

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
