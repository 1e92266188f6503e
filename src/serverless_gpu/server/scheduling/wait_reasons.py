"""Reports why runs wait: requests and streams query the scheduler's planner from any thread.

    scheduler ── changes, decide ─▶ planner ◀── why, estimate ── requests, streams         serialized by a lock
        └─ after the tick: watched runs whose reason changed ─▶ the hub wakes their streams

Computing a reason needs a scan of the queue, which takes milliseconds for 10,000 runs. This module therefore computes a
reason on request and caches the reason until the next decision. With very many watched runs, the module caches reasons
for longer to limit the CPU load. With a thousand streams, a displayed queue position is up to 20 s old. Reasons exist
only in memory. After its start, the server returns no reasons before the first tick of the scheduler.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import msgspec

from serverless_gpu.ambient import format_soon
from serverless_gpu.model.scheduling import wait_messages
from serverless_gpu.model.scheduling.planner import Planner
from serverless_gpu.model.scheduling.values import QueuedRun, Reservation, StartEstimate, TeamUse, Wait, WaitReason

ASKED_S = 30.0
"""Seconds that a run stays watched after a request. Streams request the reason every nine seconds."""
ASKED_MAX = 10_000
NEWS_MAX = 16
"""Maximum number of watched runs to check after a tick. Later ticks check further runs in turn."""
A_SECOND = 50
"""Number of reasons to compute per second if more runs are watched."""
_NOBODY = "the scheduler has not read the queue yet"


class WaitNotice(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a run waits; empty before the scheduler's first tick, or if the run does not wait."""

    sentence: str = ""  # The wait reason as a sentence.
    wait: Wait | None = None  # The wait reason as separate values.
    trouble: str = ""  # The reason why the server cannot store any run, or "".


NOTHING = WaitNotice()


class WaitReasons:
    """Reports why runs wait, and estimates starts of further runs. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._planner: Planner | None = None
        self._now: Callable[[], int] = lambda: 0
        self._decision = 0
        # Each cached reason includes the time and the number of the planner's decision.
        self._told: dict[str, tuple[WaitNotice, int, int]] = {}
        self._ends: Callable[[str], int | None] = lambda _run_id: None
        self._asked: OrderedDict[str, tuple[WaitNotice, int]] = OrderedDict()

    @contextlib.contextmanager
    def changing(self, planner: Planner, now: Callable[[], int]) -> Iterator[None]:
        """Hold the lock while the planner changes or decides."""
        with self._lock:
            self._planner, self._now = planner, now
            try:
                yield
            finally:
                self._decision += 1

    def end_by(self, ends: Callable[[str], int | None]) -> None:
        """Set the function that returns the end times of runs that no node can ever serve.

        `ends` returns nanoseconds since 1970, or None if the run never ends.
        """
        self._ends = ends

    def forget(self, run_ids: Iterable[str]) -> None:
        """Drop the cached reasons of some runs."""
        with self._lock:
            for run_id in run_ids:
                self._told.pop(run_id, None)

    def close(self) -> None:
        """Stop returning reasons until the planner is rebuilt, because the current planner may be wrong."""
        with self._lock:
            self._planner = None
            self._told.clear()

    def told(self, run_id: str) -> WaitNotice:
        """Return the wait reason of a run, and watch the run for a while."""
        with self._lock:
            told = self._find(run_id)
            if told is NOTHING:  # The hub wakes a stream without a reason as soon as the planner knows the run.
                return told
            self._asked[run_id] = (told, self._now())
            self._asked.move_to_end(run_id)
            while len(self._asked) > ASKED_MAX:
                self._asked.popitem(last=False)
            return told

    def of(self, run_id: str) -> str:
        """Return the sentence of a run's wait reason, and watch the run for a while."""
        return self.told(run_id).sentence

    def wait(self, run_id: str) -> Wait | None:
        """Return the values of a run's wait reason; None before the first tick, or if the run does not wait."""
        with self._lock:
            return self._find(run_id).wait

    def glance(self, run_id: str) -> WaitNotice:
        """Return the wait reason of a run, without watching the run."""
        with self._lock:
            return self._find(run_id)

    def order(self, limit: int) -> tuple[str, ...]:
        """Return the first waiting runs in queue order; empty before the first tick."""
        with self._lock:
            return () if self._planner is None else self._planner.queue(self._now(), limit)

    def estimate(self, wanted: QueuedRun) -> StartEstimate:
        """Return the estimated start of a run, as if the client submitted it now."""
        with self._lock:
            if self._planner is None:
                return StartEstimate(at_ns=None, basis=_NOBODY)
            return self._planner.estimate(wanted, self._now())

    def is_waiting(self, run_id: str) -> bool:
        """Return True if a run waits in the planner. This check is much faster than computing the reason."""
        with self._lock:
            return self._planner is not None and self._planner.is_waiting(run_id)

    def impossible(self, wanted: QueuedRun) -> str:
        """Return why no node can ever serve a run, or "" if a node can or before the first tick."""
        with self._lock:
            return "" if self._planner is None else self._planner.impossible(wanted)

    def reservations(self) -> tuple[Reservation, ...]:
        """Return the reservations of the planner."""
        with self._lock:
            return () if self._planner is None else self._planner.told_reservations(self._now())

    def usage(self) -> dict[str, TeamUse]:
        """Return the decayed usage of each team in GPU-seconds. Users without a team are under ``"~name"``."""
        with self._lock:
            return {} if self._planner is None else self._planner.usage(self._now())

    def news(self) -> list[str]:
        """Return watched runs whose reason has changed. With many runs, each call checks a part of them."""
        seen, changed = 0, []
        with self._lock:
            turn = list(self._asked)
        for run_id in turn:
            with self._lock:  # Release the lock between runs, because other threads also need the lock.
                before, at_ns = self._asked.pop(run_id, (NOTHING, 0))
                if not 0 <= self._now() - at_ns <= ASKED_S * 1e9:
                    continue
                told = self._find(run_id)
                if told != before:
                    changed.append(run_id)
                if told is not NOTHING:  # A run that no longer waits has new events, which wake its stream.
                    self._asked[run_id] = (told, at_ns)
                    seen += 1
            if seen == NEWS_MAX:
                break
        return changed

    def _find(self, run_id: str) -> WaitNotice:
        if self._planner is None:
            return NOTHING
        now_ns = self._now()
        kept = self._told.get(run_id)
        # Nanoseconds for which a cached reason remains valid across decisions about other runs.
        kept_ns = max(0, len(self._asked) - A_SECOND) / A_SECOND * 1e9
        if kept is not None and (kept[2] == self._decision or 0 <= now_ns - kept[1] < kept_ns):
            return kept[0]
        wait = self._planner.why(run_id, now_ns)
        if wait is None:
            self._told.pop(run_id, None)
            return NOTHING
        if wait.reason is WaitReason.UNSATISFIABLE:
            wait = msgspec.structs.replace(wait, ends_ns=self._ends(run_id))
        said = wait_messages.sentence(wait, functools.partial(format_soon, now_ns=now_ns))
        told = WaitNotice(sentence=said, wait=wait)
        self._told[run_id] = (told, now_ns, self._decision)
        return told
