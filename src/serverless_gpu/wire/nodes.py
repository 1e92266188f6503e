"""Rules of people for a node, beside its own report: drained, owner and calendar, GPUs left out.

    PUT /nodes/{node}/drain       NodeDrainRequest  → NodeView
    PUT /nodes/{node}/calendar    CalendarRequest   → NodeView
    PUT /nodes/{node}/quarantine  QuarantineRequest → NodeView

It is the server's and outlives it, the node's agent and the machine; `sgpu nodes` shows it. Operators may, and whoever
a node's calendar names as its owner.
"""

from __future__ import annotations

from serverless_gpu.wire.base import Answer, Request


class NodeDrainRequest(Request, frozen=True, kw_only=True):
    """Whether a node is given nothing new, and why.

    Attributes:
        stop: whether what runs there is stopped in order, too: it goes on elsewhere if it can.
    """

    on: bool
    stop: bool = False
    note: str = ""


class CalendarRequest(Request, frozen=True, kw_only=True):
    """Whose a node is, and when others may use it; it takes the place of what was said before.

    Attributes:
        owner: who may always use it, or "" for nobody in particular.
        owner_first: whether runs of others leave for the owner's also while the node is shared.
        shared: times at which others may use it, as ``"mon-fri 19:00-07:00"``; none for always.
        zone: whose time that is, as ``"Europe/Berlin"``; "" for UTC.
    """

    owner: str = ""
    owner_first: bool = False
    shared: tuple[str, ...] = ()
    zone: str = ""


class QuarantineRequest(Request, frozen=True, kw_only=True):
    """Whether a device of a node is left out until somebody takes that back, and why.

    Attributes:
        uuid: of the device.
    """

    uuid: str
    on: bool
    note: str = ""


class NodeDrain(Answer, frozen=True, kw_only=True):
    """Who drains a node, since when (nanoseconds since 1970) and why; `stop`: what runs there is stopped, too."""

    by: str
    since_ns: int
    note: str = ""
    stop: bool = False


class NodeCalendar(Answer, frozen=True, kw_only=True):
    """Whose a node is, and when others may use it; as in `CalendarRequest`."""

    owner: str = ""
    owner_first: bool = False
    shared: tuple[str, ...] = ()
    zone: str = ""


class LeftOut(Answer, frozen=True, kw_only=True):
    """A device that is not given to runs of the server; who said so, when (nanoseconds since 1970) and why."""

    uuid: str
    by: str
    since_ns: int
    note: str = ""


class NodeRules(Answer, frozen=True, kw_only=True):
    """Everything that people decided about a node.

    Attributes:
        drain: None while it is not drained.
        quarantined: devices that are left out, beside those that the node itself has in quarantine.
    """

    drain: NodeDrain | None = None
    calendar: NodeCalendar = NodeCalendar()
    quarantined: tuple[LeftOut, ...] = ()
