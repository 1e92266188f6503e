"""What is known about one attempt and not yet told: written by who listens to its supervisor, read by who reports.

Each piece of news says how soon the server should have it. What comes meanwhile goes with it: a run of ten milliseconds
is one report, and lines that a rank prints one by one are not one request each.
"""

from __future__ import annotations

import threading

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.model.lifecycle.attempt import State, StopReason
from serverless_gpu.node.base.protocol import CrewNews, Stopped

AT_ONCE_S = 0.0
RECEIPT_S = 0.005
"""An ending waits so long for the receipt, which mostly follows at once: then both are one report."""
SOON_S = 0.02
BEGUN_S = 0.1
"""That user code began may wait so long for an ending: a short run needs no report of its own for it."""
SOME_TIME_S = 0.2
FIRST_OF_GANG_S = 0.1
"""The first report of a crew of several waits so long for its offer. Where all stands by, both are one report."""


class AttemptState(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt as it is seen from its supervisor's socket.

    Attributes:
        begun: whether user code began.
        ending: how it ended, once it has.
        finished: whether the receipt is written.
        stop: why it is to be stopped, once somebody asked.
        tracked: link to the run in MLflow, once known.
        crew: what it has to say to the others of its gang; None on one node.
    """

    state: State = State.STARTING
    sentence: str = ""
    begun: bool = False
    ending: Stopped | None = None
    finished: bool = False
    stop: StopReason | None = None
    tracked: str = ""
    crew: CrewNews | None = None


class News:
    """The newest, and when it is due.

    Args:
        clock: where time comes from.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._condition = threading.Condition()
        self._known = AttemptState()
        self._due_ns: int | None = None

    @property
    def known(self) -> AttemptState:
        """Return what is known now."""
        return self._known

    def learn(self, within_s: float, **changes: object) -> None:
        """Take note of something.

        Args:
            within_s: how soon it is to be told, in seconds.
            changes: fields of `AttemptState`.
        """
        with self._condition:
            if changes:
                self._known = msgspec.structs.replace(self._known, **changes)
            due_ns = self._clock.boottime_ns() + round(within_s * 1e9)
            if self._due_ns is None or due_ns < self._due_ns:
                self._due_ns = due_ns
                self._condition.notify_all()

    def wait(self, limit_s: float) -> bool:
        """Wait until something is due, at most so long; count it as told, and return whether there was something."""
        limit_ns = self._clock.boottime_ns() + round(limit_s * 1e9)
        with self._condition:
            while True:
                until_ns = limit_ns if self._due_ns is None else min(limit_ns, self._due_ns)
                left_s = (until_ns - self._clock.boottime_ns()) / 1e9
                if left_s <= 0:
                    was_due = self._due_ns is not None and self._due_ns <= self._clock.boottime_ns()
                    self._due_ns = None if was_due else self._due_ns
                    return was_due
                self._condition.wait(left_s)
