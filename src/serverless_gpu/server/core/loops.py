"""Runs periodic jobs in background loops, and provides a wall clock that tolerates jumps.

A loop calls `tick(now) → next wake-up` in a thread. `Loop.ring` wakes the loop early. Tests call the tick functions
directly.

    ring (any thread) ─┐
    the wake-up time ──┴─▶ tick in the loop's thread ─▶ next wake-up


A loop is busy at most half of the time. After a tick, the loop sleeps for at least the tick's duration. A loop logs a
failed tick and retries with backoff. The scheduler therefore survives database outages. Ticks store their state in the
database. A restarted server therefore continues where the stopped server ended.

`JumpTolerantClock` reads the machine's clock:

    first ten minutes         accepted: a machine often sets its clock shortly after its start
    slews, small steps        accepted: within two minutes of the expected time
    a jump, forward or back   ignored for an hour; then accepted, unless the clock has jumped back

A clock error shorter than one hour affects neither token lifetimes nor retention. Durations and deadlines use boottime
and are therefore independent of wall clock jumps. The server logs each clock jump, and later the acceptance of the
jump.

Failure cases:

* The machine's clock is wrong when the server starts. The server accepts the wrong time, because the server has no
  other time source. If the clock is slow, the server accepts expired tokens.

* The machine's clock jumps repeatedly. Each jump restarts the waiting period of one hour.
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
"""Seconds without a successful tick after which `Loop.problem` reports the loop."""
SHORT_S = 0.005
SETTLING_S = 600.0
STEP_S = 120.0
BELIEVED_S = 3_600.0
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_log = logging.getLogger(__name__)

Tick = Callable[[int], int | None]
"""Runs a periodic job at a given boottime (ns), and returns the next due time."""


class Loop:
    """Runs one tick function in a separate thread."""

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
        """Return the loop's name."""
        return self._name

    def problem(self) -> str:
        """Return a message if the loop's thread has ended or its last successful tick is too old, or ""."""
        if not self._stopped.is_set() and self._thread.ident is not None and not self._thread.is_alive():
            return f"the {self._name} has ended"
        silent_s = (self._clock.boottime_ns() - self._good_ns) / 1e9
        if silent_s <= self._late_s:
            return ""
        return f"the {self._name} has completed no tick for {silent_s:.0f} s"

    def start(self) -> None:
        """Start the loop's thread, which runs the first tick immediately."""
        self._good_ns = self._clock.boottime_ns()
        self._thread.start()

    def ring(self) -> None:
        """Wake the loop, or make the loop run again after its current tick."""
        self._rung.set()

    def stop(self, *, timeout_s: float) -> bool:
        """Stop the loop after its current tick, and return True if its thread ended in time."""
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
            # Another thread may have called `stop` before this thread cleared `_rung`.
            if not self._stopped.is_set():
                self._rung.wait(pause_s)

    def _turn(self, now_ns: int) -> float:
        """Run one tick, and return the seconds until the next tick."""
        try:
            with server_log.bound(loop=self._name):
                due_ns = self._tick(now_ns)
        except ServerProblem as error:
            _log.warning("%s: %s", self._name, error.message)
        except Exception:  # noqa: BLE001 — a failed tick must not end the loop
            _log.exception("a tick of the %s failed and will be retried", self._name)
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
    """A clock whose wall time ignores jumps for an hour."""

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
        """Return the kernel's boot identifier."""
        return self._clock.boot_id()

    def wall_ns(self) -> int:
        """Return the wall time in nanoseconds since 1970, without recent clock jumps."""
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
        """Accept a clock jump after one hour without another jump."""
        if self._jumped_ns is None or abs(base_ns - self._seen_ns) > STEP_S * 1e9:
            self._jumped_ns, self._seen_ns = now_ns, base_ns
            jump_s, minutes = (base_ns - self._base_ns) / 1e9, round(BELIEVED_S / 60)
            _log.warning(
                "the machine's clock jumped by %+.0f s; the server accepts the new time in %d minutes",
                jump_s,
                minutes,
            )
        elif now_ns - self._jumped_ns >= BELIEVED_S * 1e9:
            self._base_ns, self._jumped_ns = base_ns, None
            _log.warning("the server follows the machine's clock again: %s", format_utc(now_ns + base_ns))
