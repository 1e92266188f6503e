"""Rules of people for a node, beside its own report: drained, owner and calendar, GPUs left out.

    PUT /nodes/{node}/drain       NodeDrainRequest  → NodeView
    PUT /nodes/{node}/calendar    CalendarRequest   → NodeView
    PUT /nodes/{node}/quarantine  QuarantineRequest → NodeView

It is the server's and outlives it, the node's agent and the machine; `sgpu nodes` shows it. Operators may, and whoever
a node's calendar names as its owner.

Joining: a machine shows a join token, and gets a node token of its own.

    POST   /agents/join    JoinRequest    → JoinAnswer       (a join token)
    GET    /agents/ray                    → RayPool          (a node's own token: it has joined before)
    POST   /nodes/invite   InviteRequest  → InviteAnswer     (administrators)
    POST   /nodes/approve  ApproveRequest → NodeView         (administrators)

A join token (scope "joining") is good for this and nothing else, for as many homes as it was made for, and for a short
time. The token that the answer has is an agent's, made for one name and one home, and is revoked alone. A home that
asks again with the same join token, since the answer was lost, gets another agent's token and costs no further use. The
token of Ray goes along: it is not in the join file.
"""

from __future__ import annotations

from serverless_gpu.wire.base import Answer, Request


class NodeDrainRequest(Request, frozen=True, kw_only=True):
    """Whether a node is given nothing new, and why."""

    on: bool
    stop: bool = False  # whether what runs there is stopped in order, too: it goes on elsewhere if it can
    note: str = ""


class CalendarRequest(Request, frozen=True, kw_only=True):
    """Whose a node is, and when others may use it; it takes the place of what was said before."""

    owner: str = ""  # who may always use it, or "" for nobody in particular
    owner_first: bool = False  # whether runs of others leave for the owner's also while the node is shared
    shared: tuple[str, ...] = ()  # times at which others may use it, as ``"mon-fri 19:00-07:00"``; none for always
    zone: str = ""  # whose time that is, as ``"Europe/Berlin"``; "" for UTC


class QuarantineRequest(Request, frozen=True, kw_only=True):
    """Whether a device of a node is left out until somebody takes that back, and why."""

    uuid: str  # of the device
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
    """Everything that people decided about a node."""

    drain: NodeDrain | None = None  # None while it is not drained
    calendar: NodeCalendar = NodeCalendar()
    # devices that are left out, beside those that the node itself has in quarantine
    quarantined: tuple[LeftOut, ...] = ()


INVITED_S = 86_400.0
"""How long a join token is good where nothing else is said."""


class JoinRequest(Request, frozen=True, kw_only=True):
    """A machine that wants to join."""

    name: str  # what people call it
    machine: str  # `ambient.machine()`
    instance: str  # of its home
    ray: bool = True  # whether it is to join the Ray cluster of the server


class RayPool(Answer, frozen=True, kw_only=True):
    """The Ray cluster of a server."""

    address: str  # of its head
    port: int  # the first of the ports on the server's machine
    token: str  # of the cluster
    version: str  # of Ray; every machine needs the same
    python: str  # its interpreter; every machine needs the same minor version
    problem: str = ""  # why its head does not answer the server either, or "": it may be on its way


class JoinAnswer(Answer, frozen=True, kw_only=True):
    """What is its own."""

    token: str  # an agent's, for this machine
    ray: RayPool | None  # how it joins the cluster; None where it did not ask


class InviteRequest(Request, frozen=True, kw_only=True):
    """Make a join token."""

    name: str = ""  # the only name it lets in, or "" for any
    uses: int = 1  # how many machines it lets in
    expires_s: float = INVITED_S  # how long, in seconds


class InviteAnswer(Answer, frozen=True, kw_only=True):
    """A join token; its secret is said this once."""

    id: str  # of the token, with which it is revoked
    token: str  # the secret
    uses: int
    expires_ns: int  # nanoseconds since 1970


class ApproveRequest(Request, frozen=True, kw_only=True):
    """Let in a node that waits."""

    name: str  # of the node, or the identifier of its token where several have the name
