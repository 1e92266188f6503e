"""Applies node rules (`wire.nodes.NodeRules`) to the runs that may start on a node or must leave it.

    drained        no new runs start on the node; with `stop`, its runs leave at once
    calendar       runs of other users start only while the node is shared, and leave after that
    quarantined    the scheduler does not use these devices of the node (`StoredNode.unavailable`)

`node_service.py` changes rules. The reconciler calls `Evacuation`, which stops runs that must leave a node:

    5 minutes before the end    the owner of the run gets one notice; `crews.leave_ns` contains the time to leave
    then                        stop request (DRAIN) with grace period and checkpoint; `resume` continues elsewhere
    a changed calendar          cancels the notice; the next check sends a new notice
    `drain --stop`              stop request at once

A run must leave its node at the earliest five minutes after the notice, even if the calendar has just changed. After a
crash, the server reads the times of sent notices from `crews.leave_ns`.

An unknown time zone, or a time window of another server version, makes a calendar invalid. The scheduler starts no runs
on a node with an invalid calendar. `sgpu node list` shows the problem with the calendar. Active runs on a node with an
invalid calendar continue.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache, partial
from zoneinfo import ZoneInfo

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock, format_clock, format_soon
from serverless_gpu.errors import AlreadyFinished, InvalidValue, StaleAttempt
from serverless_gpu.model import calendars
from serverless_gpu.model.lifecycle.attempt import StopReason
from serverless_gpu.model.scheduling import wait_messages
from serverless_gpu.server.core.hub import Hub, run_key
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.liveness import Leases
from serverless_gpu.server.lifecycle.transitions import Announcer, TransitionResult
from serverless_gpu.server.records import audit, crews, nodes, runs
from serverless_gpu.server.records.crews import StoredCrew
from serverless_gpu.server.records.nodes import RuledNode
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.wire.nodes import NodeCalendar, NodeDrain, NodeRules

WARNING_S = 300.0
"""Notice period in seconds before a run must leave a node."""
_SHOWN = 40  # Maximum characters of a device UUID in messages.
_MINUTE_NS = 60_000_000_000
TOGETHER = 8
"""Maximum number of stop requests in one transaction. The limit keeps each transaction short for other writers of the
database."""
_Due = tuple[RuledNode, StoredRun, str]
_log = logging.getLogger(__name__)


class SharingState(msgspec.Struct, frozen=True, kw_only=True):
    """Current sharing state of a node, from its calendar."""

    shared: bool = True  # True while users other than the node's owner may use the node.
    turns_ns: int | None = None  # Time of the next sharing change in nanoseconds since 1970, or None for never.
    problem: str = ""  # Problem of an invalid calendar, as text that follows the node's name, or "".


class LeaveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Time and reason for a run to leave its node."""

    at_ns: int | None  # Time to leave in nanoseconds since 1970, or None to leave immediately.
    because: str  # Reason for leaving the node, as the server shows it to users.


_ALWAYS = SharingState()


def sharing(rules: NodeRules, at_ns: int) -> SharingState:
    """Return a node's sharing state at a time in nanoseconds since 1970."""
    return _sharing(rules.calendar, at_ns // _MINUTE_NS) if rules.calendar.shared else _ALWAYS


def leaves(rules: NodeRules, *, node: str, owner: str, at_ns: int) -> LeaveRequest | None:
    """Return the request for a run to leave its node, or None if the run may stay."""
    if rules.drain is not None and rules.drain.stop:
        return LeaveRequest(at_ns=None, because=f"{rules.drain.by} drains {node}{_noted(rules.drain)}")
    if not may_concern(rules, at_ns) or owner == rules.calendar.owner:
        return None
    found = sharing(rules, at_ns)
    turns_ns = found.turns_ns if found.shared and found.turns_ns is not None else at_ns
    whose = f"{rules.calendar.owner}'s" if rules.calendar.owner else "not shared"
    return LeaveRequest(at_ns=turns_ns, because=f"{node} is {whose}")


def may_concern(rules: NodeRules, at_ns: int) -> bool:
    """Return True if a node's runs may have to leave now or within the notice period."""
    if rules.drain is not None and rules.drain.stop:
        return True
    found = sharing(rules, at_ns)
    if found.problem:
        return False
    return not found.shared or (found.turns_ns is not None and found.turns_ns - at_ns <= WARNING_S * 1e9)


def drained(rules: NodeRules) -> str:
    """Describe a node's drain with operator, time and note, or return "" without a drain."""
    drain = rules.drain
    return "" if drain is None else f"{drain.by} drains it since {format_clock(drain.since_ns)}{_noted(drain)}"


def left_out(rules: NodeRules) -> str:
    """Describe some quarantined devices with their notes, or return "" without quarantined devices."""
    named = [f"{one.uuid[:_SHOWN]}{f' ({one.note})' if one.note else ''}" for one in rules.quarantined]
    by = ", ".join(sorted({one.by for one in rules.quarantined}))
    return f"{by} left out: {', '.join(wait_messages.first_few(named))}" if by else ""


def check_calendar(asked: NodeCalendar) -> None:
    """Refuse an invalid calendar."""
    if asked.owner_first and not asked.owner:
        raise InvalidValue(
            "a calendar cannot give the owner priority without an owner", hint="set an owner for the node as well"
        )
    calendars.parse_calendar(asked.shared, _zone(asked.zone))


@lru_cache(maxsize=4096)
def _sharing(asked: NodeCalendar, minute: int) -> SharingState:
    """Return the sharing state for a minute, because time windows and zone changes begin at full minutes."""
    try:
        windows = calendars.parse_calendar(asked.shared, _zone(asked.zone))
    except InvalidValue as error:
        return SharingState(shared=False, problem=f"has an invalid calendar: {error.message}")
    at_ns = minute * _MINUTE_NS
    return SharingState(shared=calendars.is_shared(windows, at_ns), turns_ns=calendars.turns_at(windows, at_ns))


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name or "UTC")
    # `ZoneInfo` raises OSError if the name refers to a directory.
    except (ValueError, KeyError, OSError):
        raise InvalidValue(
            f"the server knows no time zone {name[:64]!r}",
            hint='use a name such as "Europe/Berlin", or omit it for UTC',
        ) from None


