"""Measures the usage of attempts by the server's calendar, and the duration of attempts.

The node measures durations with its boottime clock. The node's wall clock does not determine the day of the usage. A
wrong wall clock would move usage out of every report and budget. The server therefore shifts the times of all facts of
one node together. After this shift of the facts, user code begins at the checked start in `crews.started_ns`. Without a
checked start, the server moves the first fact into the lifetime of the attempt. The server rounds the usage on each
node once.

Database rows contain the wall clock time at the moment of writing. If an operator moves the clock by hours, a
one-minute attempt appears to last hours. The wrong duration would use up a budget immediately, and the server would
stop the run. A `Lifetime` therefore converts each new time to the boottime clock once, and stores the result. For an
attempt that ended before the server started, the rows show the duration but not the boottime of the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.model.billing.ledger import LedgerLine, lines
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Fact, FactKind, alive_after
from serverless_gpu.server.lifecycle.liveness import Leases
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.server.records.crews import StoredCrew

_MS_NS = 1_000_000
AHEAD_NS = 120_000_000_000
"""Two minutes: a running attempt writes a fact every minute, and one fact may be late."""
OFF_NS = 1_000_000_000
"""One second. The ledger counts usage by day, so the server ignores a smaller clock offset."""


class Now(msgspec.Struct, frozen=True, kw_only=True):
    """The current moment.

    Attributes:
        wall_ns: nanoseconds since 1970; `boot_ns` is the same moment in boottime.
        leases: times of the last reports; None for the database columns, which are up to 15 s old.
    """

    wall_ns: int
    boot_ns: int = 0
    leases: Leases | None = None

    def heard_ns(self, crew: StoredCrew) -> int:
        """Return the time of the last report about an attempt on a node, nanoseconds since 1970."""
        if self.leases is None:
            return crew.lease_ns
        last_ns = self.leases.last_ns(crew.id, now_ns=self.boot_ns)
        return max(crew.lease_ns, self.wall_ns - max(0, self.boot_ns - last_ns))


def now(clock: Clock, leases: Leases) -> Now:
    """Return the current time on both clocks."""
    return Now(wall_ns=clock.wall_ns(), boot_ns=clock.boottime_ns(), leases=leases)


def used(attempt: StoredAttempt, crew: StoredCrew, facts: Sequence[Fact]) -> tuple[LedgerLine, ...]:
    """Return the usage and costs of an attempt on a node by day, up to its last fact."""
    is_billed = attempt.reason is None or MEANINGS[attempt.reason].is_billed
    return lines(on_our_calendar(attempt, crew, facts), attempt.tariff, is_billed=is_billed)


def so_far(attempt: StoredAttempt, crew: StoredCrew, facts: Sequence[Fact], at: Now) -> tuple[LedgerLine, ...]:
    """Return an attempt's usage and costs on a node by day, up to the last report while it runs.

    The usage ends at most `AHEAD_NS` after the last fact, because a running attempt writes facts regularly. `AHEAD_NS`
    limits the error after a clock change.
    """
    began = next((fact for fact in facts if fact.kind is FactKind.EXEC), None)
    if crew.ended_ns is not None or crew.started_ns is None or began is None:
        return used(attempt, crew, facts)
    last = facts[-1]
    at_ns = min(began.boottime_ns + at.heard_ns(crew) - crew.started_ns, last.boottime_ns + AHEAD_NS)
    if last.kind is FactKind.FREED or last.boot_id != began.boot_id or at_ns <= last.boottime_ns:
        return used(attempt, crew, facts)
    return used(attempt, crew, [*facts, alive_after(last, at_ns)])


def waited_ms(asked_ns: int, before: StoredAttempt | None, until_ns: int) -> int:
    """Return how long a run waited for an attempt, in milliseconds.

    Args:
        asked_ns: time of the submission.
        before: the previous attempt, whose duration is not waiting time; None for the first attempt.
        until_ns: time of the placement; now if the run still waits.
    """
    since_ns = asked_ns if before is None or before.ended_ns is None else before.ended_ns
    return max(0, until_ns - since_ns) // _MS_NS


def on_our_calendar(attempt: StoredAttempt, crew: StoredCrew, facts: Sequence[Fact]) -> Sequence[Fact]:
    """Return facts with times of the server's calendar, unchanged if the node's clock is right."""
    if not facts:
        return facts
    by_ns = _off_ns(attempt, crew, facts)
    if abs(by_ns) < OFF_NS:
        return facts
    return [msgspec.structs.replace(fact, wall_ns=fact.wall_ns + by_ns) for fact in facts]


def _off_ns(attempt: StoredAttempt, crew: StoredCrew, facts: Sequence[Fact]) -> int:
    began = next((fact for fact in facts if fact.kind is FactKind.EXEC), None)
    if began is not None and crew.started_ns is not None:
        return crew.started_ns - began.wall_ns
    first_ns = facts[0].wall_ns
    latest_ns = first_ns if crew.ended_ns is None else crew.ended_ns
    return max(attempt.created_ns, min(first_ns, latest_ns)) - first_ns


class ClockPair(msgspec.Struct, frozen=True):
    """One moment on the wall clock and on the boottime clock, in nanoseconds."""

    wall_ns: int
    boot_ns: int

    def boot(self, wall_ns: int) -> int:
        """Convert a wall clock time to boottime. A future time becomes the current time."""
        return min(self.boot_ns, self.boot_ns - self.wall_ns + wall_ns)

    def wall(self, boot_ns: int) -> int:
        """Convert a boottime to the current wall clock."""
        return self.wall_ns - self.boot_ns + boot_ns


class Lifetime(msgspec.Struct):
    """The times of one attempt, boottime in nanoseconds.

    Attributes:
        began_ns: start of user code; None before.
        seen_ns: time of the last report, or of the end; None before the first `look`.
        stop_ns: time of the stop request; None without one.
        ended_ns: end of the attempt as last read from the database, by the wall clock.
    """

    began_ns: int | None = None
    seen_ns: int | None = None
    stop_ns: int | None = None
    ended_ns: int | None = None

    def look(self, one: StoredAttempt, now: ClockPair, leases: Leases, *, is_stopping: bool) -> None:
        """Update the times from the stored attempt and from the last reports of its nodes."""
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
