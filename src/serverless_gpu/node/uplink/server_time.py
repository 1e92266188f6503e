"""Estimates the server's time: this node's own wall clock decides nothing.

    asked ────────▶ server says `at_ns` ────────▶ answered        boottime of this node
      └── at_ns is somewhere in between: server = boottime + K, K in [at_ns − answered, at_ns − asked] ──┘

The fastest answer is kept, as the most precise. One that contradicts it shows that the server's clock was set, and
replaces it; so does any other once it is old, for clocks drift. This node's wall clock may jump: it plays no part.
"""

from __future__ import annotations

import threading

from serverless_gpu.ambient import Clock
from serverless_gpu.wire.agents import ClockReading

_KEPT_S = 600.0
"""Quartz drifts by 0.1 s a quarter of an hour at worst."""


class ServerTime:
    """The server's clock, told by this node's boottime."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._low_ns = self._high_ns = self._measured_ns = 0
        self._known = False

    def heard(self, at_ns: int, *, asked_ns: int, answered_ns: int) -> None:
        """Take an answer with the server's time (1970; 0: none) and boottimes before and after the request."""
        if not at_ns:
            return
        low_ns, high_ns = at_ns - answered_ns, at_ns - asked_ns
        with self._lock:
            is_old = answered_ns - self._measured_ns > _KEPT_S * 1e9
            contradicts = low_ns > self._high_ns or high_ns < self._low_ns
            if not self._known or is_old or contradicts or high_ns - low_ns <= self._high_ns - self._low_ns:
                self._low_ns, self._high_ns, self._measured_ns, self._known = low_ns, high_ns, answered_ns, True

    def wall_ns(self, boottime_ns: int) -> int | None:
        """Return the server's clock at a boottime of this node, nanoseconds since 1970; None if unknown."""
        with self._lock:
            return boottime_ns + (self._low_ns + self._high_ns) // 2 if self._known else None

    def reading(self, clock: Clock) -> ClockReading | None:
        """Return how far this node's wall clock is from the server's now; None if that is not known."""
        with self._lock:
            if not self._known:
                return None
            middle_ns = (self._low_ns + self._high_ns) // 2
            ahead_ns = clock.wall_ns() - clock.boottime_ns() - middle_ns
            return ClockReading(ahead_ns=ahead_ns, error_ns=(self._high_ns - self._low_ns + 1) // 2)
