"""The wait for the last process of a killed attempt: bounded, and reported when it takes long.

A process that the kernel cannot end (D state) must not keep a run from its end; the code that gives back its devices
looks at what is left.
"""

from __future__ import annotations

from collections.abc import Callable

from serverless_gpu.ambient import Clock
from serverless_gpu.node.supervisor.gang import LocalGang
from serverless_gpu.node.supervisor.supervisor import left_text

DRAIN_LOOK_S = 0.002
"""Between two looks at a tree that is being ended."""
_DRAIN_LIMIT_S = 60.0
_DRAIN_TOLD_S = 10.0


class ProcessDrain:
    """Wait for the processes of a killed attempt."""

    def __init__(self, clock: Clock, say: Callable[[str], None]) -> None:
        self.since_ns: int | None = None  # when it was killed, or None
        self._clock = clock
        self._say = say
        self._told = False

    def begin(self, gang: LocalGang | None) -> int:
        """Kill what there is; return when that was."""
        self.since_ns = self._clock.boottime_ns()
        if gang is not None:
            gang.kill()
        return self.since_ns

    def is_over(self, gang: LocalGang | None) -> bool:
        """Return whether the wait is over."""
        assert self.since_ns is not None
        waited_s = (self._clock.boottime_ns() - self.since_ns) / 1e9
        if gang is None or gang.empty() or waited_s > _DRAIN_LIMIT_S:
            return True
        if waited_s > _DRAIN_TOLD_S and not self._told:
            self._told = True
            self._say(f"{left_text(gang.left())} does not end, though it was killed")
        return False
