"""Measures the duration and daily usage of attempts, with calendar days of the server.

The node measures durations with its boottime clock. The server determines the day of usage without the node's wall
clock. A wrong wall clock would move usage out of every report and budget. The server therefore shifts all fact times of
one node by the same offset. The offset aligns the node's start of user code with the checked start in
`crews.started_ns`. Without a checked start, the server moves the first fact into the attempt's lifetime. The server
rounds an attempt's usage once per node.

Database rows contain the server's wall clock times. If an operator moves the wall clock by hours, a one-minute attempt
appears to last hours. A duration that is wrong by hours could exhaust the run's budget immediately. A `Lifetime`
therefore converts each new wall clock time to boottime only once. If an attempt ended before the server started, its
database rows show the duration but not the boottime of the end.
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
"""Maximum nanoseconds of usage after the last fact, equal to two heartbeat facts because one fact may be late."""
OFF_NS = 1_000_000_000
"""Smallest clock offset of a node that the server corrects, in nanoseconds."""


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
        """Return the time of the node's last report about an attempt, in nanoseconds since 1970."""
        if self.leases is None:
            return crew.lease_ns
        last_ns = self.leases.last_ns(crew.id, now_ns=self.boot_ns)
        return max(crew.lease_ns, self.wall_ns - max(0, self.boot_ns - last_ns))


def now(clock: Clock, leases: Leases) -> Now:
    """Return the current wall clock time and boottime."""
    return Now(wall_ns=clock.wall_ns(), boot_ns=clock.boottime_ns(), leases=leases)


def used(attempt: StoredAttempt, crew: StoredCrew, facts: Sequence[Fact]) -> tuple[LedgerLine, ...]:
    """Return an attempt's daily usage and costs on one node, up to the last fact."""
    is_billed = attempt.reason is None or MEANINGS[attempt.reason].is_billed
    return lines(on_our_calendar(attempt, crew, facts), attempt.tariff, is_billed=is_billed)


def so_far(attempt: StoredAttempt, crew: StoredCrew, facts: Sequence[Fact], at: Now) -> tuple[LedgerLine, ...]:
    """Return an attempt's daily usage and costs on one node, up to the node's last report.

    The usage ends at most `AHEAD_NS` after the last fact. `AHEAD_NS` limits the usage error after a clock change.
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
    """Return the time in milliseconds that a run waited for an attempt.

    Args:
        asked_ns: time of the submission.
        before: the previous attempt, whose duration is not waiting time; None for the first attempt.
        until_ns: time of the placement; now if the run still waits.
    """
    since_ns = asked_ns if before is None or before.ended_ns is None else before.ended_ns
    return max(0, until_ns - since_ns) // _MS_NS


def on_our_calendar(attempt: StoredAttempt, crew: StoredCrew, facts: Sequence[Fact]) -> Sequence[Fact]:
    """Return facts with times of the server's clock, unchanged if the node's clock is right."""
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
        """Convert a wall clock time to boottime. A future wall clock time becomes the current boottime."""
        return min(self.boot_ns, self.boot_ns - self.wall_ns + wall_ns)

    def wall(self, boot_ns: int) -> int:
        """Convert a boottime to wall clock time."""
        return self.wall_ns - self.boot_ns + boot_ns


class Lifetime(msgspec.Struct):
    """Start, stop request and end of one attempt, in nanoseconds of boottime.

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
        """Update the lifetime from the stored attempt and from the last reports of its nodes."""
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
