"""A loop looks when it is due and when it is rung, and outlives its mistakes."""

from __future__ import annotations

import logging
import threading

import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import ServerUnavailable
from serverless_gpu.server.core.loops import Loop
from tests.support.golden import golden

FAR_NS = 10**18


class Ticks:
    """Counts, and lets a test wait for a number."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.count = 0
        self._changed = threading.Condition()

    def __call__(self, now_ns: int) -> int | None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()
        if self.errors:
            raise self.errors.pop(0)
        return now_ns + FAR_NS

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.count >= count, 60)


def test_it_looks_at_once_and_again_when_rung() -> None:
    ticks = Ticks()
    loop = Loop("test", ticks, clock=SystemClock())
    loop.start()
    ticks.wait(1)
    loop.ring()
    ticks.wait(2)
    assert loop.stop(timeout_s=30)
    assert ticks.count == 2


def test_a_mistake_is_logged_and_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    ticks = Ticks(KeyError("a mistake"), ServerUnavailable("the database is away"))
    loop = Loop("test", ticks, clock=SystemClock())
    with caplog.at_level(logging.WARNING):
        loop.start()
        ticks.wait(3)
        assert loop.stop(timeout_s=30)
    assert [record.getMessage() for record in caplog.records] == [
        golden("server.loops.test-failed-tried"),
        golden("server.loops.test-database-away"),
    ]


def test_what_is_due_is_done_without_a_ring() -> None:
    ticks = Ticks()
    loop = Loop("test", lambda now_ns: (ticks(now_ns), now_ns + 1_000_000)[1], clock=SystemClock())
    loop.start()
    ticks.wait(3)
    assert loop.stop(timeout_s=30)
