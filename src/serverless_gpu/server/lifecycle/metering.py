"""Metering: what a crew has used, on the server's calendar, at its attempt's tariff; and how long attempts run.

How long something took is the node's to say (boottime). On which day it was is not: a node whose clock has lost its
battery would move what it used out of every report and budget. So a crew's facts are moved as a whole, until user code
begins when the server has written that it began (`crews.started_ns`, which it has checked); without that, until the
first fact is not older than the attempt, nor newer than the crew's end. Each crew is rounded by itself, once.

Rows have times by the wall clock as it was when they were written. A clock set by hours would make an attempt of a
minute one that used hours: a budget would be used up at once, and a stop is final. So a `Lifetime` puts each time on
the boottime clock when it is seen for the first time, and keeps it there. Of an attempt that had ended before that, its
rows say how long it took, and not when that was.
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
"""A crew that is heard of writes a fact each minute (`node.account.ALIVE_S`), and may be late with one."""
OFF_NS = 1_000_000_000
"""A clock that is off by less is as right as anybody needs to know on which day something was."""


class Now(msgspec.Struct, frozen=True, kw_only=True):
    """A moment.

    Attributes:
        wall_ns: nanoseconds since 1970; `boot_ns` the same by the clock that leases are kept by.
        leases: when crews were heard of last; None for what was written of that, which is 15 s behind.
    """

    wall_ns: int
    boot_ns: int = 0
    leases: Leases | None = None

    def heard_ns(self, crew: StoredCrew) -> int:
        """Return when a crew was heard of last, nanoseconds since 1970."""
        if self.leases is None:
            return crew.lease_ns
        last_ns = self.leases.last_ns(crew.id, now_ns=self.boot_ns)
        return max(crew.lease_ns, self.wall_ns - max(0, self.boot_ns - last_ns))


def now(clock: Clock, leases: Leases) -> Now:
    """Return this moment."""
    return Now(wall_ns=clock.wall_ns(), boot_ns=clock.boottime_ns(), leases=leases)


def used(attempt: StoredAttempt, crew: StoredCrew, facts: Sequence[Fact]) -> tuple[LedgerLine, ...]:
    """Return what a crew has used on each day, up to its last sign of life, and what that costs."""
    is_billed = attempt.reason is None or MEANINGS[attempt.reason].is_billed
    return lines(on_our_calendar(attempt, crew, facts), attempt.tariff, is_billed=is_billed)


def so_far(attempt: StoredAttempt, crew: StoredCrew, facts: Sequence[Fact], at: Now) -> tuple[LedgerLine, ...]:
    """Return the same up to when a crew that goes on was heard of last, which is later than its last fact.

    It is later by `AHEAD_NS` at most: that is how often it says that it lives, and a clock that was set since it began
    makes nothing of it.
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
    """Return for how long a run waited for an attempt, in milliseconds.

    Args:
        asked_ns: when the run was asked for.
        before: its attempt before that one, during which it did not wait; None where it is the first.
        until_ns: when the attempt was placed; now, where the run still waits for it.
    """
    since_ns = asked_ns if before is None or before.ended_ns is None else before.ended_ns
    return max(0, until_ns - since_ns) // _MS_NS


def on_our_calendar(attempt: StoredAttempt, crew: StoredCrew, facts: Sequence[Fact]) -> Sequence[Fact]:
    """Return the facts with times of the server's calendar; as they are where their clock was right."""
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
        """Note what can be seen of an attempt: of its crews, what was seen of them last."""
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
