"""Checks the health of each server component within a time limit.

    GET /health ─▶ database            one read, and one write after 10 s without any  probe, 2 s
                   store, environments a small object put, read back, deleted    probe, 5 s, kept for 10 s
                   disk, database_disk space left                                probe, 2 s
                   mlflow              the MLflow server, if one runs            probe, 2 s
                   server              the server is not stopping                memory
                   claim               this server holds the leader lock         memory
                   scheduler, …        each loop: a recent successful tick       memory

    Probe.answer() ─▶ recent good answer exists? ─▶ return it
                      └─ else one thread runs the check; other callers wait for its answer

                           └─ after `bound_s` ─▶ "has not answered for 7 s", returned at once until the answer comes

A failed disk or an unreachable bucket may never answer. Without probes, a few `/health` requests could block every
server thread. Each disk, store or database check therefore runs in a separate daemon thread. A failed check runs again
for the next caller, because a probe caches only successful checks.

Answers of `/health` name no host, path, user or run, because `/health` is a public route. A `/health` answer contains
only component names, fixed texts and durations. The server logs the details when a component's health changes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import msgspec

from serverless_gpu.ambient import Clock, SystemClock

T = TypeVar("T")


BOUND_S = 2.0
STORE_BOUND_S = 5.0
STORE_FRESH_S = 10.0
"""Cache lifetime of a successful store check in seconds."""
RETRY_AFTER_S = 5
_log = logging.getLogger(__name__)
Check = Callable[[], str]
"""Returns a problem description without user or host names, or "" without a problem."""


class Unwell(Exception):
    """Signals a failed health check. The message is public and must not name users or hosts."""


class ProbeAnswer(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """Result of a probe.

    Attributes:
        value: the answer; None without an answer.
        problem: reason for the missing answer, phrased to follow the name of the part; "" if there is an answer.
        took_ms: time until the answer, or the waiting time so far, in milliseconds.
    """

    value: T | None = None
    problem: str = ""
    took_ms: float = 0.0


class Probe(Generic[T]):
    """Checks one server component in a separate thread. All methods are thread-safe.

    Args:
        name: name of the thread, also used in the log.
        ask: blocking check. An exception counts as a failed check, which the probe logs once until the next success.
        clock: measures the age of answers.
        fresh_s: seconds that a good answer stays valid.
        bound_s: maximum wait of a caller in seconds.
        is_good: returns True for an answer that may be kept.
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
        self._is_failing = False  # True after the probe has logged the current failure.

    async def answer(self) -> ProbeAnswer[T]:
        """Return a recent check result, or report a problem if the check exceeds `bound_s`."""
        with self._lock:
            now_ns = self._clock.boottime_ns()
            if self._last is not None and now_ns - self._last_ns < self._fresh_ns:
                return self._last
            asking = self._asking
            if asking is None:
                asking = Future()
                # Prevent a cancelled caller from cancelling the shared check.
                asking.set_running_or_notify_cancel()
                self._asking, self._asked_ns = asking, now_ns
                arguments = (asking, now_ns)
                threading.Thread(target=self._work, args=arguments, name=f"probe-{self._name}", daemon=True).start()
            left_ns = self._asked_ns + self._bound_ns - now_ns
        if left_ns > 0 and not asking.done():
            waited = asyncio.wrap_future(asking)
            await asyncio.wait({waited}, timeout=left_ns / 1e9)
            waited.cancel()  # The probe thread continues the check after the caller's timeout.
        if asking.done():
            return asking.result()
        waited_ns = self._clock.boottime_ns() - self._asked_ns
        return ProbeAnswer(problem=f"has not answered for {waited_ns / 1e9:.0f} s", took_ms=waited_ns / 1e6)

    def _work(self, asking: Future[ProbeAnswer[T]], asked_ns: int) -> None:
        value: T | None = None
        problem = ""
        try:
            value = self._ask()
        except Exception as error:  # noqa: BLE001 — every exception is a health problem
            if not self._is_failing:
                _log.warning("the health check of the %s failed", self._name, exc_info=True)
            problem = str(error) if isinstance(error, Unwell) else "cannot be checked"
        now_ns = self._clock.boottime_ns()
        answer = ProbeAnswer(value=value, problem=problem, took_ms=(now_ns - asked_ns) / 1e6)
        with self._lock:
            self._asking, self._is_failing = None, bool(problem)
            is_good = value is not None and self._is_good(value)
            self._last, self._last_ns = (answer, now_ns) if is_good else (None, 0)
        asking.set_result(answer)


class PartHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Health of one server component."""

    name: str
    problem: str
    ms: float


class ServerHealth:
    """Collects the health of all server components. Callers may add components at any time."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._memory: dict[str, Check] = {}
        self._probes: dict[str, Probe[str]] = {}
        self._last: dict[str, str] = {}

    def watch(self, name: str, check: Check) -> None:
        """Add a component whose `check` only reads memory. A component may have several checks."""
        with self._lock:
            before = self._memory.get(name)
            self._memory[name] = check if before is None else lambda: before() or check()

    def probe(self, name: str, check: Check, *, fresh_s: float = 0.0, bound_s: float = BOUND_S) -> None:
        """Add a component with a probe thread, because its check may block."""
        made = Probe(
            name, check, clock=self._clock, fresh_s=fresh_s, bound_s=bound_s, is_good=lambda problem: not problem
        )
        with self._lock:
            self._probes[name] = made

    async def look(self) -> list[PartHealth]:
        """Check every component, and return the results within the longest probe timeout."""
        with self._lock:
            memory, probes = dict(self._memory), dict(self._probes)
        answers = await asyncio.gather(*(probe.answer() for probe in probes.values()))
        found: list[PartHealth] = []
        for name, answer in zip(probes, answers, strict=True):
            problem = f"the {name} {answer.problem}" if answer.problem else answer.value or ""
            found.append(PartHealth(name=name, problem=problem, ms=round(answer.took_ms, 1)))
        found += [PartHealth(name=name, problem=check(), ms=0.0) for name, check in memory.items()]
        self._tell_changes(found)
        return found

    def last(self) -> dict[str, bool]:
        """Return the last known health of each component, with True for a healthy component."""
        with self._lock:
            return {name: not problem for name, problem in self._last.items()}

    def _tell_changes(self, found: list[PartHealth]) -> None:
        with self._lock:
            before, self._last = self._last, {one.name: one.problem for one in found}
        for one in found:
            was = before.get(one.name, "")
            if one.problem and not was:
                _log.warning("health: %s", one.problem)
            elif was and not one.problem:
                _log.info("health: the %s has recovered", one.name)
