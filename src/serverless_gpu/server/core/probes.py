"""Asking what may hang: one question at a time, in a thread of its own, and nobody waits longer than a bound.

    answer() ─▶ a good answer that is young enough? ─▶ it
                 └─ else one thread asks; whoever comes meanwhile waits for the same answer
                      └─ until the question is `bound_s` old ─▶ "has not answered for 7 s", at once from then on

A disk that is gone or a bucket behind a broken network does not answer at all. Were it asked by the request itself, a
few visits to `/health` would take every thread the server has. So there is one thread for each thing, however often it
is asked for, and it is given up with the process. A bad answer is not kept: it is asked again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import msgspec

from serverless_gpu.ambient import Clock

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Unwell(Exception):
    """What was asked has a problem: in words that follow its name and name no one; the cause is for the log."""


class ProbeAnswer(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """What came of a question.

    Attributes:
        value: None where nothing came.
        problem: why, in words that follow the name of what was asked; "" where something came.
        took_ms: how long it took, or has taken so far.
    """

    value: T | None = None
    problem: str = ""
    took_ms: float = 0.0


class Probe(Generic[T]):
    """One thing that is asked; all methods may be called from any thread.

    Args:
        name: of the thread, and in the log.
        ask: the question; blocks. What it raises is logged once until it is well again, and no answer.
        clock: how old an answer is.
        fresh_s: how long an answer is good.
        bound_s: how long anybody waits for one.
        is_good: whether an answer may be kept.
    """

    def __init__(
        self,
        name: str,
        ask: Callable[[], T],
        *,
        clock: Clock,
        fresh_s: float,
        bound_s: float,
        is_good: Callable[[T], bool] = lambda _value: True,
    ) -> None:
        self._name, self._ask, self._clock = name, ask, clock
        self._fresh_ns, self._bound_ns = round(fresh_s * 1e9), round(bound_s * 1e9)
        self._is_good = is_good
        self._lock = threading.Lock()
        self._asked_ns = 0
        self._asking: Future[ProbeAnswer[T]] | None = None
        self._last: ProbeAnswer[T] | None = None
        self._last_ns = 0
        self._is_failing = False  # then the log has it

    async def answer(self) -> ProbeAnswer[T]:
        """Return an answer that is fresh, or what is known after the bound."""
        with self._lock:
            now_ns = self._clock.boottime_ns()
            if self._last is not None and now_ns - self._last_ns < self._fresh_ns:
                return self._last
            asking = self._asking or self._start(now_ns)
            left_ns = self._asked_ns + self._bound_ns - now_ns
        if left_ns > 0 and not asking.done():
            waited = asyncio.wrap_future(asking)
            await asyncio.wait({waited}, timeout=left_ns / 1e9)
            waited.cancel()  # it stays with the thread; only this wait for it ends
        return asking.result() if asking.done() else self._late()

    def _late(self) -> ProbeAnswer[T]:
        waited_ns = self._clock.boottime_ns() - self._asked_ns
        return ProbeAnswer(problem=f"has not answered for {waited_ns / 1e9:.0f} s", took_ms=waited_ns / 1e6)

    def _start(self, now_ns: int) -> Future[ProbeAnswer[T]]:
        asking: Future[ProbeAnswer[T]] = Future()
        asking.set_running_or_notify_cancel()  # a wait that is cancelled must not cancel it
        self._asking, self._asked_ns = asking, now_ns
        threading.Thread(target=self._work, args=(asking, now_ns), name=f"probe-{self._name}", daemon=True).start()
        return asking

    def _work(self, asking: Future[ProbeAnswer[T]], asked_ns: int) -> None:
        value: T | None = None
        problem = ""
        try:
            value = self._ask()
        except Exception as error:  # noqa: BLE001 — whatever is wrong with it is what was asked for; the log has it
            if not self._is_failing:
                _log.warning("looked at the %s", self._name, exc_info=True)
            problem = str(error) if isinstance(error, Unwell) else "cannot be looked at"
        now_ns = self._clock.boottime_ns()
        answer = ProbeAnswer(value=value, problem=problem, took_ms=(now_ns - asked_ns) / 1e6)
        with self._lock:
            self._asking, self._is_failing = None, bool(problem)
            is_good = value is not None and self._is_good(value)
            self._last, self._last_ns = (answer, now_ns) if is_good else (None, 0)
        asking.set_result(answer)
