"""What those who wait are told, in memory: the next tick of the scheduler says it anew."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from serverless_gpu.model.queueing import Wait


class Sentences:
    """Why runs wait, by run. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: Mapping[str, Wait] = {}

    def of(self, run_id: str) -> str:
        """Return what a waiting run is told; "" while nobody has looked, or when it does not wait."""
        with self._lock:
            wait = self._waits.get(run_id)
        return "" if wait is None else wait.sentence

    def replace(self, waits: Mapping[str, Wait]) -> list[str]:
        """Put the sentences of a tick in place of all before; return the runs that are told something else now."""
        with self._lock:
            before, self._waits = self._waits, dict(waits)
        return [run_id for run_id, wait in waits.items() if before.get(run_id) != wait]
