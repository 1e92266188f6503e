"""Reports why runs wait, by querying the scheduler's planner from any thread.

    scheduler ── changes, decide ─▶ planner ◀── why, estimate ── requests, streams         serialized by a lock
        └─ after the tick: watched runs whose reason changed ─▶ the hub wakes their streams

Computing a wait reason requires a scan of the queue, which takes milliseconds for 10,000 runs. `WaitReasons` therefore
computes a reason on request and caches the reason until the planner's next decision. If clients watch many runs,
`WaitReasons` caches reasons for longer to limit the CPU load. With a thousand open streams, a displayed queue position
can be 20 s old. Wait reasons exist only in memory. After a restart, the server has no wait reasons until the
scheduler's first tick.
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
"""Seconds for which a run stays watched after a request. Streams repeat the request every nine seconds."""
ASKED_MAX = 10_000
NEWS_MAX = 16
"""Maximum number of watched runs that one tick checks for a new wait reason."""
A_SECOND = 50
"""Maximum number of wait reasons that the server computes per second for watched runs."""
_NOBODY = "the scheduler has not read the queue yet"


class WaitNotice(msgspec.Struct, frozen=True, kw_only=True):
    """The wait reason of a run, empty for a run that does not wait and before the scheduler's first tick."""

    sentence: str = ""  # The wait reason as a sentence.
    wait: Wait | None = None  # The wait reason as separate values.
    trouble: str = ""  # The reason why the server cannot write to its database, or "".


NOTHING = WaitNotice()


class WaitReasons:
    """Reports why runs wait, and estimates start times. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._planner: Planner | None = None
        self._now: Callable[[], int] = lambda: 0
        self._decision = 0
        # Each entry contains a reason, its time, and the number of the planner's decision.
        self._told: dict[str, tuple[WaitNotice, int, int]] = {}
        self._ends: Callable[[str], int | None] = lambda _run_id: None
        self._asked: OrderedDict[str, tuple[WaitNotice, int]] = OrderedDict()

    @contextlib.contextmanager
    def changing(self, planner: Planner, now: Callable[[], int]) -> Iterator[None]:
        """Hold the lock while the caller changes the planner."""
        with self._lock:
            self._planner, self._now = planner, now
            try:
                yield
            finally:
                self._decision += 1

    def end_by(self, ends: Callable[[str], int | None]) -> None:
        """Set the function that returns the end times of runs that no node can ever serve.

        `ends` returns nanoseconds since 1970, or None if the server never ends the run.
        """
        self._ends = ends

    def forget(self, run_ids: Iterable[str]) -> None:
        """Drop the cached wait reasons of some runs."""
        with self._lock:
            for run_id in run_ids:
                self._told.pop(run_id, None)

    def close(self) -> None:
        """Drop the planner and all cached reasons until the caller passes a new planner."""
        with self._lock:
            self._planner = None
            self._told.clear()

    def told(self, run_id: str) -> WaitNotice:
        """Return the wait reason of a run, and watch the run for `ASKED_S` seconds."""
        with self._lock:
            told = self._find(run_id)
            if told is NOTHING:  # The hub wakes the stream when the planner adds the run.
                return told
            self._asked[run_id] = (told, self._now())
            self._asked.move_to_end(run_id)
            while len(self._asked) > ASKED_MAX:
                self._asked.popitem(last=False)
            return told

    def of(self, run_id: str) -> str:
        """Return the wait reason of a run as a sentence, and watch the run for `ASKED_S` seconds."""
        return self.told(run_id).sentence

    def wait(self, run_id: str) -> Wait | None:
        """Return the wait reason of a run as values, or None if the run does not wait."""
        with self._lock:
            return self._find(run_id).wait

    def glance(self, run_id: str) -> WaitNotice:
        """Return the wait reason of a run without watching the run."""
        with self._lock:
            return self._find(run_id)

    def order(self, limit: int) -> tuple[str, ...]:
        """Return the first `limit` waiting runs in queue order, or () before the scheduler's first tick."""
        with self._lock:
            return () if self._planner is None else self._planner.queue(self._now(), limit)

    def estimate(self, wanted: QueuedRun) -> StartEstimate:
        """Return the estimated start of a run, as if the client submitted the run now."""
        with self._lock:
            if self._planner is None:
                return StartEstimate(at_ns=None, basis=_NOBODY)
            return self._planner.estimate(wanted, self._now())

    def is_waiting(self, run_id: str) -> bool:
        """Return True if a run waits in the planner, without computing its wait reason."""
        with self._lock:
            return self._planner is not None and self._planner.is_waiting(run_id)

    def impossible(self, wanted: QueuedRun) -> str:
        """Return the reason why no node can ever execute a run, or "" if a node can."""
        with self._lock:
            return "" if self._planner is None else self._planner.impossible(wanted)

    def reservations(self) -> tuple[Reservation, ...]:
        """Return the planner's reservations for waiting runs."""
        with self._lock:
            return () if self._planner is None else self._planner.told_reservations(self._now())

    def usage(self) -> dict[str, TeamUse]:
        """Return the decayed usage of each team in GPU-seconds. Users without a team have the key ``"~name"``."""
        with self._lock:
            return {} if self._planner is None else self._planner.usage(self._now())

    def news(self) -> list[str]:
        """Return watched runs whose wait reason has changed. Each call checks at most `NEWS_MAX` runs."""
        seen, changed = 0, []
        with self._lock:
            turn = list(self._asked)
        for run_id in turn:
            with self._lock:  # Release the lock after each run, so that other threads need not wait long.
                before, at_ns = self._asked.pop(run_id, (NOTHING, 0))
                if not 0 <= self._now() - at_ns <= ASKED_S * 1e9:
                    continue
                told = self._find(run_id)
                if told != before:
                    changed.append(run_id)
                if told is not NOTHING:  # If a run no longer waits, its new events wake its stream.
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
        # Nanoseconds for which a cached reason remains valid despite new decisions of the planner.
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
