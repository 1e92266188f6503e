"""Loops that call ticks, and the wall clock of the server, which does not follow a jump at once.

A loop calls `tick(now) → when to tick again` in a thread, and sooner when rung. Tests call the ticks themselves.

    ring (any thread) ─┐
    the wake-up time ──┴─▶ tick in a thread of its own ─▶ next wake-up

A loop works at most half of the time: a tick that took long (a thousand runs wait) is followed by as long a pause,
however often it is rung. A tick that fails is logged and tried again with growing pauses: a database that is away for
half a minute must not end the scheduler. What a loop has not finished when the server stops, the next server does:
ticks keep nothing that is not in the database.

`JumpTolerantClock` reads the machine's clock:

    first ten minutes         believed: a machine that has just started has its clock set then
    slews, small steps        believed: within two minutes of what this process expects
    a jump, forward or back   for an hour time goes on as before; then it is believed, unless the clock came back

So a clock that is set wrong and put right again costs nothing: no token ends early or lives longer, nothing that is
kept is removed, no receipt is given up. Durations and deadlines do not depend on it in any case: they are boottime.
The log says when a jump comes, and when it is believed.

Failure cases:
- The server is started while the clock is wrong: it is believed, for nothing better is known. A clock that is behind
  lets in a token that has ended.
- The clock jumps again and again: each time counts from the last one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from serverless_gpu.ambient import Clock, format_utc
from serverless_gpu.errors import ServerProblem
from serverless_gpu.server.core import server_log
from serverless_gpu.server.core.server_metrics import ServerMetrics

LONGEST_S = 30.0
LATE_S = 90.0
"""A loop without a good tick for so long is a problem of the server's: three times its longest pause."""
SHORT_S = 0.005
SETTLING_S = 600.0
STEP_S = 120.0
BELIEVED_S = 3_600.0
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_log = logging.getLogger(__name__)

Tick = Callable[[int], int | None]
"""Does what is due at this boottime (nanoseconds); returns when something is due again, or None for when it is rung."""


class Loop:
    """One loop in a thread of its own."""

    def __init__(
        self, name: str, tick: Tick, *, clock: Clock, late_s: float = LATE_S, measures: ServerMetrics | None = None
    ) -> None:
        self._name, self._tick, self._clock, self._late_s = name, tick, clock, late_s
        self._measures = measures or ServerMetrics()
        self._good_ns = clock.boottime_ns()
        self._rung = threading.Event()
        self._stopped = threading.Event()
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def name(self) -> str:
        """Return its name."""
        return self._name

    def problem(self) -> str:
        """Return what is wrong with it, or "": its last good tick is too long ago, or its thread is gone."""
        if not self._stopped.is_set() and self._thread.ident is not None and not self._thread.is_alive():
            return f"the {self._name} has ended"
        silent_s = (self._clock.boottime_ns() - self._good_ns) / 1e9
        if silent_s <= self._late_s:
            return ""
        return f"the {self._name} has finished nothing for {silent_s:.0f} s"

    def start(self) -> None:
        """Begin; the first tick is now."""
        self._good_ns = self._clock.boottime_ns()
        self._thread.start()

    def ring(self) -> None:
        """Have it look now, or right after the tick it is in."""
        self._rung.set()

    def stop(self, *, timeout_s: float) -> bool:
        """Let the tick it is in end, and no other begin; return whether it has ended within this time."""
        self._stopped.set()
        self._rung.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._rung.clear()
            began_ns = self._clock.boottime_ns()
            pause_s = self._turn(began_ns)
            took_s = (self._clock.boottime_ns() - began_ns) / 1e9
            self._measures.ticks.labels(self._name).observe(took_s)
            if took_s > SHORT_S:
                self._stopped.wait(min(took_s, LONGEST_S))
            if not self._stopped.is_set():  # `stop` may have rung before the bell was cleared
                self._rung.wait(pause_s)

    def _turn(self, now_ns: int) -> float:
        """Do one tick; return the seconds until the next."""
        try:
            with server_log.bound(loop=self._name):
                due_ns = self._tick(now_ns)
        except ServerProblem as error:
            _log.warning("%s: %s", self._name, error.message)
        except Exception:  # noqa: BLE001 — a loop must outlive its mistakes: runs depend on it, and the log has them
            _log.exception("%s failed and is tried again", self._name)
        else:
            self._failures = 0
            self._good_ns = self._clock.boottime_ns()
            self._measures.tick_success.labels(self._name).set(self._clock.wall_ns() / 1e9)
            after_s = LONGEST_S if due_ns is None else (due_ns - self._clock.boottime_ns()) / 1e9
            return min(LONGEST_S, max(0.0, after_s))
        pause_s = _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]
        self._failures += 1
        self._measures.tick_failures.labels(self._name).inc()
        return pause_s


class JumpTolerantClock:
    """A clock whose wall time does not follow jumps at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began_ns = clock.boottime_ns()
        self._base_ns = clock.wall_ns() - self._began_ns
        self._jumped_ns: int | None = None
        self._seen_ns = self._base_ns

    def boottime_ns(self) -> int:
        """Return nanoseconds since boot, suspend included."""
        return self._clock.boottime_ns()

    def boot_id(self) -> str:
        """Return the identifier of this boot."""
        return self._clock.boot_id()

    def wall_ns(self) -> int:
        """Return nanoseconds since 1970, as far as the machine is believed."""
        with self._lock:
            now_ns = self._clock.boottime_ns()
            base_ns = self._clock.wall_ns() - now_ns
            is_settling = now_ns - self._began_ns < SETTLING_S * 1e9
            if is_settling or abs(base_ns - self._base_ns) <= STEP_S * 1e9:
                self._base_ns, self._jumped_ns = base_ns, None
            else:
                self._consider(base_ns, now_ns)
            return now_ns + self._base_ns

    def _consider(self, base_ns: int, now_ns: int) -> None:
        """Believe a clock that has jumped once it has stood by that for long enough."""
        if self._jumped_ns is None or abs(base_ns - self._seen_ns) > STEP_S * 1e9:
            self._jumped_ns, self._seen_ns = now_ns, base_ns
            jump_s, minutes = (base_ns - self._base_ns) / 1e9, round(BELIEVED_S / 60)
            _log.warning("the clock of this machine jumped by %+.0f s; it is believed in %d minutes", jump_s, minutes)
        elif now_ns - self._jumped_ns >= BELIEVED_S * 1e9:
            self._base_ns, self._jumped_ns = base_ns, None
            _log.warning("the clock of this machine is believed again: it is %s", format_utc(now_ns + base_ns))
