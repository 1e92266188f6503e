"""What this process has heard, and when, by its own boottime: memory that is meant to be lost with it.

    Leases        crews, renewed by their reports             silence ─▶ UNREACHABLE ─▶ given up after the hard fence
                  and whether they have given their devices back, which every later report repeats
    Looks         crews that are to report now                until they do
    Presence      nodes, renewed by hello and heartbeat       who is not there gets nothing new
                  and how far their clocks are off, which every heartbeat repeats
                  and their open streams of orders            a second process is refused while the first has one
    Deliveries    orders that left this process               what never left can be taken back
                  and those that an engine's word holds back  what it has not reserved leaves to no node

No wall clock takes part: a column would be read by the next process with another boottime, and a wall clock jumps. So
a server that starts knows nothing, and every crew counts as heard of at that moment; a node counts as there once it
has said something. All methods may be called from any thread, and take the time as a value.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Collection, Iterator

from serverless_gpu.server.records.runs.crews import CrewId
from serverless_gpu.wire.agents import ClockReading, is_off

PRESENT_S = 20.0
"""A node that has not been heard of for so long gets nothing new; it says something every five seconds."""
_REFUSED_MAX = 1_000


class Leases:
    """When crews were heard of last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: dict[CrewId, int] = {}
        self._freed: set[CrewId] = set()

    def free(self, crew: CrewId) -> bool:
        """Note that a crew has given its devices back, though it has not ended; return whether that is news."""
        with self._lock:
            is_news = crew not in self._freed
            self._freed.add(crew)
            return is_news

    def freed(self) -> frozenset[CrewId]:
        """Return the crews that have no devices any more."""
        with self._lock:
            return frozenset(self._freed)

    def renew(self, crew: CrewId, *, now_ns: int) -> int | None:
        """Note that a crew reported; return when it was heard of before, None for never.

        Args:
            crew: run, fence and number.
            now_ns: boottime at which the report arrived, nanoseconds.
        """
        with self._lock:
            before_ns = self._heard.get(crew)
            self._heard[crew] = now_ns
            return before_ns

    def last_ns(self, crew: CrewId, *, now_ns: int) -> int:
        """Return when a crew was heard of last, boottime in nanoseconds; one that never was counts from now on."""
        with self._lock:
            return self._heard.setdefault(crew, now_ns)

    def count(self) -> int:
        """Return how many crews there are that have been heard of, about."""
        with self._lock:
            return len(self._heard)

    def keep(self, ids: Collection[CrewId]) -> None:
        """Forget all crews but these."""
        with self._lock:
            self._heard = {crew: heard for crew, heard in self._heard.items() if crew in ids}
            self._freed.intersection_update(ids)


class Presence:
    """When nodes were heard of last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: dict[str, int] = {}
        self._lost: dict[str, str] = {}
        self._clocks: dict[str, ClockReading] = {}
        self._streams: Counter[str] = Counter()
        self._refused: set[tuple[str, ...]] = set()

    def heard(self, node_id: str, *, now_ns: int) -> bool:
        """Note that a node said something; return whether it was not there before."""
        with self._lock:
            before = self._heard.get(node_id)
            self._heard[node_id] = now_ns
            was_lost = self._lost.pop(node_id, None) is not None
            return was_lost or before is None or now_ns - before > PRESENT_S * 1e9

    def is_there(self, node_id: str, *, now_ns: int) -> bool:
        """Return whether a node can be counted on."""
        with self._lock:
            heard = self._heard.get(node_id)
            return node_id not in self._lost and heard is not None and now_ns - heard <= PRESENT_S * 1e9

    def last_ns(self, node_id: str) -> int | None:
        """Return when a node was heard of last, boottime in nanoseconds; None for never since this process started."""
        with self._lock:
            return self._heard.get(node_id)

    def forget(self, node_id: str) -> None:
        """Note that a node is dead."""
        with self._lock:
            self._heard.pop(node_id, None)
            self._lost.pop(node_id, None)
            self._clocks.pop(node_id, None)

    def read_clock(self, node_id: str, clock: ClockReading | None) -> bool:
        """Note how far a node's clock is off; return whether that has become, or ceased to be, worth a word."""
        with self._lock:
            was_off = is_off(self._clocks.get(node_id))
            if clock is None:
                self._clocks.pop(node_id, None)
            else:
                self._clocks[node_id] = clock
            return is_off(clock) != was_off

    def clock(self, node_id: str) -> ClockReading | None:
        """Return how far a node's clock is off, as it said last, or None."""
        with self._lock:
            return self._clocks.get(node_id)

    @contextlib.contextmanager
    def streaming(self, node_id: str) -> Iterator[None]:
        """Note that a node has its stream of orders open, for as long as the context lasts."""
        with self._lock:
            self._streams[node_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._streams[node_id] -= 1
                if not self._streams[node_id]:
                    del self._streams[node_id]

    def is_streaming(self, node_id: str) -> bool:
        """Return whether a node has its stream of orders open."""
        with self._lock:
            return node_id in self._streams

    def is_new_refusal(self, key: tuple[str, ...]) -> bool:
        """Note that a node was refused; return whether that is news."""
        with self._lock:
            if key in self._refused:
                return False
            if len(self._refused) >= _REFUSED_MAX:
                self._refused.clear()
            self._refused.add(key)
            return True

    def lose(self, node_id: str, sentence: str) -> None:
        """Note that an engine does not count on a node, until it is heard of again or `find` is called."""
        with self._lock:
            self._lost[node_id] = sentence

    def find(self, node_id: str) -> None:
        """Note that an engine counts on a node again."""
        with self._lock:
            self._lost.pop(node_id, None)

    def why_lost(self, node_id: str) -> str:
        """Return what an engine says about a node that it does not count on, or ""."""
        with self._lock:
            return self._lost.get(node_id, "")
