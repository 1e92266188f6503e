"""Wall clock of the server that does not follow a jump of the machine's clock at once.

    first ten minutes         believed: a machine that has just started has its clock set then
    slews, small steps        believed: within two minutes of what this process expects
    a jump, forward or back   for an hour time goes on as before; then it is believed, unless the clock came back

So a clock that is set wrong and put right again costs nothing: no token ends early or lives longer, nothing that is
kept is removed, no receipt is given up. Durations and deadlines do not depend on it in any case: they are boottime.
The log says when a jump comes, and when it is believed.

Failure cases: the server is started while the clock is wrong (it is believed: nothing better is known; a token that has
ended is let in again by a clock that is behind); the clock jumps again and again (each time counts from the last one).
"""

from __future__ import annotations

import logging
import threading

from serverless_gpu.ambient import Clock, format_utc

SETTLING_S = 600.0
STEP_S = 120.0
BELIEVED_S = 3_600.0
_log = logging.getLogger(__name__)


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
