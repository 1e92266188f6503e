"""When attempts began, were heard of and ended, by the clock that nobody sets: memory, from one look to the next.

Rows say such times by the wall clock as it was when they were written. Set by hours, it would make an attempt of a
minute one that used hours: a budget would be used up at once, and a stop is final. So each time is put on the boottime
clock when it is seen for the first time, and stays there. Of an attempt that had ended before anybody looked, its rows
say how long it took, and not when that was.
"""

from __future__ import annotations

import msgspec

from serverless_gpu.server.lifecycle.liveness import Leases
from serverless_gpu.server.records.runs.attempts import StoredAttempt


class ClockPair(msgspec.Struct, frozen=True):
    """One moment by both clocks, nanoseconds."""

    wall_ns: int
    boot_ns: int

    def boot(self, wall_ns: int) -> int:
        """Return by boottime what was said by the wall clock; nothing that is there lies ahead."""
        return min(self.boot_ns, self.boot_ns - self.wall_ns + wall_ns)

    def wall(self, boot_ns: int) -> int:
        """Return by the wall clock, as it is set now, what was said by boottime."""
        return self.wall_ns - self.boot_ns + boot_ns


class Lifetime(msgspec.Struct):
    """Of one attempt, boottime in nanoseconds.

    Attributes:
        began_ns: when user code began; None before.
        seen_ns: the last sign of life, or the end; None before the first look.
        stop_ns: since when it is asked to stop; None while it is not.
        ended_ns: its end as it was last read: by the wall clock, of whatever time.
    """

    began_ns: int | None = None
    seen_ns: int | None = None
    stop_ns: int | None = None
    ended_ns: int | None = None

    def look(self, one: StoredAttempt, now: ClockPair, leases: Leases, *, is_stopping: bool) -> None:
        """Note what can be seen of an attempt: of its crews, what was seen of them last.

        Args:
            one: as it is stored.
            now: when that was read.
            leases: of this server.
            is_stopping: whether it is asked to stop.
        """
        if is_stopping and self.stop_ns is None:
            self.stop_ns = now.boot_ns
        ended_ns = None
        if one.ended_ns is not None:
            ends = (crew.lease_ns if crew.given_up else crew.ended_ns for crew in one.crews)
            ended_ns = max((end_ns for end_ns in ends if end_ns is not None), default=one.ended_ns)
        is_new = self.seen_ns is None
        if ended_ns is None:
            heard_ns = (leases.last_ns(crew.id, now_ns=now.boot_ns) for crew in one.open_crews)
            self.seen_ns = min(now.boot_ns, max(heard_ns, default=now.boot_ns))
        elif self.seen_ns is None:
            self.seen_ns = now.boot(ended_ns)
        elif ended_ns != self.ended_ns:
            self.seen_ns = max(self.seen_ns, now.boot(ended_ns))
        self.ended_ns = ended_ns
        if self.began_ns is None and one.started_ns is not None:
            if is_new and ended_ns is not None:
                self.began_ns = self.seen_ns - max(0, ended_ns - one.started_ns)
            else:
                self.began_ns = now.boot(one.started_ns)
