"""Reasons for which runs wait: requests and streams ask the scheduler's planner, from any thread.

    scheduler ── changes, decide ─▶ planner ◀── why, estimate ── requests, streams         one at a time, by a lock
        └─ after the tick: runs that were asked about lately, and whose reason changed ─▶ the hub wakes their streams

A reason costs a look at the queue (milliseconds, of 10,000), so it is computed on request and kept until the next
decision. Where very many runs are asked about, answers are kept for longer, so that computing them takes a small part
of a core: with a thousand streams a place in the queue is up to 20 s old. All of it is memory: a server that starts
gives no reasons until its scheduler has looked, which is its first act.
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
"""A run that was asked about is watched for so long: a stream asks every nine seconds."""
ASKED_MAX = 10_000
NEWS_MAX = 16
"""Watched runs that are looked at after a tick; the others when their turn comes, or their stream asks."""
A_SECOND = 50
"""So many are worked out a second where more than that are asked about."""
_NOBODY = "the scheduler has not looked at the queue yet"


class WaitNotice(msgspec.Struct, frozen=True, kw_only=True):
    """The reason for which a run waits; empty before the scheduler's first look, or when it does not wait."""

    sentence: str = ""  # in words
    wait: Wait | None = None  # the same, part by part
    trouble: str = ""  # why the server can write nothing about any run, or ""


NOTHING = WaitNotice()


class WaitReasons:
    """Why runs wait, and when others would start. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._planner: Planner | None = None
        self._now: Callable[[], int] = lambda: 0
        self._decision = 0
        self._told: dict[str, tuple[WaitNotice, int, int]] = {}  # as of which time, and which decision
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
        """Set the source of ends for runs that no node can ever serve.

        `ends` returns nanoseconds since 1970; None for never.
        """
        self._ends = ends

    def forget(self, run_ids: Iterable[str]) -> None:
        """Drop the kept reasons of some runs."""
        with self._lock:
            for run_id in run_ids:
                self._told.pop(run_id, None)

    def close(self) -> None:
        """Give no reasons until there is a planner again: this one may be wrong."""
        with self._lock:
            self._planner = None
            self._told.clear()

    def told(self, run_id: str) -> WaitNotice:
        """Return the reason for which a run waits, in words and part by part; the run is watched for a while."""
        with self._lock:
            told = self._find(run_id)
            if told is NOTHING:  # a stream without a reason yet is woken when the planner knows the run
                return told
            self._asked[run_id] = (told, self._now())
            self._asked.move_to_end(run_id)
            while len(self._asked) > ASKED_MAX:
                self._asked.popitem(last=False)
            return told

    def of(self, run_id: str) -> str:
        """Return the reason for which a run waits in words; the run is watched for a while."""
        return self.told(run_id).sentence

    def wait(self, run_id: str) -> Wait | None:
        """Return why a run waits, part by part; None before the first look, or when it does not wait."""
        with self._lock:
            return self._find(run_id).wait

    def glance(self, run_id: str) -> WaitNotice:
        """Return the reason for which a run waits, without watching the run."""
        with self._lock:
            return self._find(run_id)

    def order(self, limit: int) -> tuple[str, ...]:
        """Return the next runs, in the order of the queue; none before the first look."""
        with self._lock:
            return () if self._planner is None else self._planner.queue(self._now(), limit)

    def estimate(self, wanted: QueuedRun) -> StartEstimate:
        """Return when a run would start if it came now."""
        with self._lock:
            if self._planner is None:
                return StartEstimate(at_ns=None, basis=_NOBODY)
            return self._planner.estimate(wanted, self._now())

    def is_waiting(self, run_id: str) -> bool:
        """Return whether the planner knows that a run waits: far cheaper than its reason."""
        with self._lock:
            return self._planner is not None and self._planner.is_waiting(run_id)

    def impossible(self, wanted: QueuedRun) -> str:
        """Return why no node can ever serve a run; "" when one can, or before the first look."""
        with self._lock:
            return "" if self._planner is None else self._planner.impossible(wanted)

    def reservations(self) -> tuple[Reservation, ...]:
        """Return the reservations of the planner."""
        with self._lock:
            return () if self._planner is None else self._planner.told_reservations(self._now())

    def usage(self) -> dict[str, TeamUse]:
        """Return the decayed use of each team, GPU-seconds; users without a team under ``"~name"``."""
        with self._lock:
            return {} if self._planner is None else self._planner.usage(self._now())

    def news(self) -> list[str]:
        """Return watched runs whose reason has changed; of many, some at a time, in turn."""
        seen, changed = 0, []
        with self._lock:
            turn = list(self._asked)
        for run_id in turn:
            with self._lock:  # one by one: other threads ask, too
                before, at_ns = self._asked.pop(run_id, (NOTHING, 0))
                if not 0 <= self._now() - at_ns <= ASKED_S * 1e9:
                    continue
                told = self._find(run_id)
                if told != before:
                    changed.append(run_id)
                if told is not NOTHING:  # else it does not wait: what happens to it wakes its stream
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
        kept_ns = max(0, len(self._asked) - A_SECOND) / A_SECOND * 1e9  # over decisions about other runs
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
