"""Virtual time: what is due next happens next, and nothing takes time unless somebody says so."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

S = 1_000_000_000
EPOCH_S = 1_800_000_000
Event = Callable[[], None]
DEEPEST = 4
"""How many events may be in the middle of each other: a request that waits for the disk lets others pass."""
_EVENTS_MAX = 60_000


class TooMuch(Exception):
    """A simulation that goes on for ever: somebody asks without a pause."""


class Timeline:
    """Events in the order of their moments; those of one moment in the order in which they were planned.

    Attributes:
        epoch_s: when it begins, seconds since 1970, for clocks that are right.
        now_ns: the true time, which no clock of the simulation has to show.
        trace: what happened, for people.
    """

    def __init__(self, rng: random.Random, *, epoch_s: float = EPOCH_S) -> None:
        self.rng = rng
        self.epoch_s = epoch_s
        self.now_ns = 0
        self.trace: list[str] = []
        self.count = 0
        self._events: list[tuple[int, int, Event]] = []
        self._number = 0
        self._depth = 0

    def after(self, seconds: float, event: Event) -> None:
        """Let something happen later."""
        self._number += 1
        heapq.heappush(self._events, (self.now_ns + max(0, round(seconds * S)), self._number, event))

    def run_until(self, end_ns: int) -> None:
        """Let everything happen that is due until then."""
        while self._events and self._events[0][0] <= end_ns:
            at_ns, _, event = heapq.heappop(self._events)
            self.now_ns = max(self.now_ns, at_ns)
            self.count += 1
            if self.count > _EVENTS_MAX:
                raise TooMuch(f"{_EVENTS_MAX} events until {self.now_ns / S:.1f} s")
            event()
        self.now_ns = max(self.now_ns, end_ns)

    def pass_within(self, seconds: float) -> None:
        """Let others go on while somebody is in the middle of something that takes so long."""
        if self._depth >= DEEPEST:
            return
        self._depth += 1
        try:
            self.run_until(self.now_ns + round(seconds * S))
        finally:
            self._depth -= 1

    def jump(self, seconds: float) -> None:
        """Let time pass in which nobody does anything, as when every machine sleeps."""
        self.now_ns += round(seconds * S)

    def note(self, text: str) -> None:
        """Write down what happened."""
        self.trace.append(f"{self.now_ns / S:9.3f}  {text}")


class WrongClock:
    """A machine's clock: boottime is true, the wall clock is what somebody set it to."""

    def __init__(self, time: Timeline, *, boot_id: str = "boot") -> None:
        self._time = time
        self._boot_id = boot_id
        self.ahead_s = 0.0

    def boottime_ns(self) -> int:
        """Return nanoseconds since boot."""
        return 1_000 * S + self._time.now_ns

    def wall_ns(self) -> int:
        """Return nanoseconds since 1970, as this machine believes."""
        return round((self._time.epoch_s + self.ahead_s) * S) + self._time.now_ns

    def boot_id(self) -> str:
        """Return the identifier of this boot."""
        return self._boot_id