def _noted(drain: NodeDrain) -> str:
    return f" ({drain.note})" if drain.note else ""


class Evacuation:
    """Notifies and stops runs that must leave their node."""

    def __init__(self, *, clock: Clock, database: Transactions, hub: Hub, leases: Leases, announcer: Announcer) -> None:
        self._clock = clock
        self._database = database
        self._hub = hub
        self._leases = leases
        self._announcer = announcer

    def look(self) -> None:
        """Notify the owners of runs that must leave soon, and stop runs after their notice period."""
        at_ns = self._clock.wall_ns()
        freed = self._leases.freed()
        due: list[_Due] = []
        for node, run in self._database.read(lambda connection: _concerned(connection, at_ns)):
            own = [] if run.attempt is None else [crew for crew in run.attempt.open_crews if crew.node_id == node.id]
            if run.stop is not None or not own or own[0].id in freed:
                continue
            because = self._look_at(node, run, own[0], at_ns)
            if because is not None:
                due.append((node, run, because))
        for first in range(0, len(due), TOGETHER):
            some, at_ns = due[first : first + TOGETHER], self._clock.wall_ns()
            for told in self._database.write(partial(_ask_together, due=some, at_ns=at_ns)):
                self._announcer.announce(told)

    def _look_at(self, node: RuledNode, run: StoredRun, crew: StoredCrew, at_ns: int) -> str | None:
        """Notify a run's owner, or return the reason for which the run must stop now."""
        leave = leaves(node.rules, node=node.name, owner=run.owner, at_ns=at_ns)
        if leave is None:
            return None
        if leave.at_ns is None:
            return leave.because
        told_ns = crew.leave_ns
        # The owner has received no notice, or only a notice for an earlier end of sharing.
        if told_ns is None or told_ns < leave.at_ns > at_ns:
            leave_ns = max(leave.at_ns, at_ns + round(WARNING_S * 1e9))
            self._database.write(lambda connection: crews.note(connection, crew.id, leave_ns=leave_ns))
            _log.info("run %s must leave %s at %s", run.id, node.name, format_soon(leave_ns, at_ns))
            self._hub.touch(run_key(run.id))
            return None
        return leave.because if max(told_ns, leave.at_ns) <= at_ns else None


def _concerned(connection: sa.Connection, at_ns: int) -> list[tuple[RuledNode, StoredRun]]:
    return [
        (node, run)
        for node in nodes.ruled(connection)
        if may_concern(node.rules, at_ns)
        for run in runs.on_node(connection, node.id)
    ]


def _ask_together(connection: sa.Connection, *, due: Sequence[_Due], at_ns: int) -> list[TransitionResult]:
    """Stop runs that must leave their nodes, unless the node rules have changed since the check."""
    asked = [_ask(connection, one, at_ns) for one in due]
    return [told for told in asked if told is not None]


def _ask(connection: sa.Connection, due: _Due, at_ns: int) -> TransitionResult | None:
    node, run, because = due
    there, now = nodes.get(connection, node.id), runs.find(connection, run.id)
    if there is None or there.rules != node.rules or now is None or (now.fence, now.stop) != (run.fence, None):
        return None
    try:
        return transitions.ask_to_stop(
            connection, run.id, who=audit.SERVER, why=StopReason.DRAIN, at_ns=at_ns, because=because
        )
    except (AlreadyFinished, StaleAttempt):
        return None
