"""What those who wait are told, in memory: the next tick of the scheduler says it anew."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import msgspec

from serverless_gpu.model.queueing import Wait
from serverless_gpu.model.scheduling.values import Estimate, Reservation, WaitReason, Wanted
from serverless_gpu.model.scheduling.values import Wait as PlannedWait


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a waiting run is told; nothing of it while nobody has looked, or when it does not wait.

    Attributes:
        sentence: in words.
        wait: the same, part by part.
    """

    sentence: str = ""
    wait: PlannedWait | None = None


NOTHING = Told()


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

    def wait(self, run_id: str) -> PlannedWait | None:
        """Return why a run waits, part by part; None while nobody has looked, or when it does not wait."""
        with self._lock:
            wait = self._waits.get(run_id)
        if wait is None:
            return None
        reason = WaitReason.UNSATISFIABLE if wait.impossible else WaitReason.CAPACITY
        return PlannedWait(run_id=run_id, reason=reason, place=wait.place, words=wait.why)

    def waits(self, limit: int) -> list[PlannedWait]:
        """Return why those wait who are next, in the order of the queue."""
        return []

    def reservations(self) -> tuple[Reservation, ...]:
        """Return what is kept for whom."""
        return ()

    def usage(self) -> dict[str, float]:
        """Return the decayed use of each team, GPU-seconds; users without a team under ``"~name"``."""
        return {}

    def told(self, run_id: str) -> Told:
        """Return what a waiting run is told, in words and part by part."""
        return Told(sentence=self.of(run_id), wait=self.wait(run_id))

    def estimate(self, wanted: Wanted) -> Estimate:
        """Return when a run would start if it came now."""
        return Estimate(at_ns=None, basis="the scheduler has not looked yet")

    def replace(self, waits: Mapping[str, Wait]) -> list[str]:
        """Put the sentences of a tick in place of all before; return the runs that are told something else now."""
        with self._lock:
            before, self._waits = self._waits, dict(waits)
        return [run_id for run_id, wait in waits.items() if before.get(run_id) != wait]
