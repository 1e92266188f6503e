"""Whether the server can do its work: each part of it asked by itself, none of them waited for longer than a bound.

    GET /health ─▶ database            one read, and one write after 10 s without any  probe, 2 s
                   store, environments a small object put, read back, deleted    probe, 5 s, kept for 10 s
                   disk, database_disk room that is left                         probe, 2 s
                   mlflow              the one beside it, where there is one     probe, 2 s
                   server              it is not being stopped                   memory
                   claim               the database is this server's             memory
                   scheduler, …        each loop: a good tick not too long ago   memory

Anybody may ask, so what is said names no host, path, user or run: fixed names, fixed words, milliseconds. The server's
log has the rest, once for each change, not for each visit.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

import msgspec

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.server.core.probes import Probe, ProbeAnswer

BOUND_S = 2.0
STORE_BOUND_S = 5.0
STORE_FRESH_S = 10.0
"""How long the store is believed: each look is three requests to a bucket."""
RETRY_AFTER_S = 5
_log = logging.getLogger(__name__)

Check = Callable[[], str]
"""Returns what is wrong, in words that name no one, or ""."""


class PartHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How one part is.

    Attributes:
        problem: what is wrong with it, or "".
        ms: how long it took to find out.
    """

    name: str
    problem: str
    ms: float


class ServerHealth:
    """All parts of a server that can be unwell; more may be added while it is asked.

    Args:
        clock: for answers that are kept, and bounds; the machine's unless given.
    """

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
        """Add a part that has to be asked, and may not answer.

        Args:
            name: of the part.
            check: blocks; called in a thread, one at a time.
            fresh_s: how long it is believed that nothing is wrong.
            bound_s: how long anybody waits for it.
        """
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
        found = [_checked(name, answer) for name, answer in zip(probes, answers, strict=True)]
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


def _checked(name: str, answer: ProbeAnswer[str]) -> PartHealth:
    problem = answer.value or "" if not answer.problem else f"the {name} {answer.problem}"
    return PartHealth(name=name, problem=problem, ms=round(answer.took_ms, 1))
