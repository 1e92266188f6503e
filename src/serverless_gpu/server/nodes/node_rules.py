"""What follows from what people decided about a node (`wire.nodes.NodeRules`): who may be placed there, who has to go.

    drained        nothing new is placed there; with `stop`, what runs there leaves at once
    calendar       others than the owner are placed there while it is shared; when it ceases to be, they leave
    quarantined    the node gets its orders without those devices (`StoredNode.unavailable`)

Values only; `node_admin.py` changes rules, `evacuation.py` has runs leave.

Failure cases: a zone that this machine does not know any more, or a window of another version, makes a calendar that
cannot be read. Then nothing is placed on the node, and it says so; what runs there stays.
"""

from __future__ import annotations

from functools import lru_cache
from zoneinfo import ZoneInfo

import msgspec

from serverless_gpu.ambient import format_clock
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model import sharing_calendar
from serverless_gpu.model.scheduling import wait_messages
from serverless_gpu.wire.nodes import NodeCalendar, NodeDrain, NodeRules

WARNING_S = 300.0
"""A run that has to leave because its node ceases to be shared is told so long before."""
_SHOWN = 40  # characters of a uuid
_MINUTE_NS = 60_000_000_000


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """Whether others than its owner may use a node.

    Attributes:
        shared: now.
        turns_ns: when it is the other way round, nanoseconds since 1970; None for never.
        problem: why the calendar cannot be read, in words that follow the node's name, or "".
    """

    shared: bool = True
    turns_ns: int | None = None
    problem: str = ""


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """That a run has to leave its node.

    Attributes:
        at_ns: when, nanoseconds since 1970; None for at once and without a warning.
        because: in words.
    """

    at_ns: int | None
    because: str


_ALWAYS = Sharing()


def sharing(rules: NodeRules, at_ns: int) -> Sharing:
    """Return whether others than its owner may use a node at a time, nanoseconds since 1970."""
    return _sharing(rules.calendar, at_ns // _MINUTE_NS) if rules.calendar.shared else _ALWAYS


def leaves(rules: NodeRules, *, node: str, owner: str, at_ns: int) -> Leave | None:
    """Return whether a run has to leave its node, or will in a moment.

    Args:
        rules: of the node.
        node: its name.
        owner: of the run.
        at_ns: now, nanoseconds since 1970.
    """
    if rules.drain is not None and rules.drain.stop:
        return Leave(at_ns=None, because=f"{rules.drain.by} drains {node}{_noted(rules.drain)}")
    if not may_concern(rules, at_ns) or owner == rules.calendar.owner:
        return None
    found = sharing(rules, at_ns)
    turns_ns = found.turns_ns if found.shared and found.turns_ns is not None else at_ns
    return Leave(at_ns=turns_ns, because=f"{node} is {_whose(rules.calendar)}")


def may_concern(rules: NodeRules, at_ns: int) -> bool:
    """Return whether anybody may have to leave a node, now or in a moment."""
    if rules.drain is not None and rules.drain.stop:
        return True
    found = sharing(rules, at_ns)
    if found.problem:
        return False
    return not found.shared or (found.turns_ns is not None and found.turns_ns - at_ns <= WARNING_S * 1e9)


def drained(rules: NodeRules) -> str:
    """Return who drains a node, since when and why, or ""."""
    drain = rules.drain
    return "" if drain is None else f"{drain.by} drains it since {format_clock(drain.since_ns)}{_noted(drain)}"


def left_out(rules: NodeRules) -> str:
    """Return which devices people have left out of a node, and why; a few of them, and "" for none."""
    named = [f"{one.uuid[:_SHOWN]}{f' ({one.note})' if one.note else ''}" for one in rules.quarantined]
    return f"{by} left out: {', '.join(wait_messages.some(named))}" if (by := _by(rules)) else ""


def _by(rules: NodeRules) -> str:
    return ", ".join(sorted({one.by for one in rules.quarantined}))


def check_calendar(asked: NodeCalendar) -> None:
    """Return if a calendar can be read.

    Raises:
        InvalidValue: a window is none, or nobody knows the zone.
    """
    if asked.owner_first and not asked.owner:
        raise InvalidValue("nobody can be first on a node that is nobody's", hint="name its owner, too")
    sharing_calendar.parse(asked.shared, _zone(asked.zone))


@lru_cache(maxsize=4096)
def _sharing(asked: NodeCalendar, minute: int) -> Sharing:
    """Return what holds for a whole minute: windows begin and end with one, and clocks are moved with one."""
    try:
        windows = sharing_calendar.parse(asked.shared, _zone(asked.zone))
    except InvalidValue as error:
        return Sharing(shared=False, problem=f"has a calendar that cannot be read: {error.message}")
    at_ns = minute * _MINUTE_NS
    return Sharing(
        shared=sharing_calendar.is_shared(windows, at_ns), turns_ns=sharing_calendar.turns_at(windows, at_ns)
    )


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name or "UTC")
    except (ValueError, KeyError, OSError):  # no such name; one that leaves the directory; a directory
        raise InvalidValue(
            f"the server knows no time zone {name[:64]!r}", hint='write it as in "Europe/Berlin"; UTC without one'
        ) from None


def _whose(asked: NodeCalendar) -> str:
    return f"{asked.owner}'s" if asked.owner else "not shared"


def _noted(drain: NodeDrain) -> str:
    return f" ({drain.note})" if drain.note else ""
