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
from collections.abc import Collection, Iterable, Iterator

from serverless_gpu.engines.base import Engine
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


class Deliveries:
    """Orders to start, by gang, between "may leave" and "may be taken back": each is one or the other, never both.

    A gang on a node of an engine is held back, all of it, until the engine has reserved it. That is looked up and not
    remembered: a server that starts again holds back the same ones, before it has served anybody.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._sent: set[tuple[str, int]] = set()
        self._held: set[tuple[str, int]] = set()
        self._mine: set[tuple[str, int]] = set()

    def watch(self, engine: Engine) -> None:
        """Hold back what an engine has to reserve and has not."""
        self._engine = engine

    def is_held_back(self, run_id: str, fence: int, nodes: Iterable[str]) -> bool:
        """Return whether an order may not leave yet, since an engine has not reserved its gang.

        Args:
            run_id: the run.
            fence: number of the attempt.
            nodes: names of all nodes of the gang; one that is the engine's is enough.
        """
        engine = self._engine
        if engine is None or not any(engine.has(node) for node in nodes):
            return False
        return f"{run_id}:{fence}" not in engine.recover()

    def made(self, run_id: str, fence: int) -> None:
        """Note that no earlier process let an order leave; without that, it may have left long ago."""
        with self._lock:
            self._mine.add((run_id, fence))

    def send(self, run_id: str, fence: int) -> bool:
        """Return whether an order may leave now, and note that it does."""
        with self._lock:
            if (run_id, fence) in self._held:
                return False
            self._sent.add((run_id, fence))
            return True

    def never_left(self, run_id: str, fence: int) -> bool:
        """Return whether it is certain that an order has not left yet."""
        with self._lock:
            return (run_id, fence) in self._mine and (run_id, fence) not in self._sent

    def hold(self, run_id: str, fence: int) -> bool:
        """Return whether an order has never left and never will, so that it can be taken back."""
        with self._lock:
            if (run_id, fence) in self._sent or (run_id, fence) not in self._mine:
                return False
            self._held.add((run_id, fence))
            return True

    def is_taken_back(self, run_id: str, fence: int) -> bool:
        """Return whether an order never will leave."""
        with self._lock:
            return (run_id, fence) in self._held

    def known(self) -> frozenset[tuple[str, int]]:
        """Return all gangs that something is noted about: their intents are committed."""
        with self._lock:
            return frozenset(self._sent | self._held | self._mine)

    def forget(self, gangs: Collection[tuple[str, int]]) -> None:
        """Forget gangs that are over: known *before* the database was read, and not active there.

        One that became known after that read may just have been placed. Were it forgotten, an order that has left
        could be taken back, or one that was taken back could leave.
        """
        with self._lock:
            for known in (self._sent, self._held, self._mine):
                known.difference_update(gangs)
