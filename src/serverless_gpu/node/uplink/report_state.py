"""Unreported news of one attempt: its listener writes it, its reporter reads it.

Each piece of news has its own urgency, and takes later ones along: a run of ten milliseconds is one report, and lines
that a rank prints one by one are not one request each.
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
"""Wait of the beginning of user code for an ending: a short run needs no report of its own for it."""
SOME_TIME_S = 0.2
FIRST_OF_GANG_S = 0.1
"""The first report of a crew of several waits so long for its offer. Where all stands by, both are one report."""


class AttemptState(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt as it is seen from its supervisor's socket."""

    state: State = State.STARTING
    sentence: str = ""
    begun: bool = False  # user code began
    ending: Stopped | None = None  # None while it goes on
    finished: bool = False  # the receipt is written
    stop: StopReason | None = None  # why it is to be stopped, if so
    tracked: str = ""  # link to the run in MLflow, once known
    crew: CrewNews | None = None  # its message to the others of its gang; None on one node


class News:
    """The newest state, and when it is due."""

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
        """Change fields of `AttemptState`, to be reported within `within_s` seconds."""
        with self._condition:
            if changes:
                self._known = msgspec.structs.replace(self._known, **changes)
            due_ns = self._clock.boottime_ns() + round(within_s * 1e9)
            if self._due_ns is None or due_ns < self._due_ns:
                self._due_ns = due_ns
                self._condition.notify_all()

    def wait(self, limit_s: float) -> bool:
        """Wait until something is due, at most so long; count it as reported, and return whether it was."""
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
