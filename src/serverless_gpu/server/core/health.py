"""Health: asks each part of the server for problems, and waits for none of them longer than a bound.

    GET /health ─▶ database            one read, and one write after 10 s without any  probe, 2 s
                   store, environments a small object put, read back, deleted    probe, 5 s, kept for 10 s
                   disk, database_disk room that is left                         probe, 2 s
                   mlflow              the one beside it, where there is one     probe, 2 s
                   server              it is not being stopped                   memory
                   claim               the database is this server's             memory
                   scheduler, …        each loop: a good tick not too long ago   memory

    Probe.answer() ─▶ a good answer that is young enough? ─▶ it
                      └─ else one thread asks; later callers wait for the same answer
                           └─ until the question is `bound_s` old ─▶ "has not answered for 7 s", at once from then on

A disk that is gone or a bucket behind a broken network does not answer at all. If requests asked it themselves, a few
visits to `/health` would take every thread of the server. So each part has one thread, which ends with the process at
the latest. A bad answer is not kept: the next caller asks again.

`/health` is public, so an answer names no host, path, user or run: fixed names, fixed words, milliseconds. The server's
log has the rest, once for each change.
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
"""How long the store is believed: each look is three requests to a bucket."""
RETRY_AFTER_S = 5
_log = logging.getLogger(__name__)
Check = Callable[[], str]
"""Returns what is wrong, in words that name no one, or ""."""


class Unwell(Exception):
    """What was asked has a problem: in words that follow its name and name no one; the cause is for the log."""


class ProbeAnswer(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """Result of a probe.

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
            asking = self._asking
            if asking is None:
                asking = Future()
                asking.set_running_or_notify_cancel()  # a wait that is cancelled must not cancel it
                self._asking, self._asked_ns = asking, now_ns
                arguments = (asking, now_ns)
                threading.Thread(target=self._work, args=arguments, name=f"probe-{self._name}", daemon=True).start()
            left_ns = self._asked_ns + self._bound_ns - now_ns
        if left_ns > 0 and not asking.done():
            waited = asyncio.wrap_future(asking)
            await asyncio.wait({waited}, timeout=left_ns / 1e9)
            waited.cancel()  # it stays with the thread; only this wait for it ends
        if asking.done():
            return asking.result()
        waited_ns = self._clock.boottime_ns() - self._asked_ns
        return ProbeAnswer(problem=f"has not answered for {waited_ns / 1e9:.0f} s", took_ms=waited_ns / 1e6)

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


class PartHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How one part is."""

    name: str
    problem: str
    ms: float


class ServerHealth:
    """All parts of a server that can be unwell; more may be added while it is asked."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._memory: dict[str, Check] = {}
        self._probes: dict[str, Probe[str]] = {}
        self._last: dict[str, str] = {}

    def watch(self, name: str, check: Check) -> None:
        """Add a part that is known from memory: `check` returns at once. Of the same name, both are asked."""
        with self._lock:
            before = self._memory.get(name)
            self._memory[name] = check if before is None else lambda: before() or check()

    def probe(self, name: str, check: Check, *, fresh_s: float = 0.0, bound_s: float = BOUND_S) -> None:
        """Add a part that has to be asked, and may not answer."""
        made = Probe(
            name, check, clock=self._clock, fresh_s=fresh_s, bound_s=bound_s, is_good=lambda problem: not problem
        )
        with self._lock:
            self._probes[name] = made

    async def look(self) -> list[PartHealth]:
        """Return how every part is, asked now; takes as long as the longest bound at most."""
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
        """Return whether each part was well when it was looked at last; nothing before that."""
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
                _log.info("health: the %s is well again", one.name)
