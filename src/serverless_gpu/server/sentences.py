"""What those who wait are told: the scheduler's planner is asked when somebody wants to know, by any thread.

    scheduler ── changes, decide ─▶ planner ◀── why, estimate ── requests, streams         one at a time, by a lock
        └─ after the tick: who was asked about lately, and is told something else now ─▶ the hub wakes their streams

Why a run waits costs a look at the queue, so it is worked out for those that somebody asks about and kept until the
next decision; of a queue of 10,000 most are asked about by nobody. All of it is memory: a server that starts says
nothing until its scheduler has looked, which is its first act.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator

import msgspec

from serverless_gpu.ambient import format_soon
from serverless_gpu.model.scheduling import telling
from serverless_gpu.model.scheduling.planner import Planner
from serverless_gpu.model.scheduling.values import Estimate, Reservation, Wait, Wanted

ASKED_S = 30.0
"""Who was asked about is watched for so long: a stream asks every nine seconds."""
ASKED_MAX = 10_000
NEWS_MAX = 64
"""Watched runs that are looked at after a tick; the others when their turn comes, or their stream asks."""
_NOBODY = "the scheduler has not looked at the queue yet"


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a waiting run is told; nothing of it while nobody has looked, or when it does not wait.

    Attributes:
        sentence: in words.
        wait: the same, part by part.
    """

    sentence: str = ""
    wait: Wait | None = None


NOTHING = Told()


class Sentences:
    """Why runs wait, and when others would start. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._planner: Planner | None = None
        self._now: Callable[[], int] = lambda: 0
        self._told: dict[str, Told] = {}
        self._asked: OrderedDict[str, tuple[Told, int]] = OrderedDict()

    @contextlib.contextmanager
    def changing(self, planner: Planner, now: Callable[[], int]) -> Iterator[None]:
        """Keep everybody out while the planner is told something, or decides.

        Args:
            planner: that is asked from now on.
            now: what time it is, by the planner's clock.
        """
        with self._lock:
            self._planner, self._now = planner, now
            try:
                yield
            finally:
                self._told.clear()

    def close(self) -> None:
        """Tell nobody anything until there is a planner again: what this one knows may be wrong."""
        with self._lock:
            self._planner = None
            self._told.clear()

    def told(self, run_id: str) -> Told:
        """Return what a waiting run is told, in words and part by part; it is watched for a while."""
        with self._lock:
            told = self._find(run_id)
            self._asked[run_id] = (told, self._now())
            self._asked.move_to_end(run_id)
            while len(self._asked) > ASKED_MAX:
                self._asked.popitem(last=False)
            return told

    def of(self, run_id: str) -> str:
        """Return what a waiting run is told in words; it is watched for a while."""
        return self.told(run_id).sentence

    def wait(self, run_id: str) -> Wait | None:
        """Return why a run waits, part by part; None while nobody has looked, or when it does not wait."""
        with self._lock:
            return self._find(run_id).wait

    def glance(self, run_id: str) -> Told:
        """Return what a waiting run is told, to somebody who does not stay to hear of it again."""
        with self._lock:
            return self._find(run_id)

    def order(self, limit: int) -> tuple[str, ...]:
        """Return those who are next, in the order of the queue; none while nobody has looked."""
        with self._lock:
            return () if self._planner is None else self._planner.queue(self._now(), limit)

    def estimate(self, wanted: Wanted) -> Estimate:
        """Return when a run would start if it came now."""
        with self._lock:
            if self._planner is None:
                return Estimate(at_ns=None, basis=_NOBODY)
            return self._planner.estimate(wanted, self._now())

    def reservations(self) -> tuple[Reservation, ...]:
        """Return what is kept for whom."""
        with self._lock:
            return () if self._planner is None else self._planner.reservations()

    def usage(self) -> dict[str, float]:
        """Return the decayed use of each team, GPU-seconds; users without a team under ``"~name"``."""
        with self._lock:
            return {} if self._planner is None else self._planner.usage(self._now())

    def news(self) -> list[str]:
        """Return those asked about lately who are told something else now; of many, some at a time, all in turn."""
        with self._lock:
            now_ns, seen = self._now(), 0
            changed: list[str] = []
            for run_id in list(self._asked):
                before, at_ns = self._asked.pop(run_id)
                if not 0 <= now_ns - at_ns <= ASKED_S * 1e9:
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

    def _find(self, run_id: str) -> Told:
        if self._planner is None:
            return NOTHING
        if run_id not in self._told:
            wait = self._planner.why(run_id, self._now())
            self._told[run_id] = NOTHING if wait is None else Told(sentence=_sentence(wait, self._now()), wait=wait)
        return self._told[run_id]


def _sentence(wait: Wait, now_ns: int) -> str:
    return telling.sentence(wait, functools.partial(format_soon, now_ns=now_ns))
