"""Nodes and pools as people see and rule them; and how a machine joins.

    GET    /nodes                                      → NodeList
    POST   /nodes/{node}/forget      ForgetRequest     → NodeView         its attempts are given up at once
    PUT    /nodes/{node}/drain       NodeDrainRequest  → NodeView
    PUT    /nodes/{node}/calendar    CalendarRequest   → NodeView
    PUT    /nodes/{node}/quarantine  QuarantineRequest → NodeView
    GET    /pools                                      → PoolList
    PUT    /pools/{name}             PoolRequest       → PoolView

    POST   /agents/join              JoinRequest       → JoinAnswer       (a join token)
    GET    /agents/ray                                 → RayPool          (a node's own token: it has joined before)
    POST   /nodes/invite             InviteRequest     → InviteAnswer     (administrators)
    POST   /nodes/approve            ApproveRequest    → NodeView         (administrators)

Rules are the server's: they outlive it, the node's agent and the machine; `sgpu nodes` shows them. Operators may change
them, and the owner that a node's calendar names.

A join token (scope "joining") is good for this and nothing else, for as many homes as it was made for, and for a short
time. The token that the answer has is an agent's, made for one name and one home, and is revoked alone. A home that
asks again with the same join token, since the answer was lost, gets another agent's token and costs no further use. The
token of Ray goes along: it is not in the join file.
"""

from __future__ import annotations

from serverless_gpu.model.hardware import Device
from serverless_gpu.wire.agents import ClockReading
from serverless_gpu.wire.base import Answer, Request

INVITED_S = 86_400.0
"""How long a join token is good by default."""


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


class NodeView(Answer, frozen=True, kw_only=True):
    """A node as people see it.

    Attributes:
        state: UP, or DRAINING or DEGRADED (`sentence`: why nothing is placed there), or SILENT with `sentence` since
            when, or GONE; or PENDING while an administrator has to approve it: then `id` is that of its token.
        busy: devices that runs of the server have now.
        clock: how far its clock is from the server's, as it said last; None where it has not.
        rules: what people decided about it.
        shared: whether its calendar lets others than its owner use it now.
        turns_ns: when that is the other way round, nanoseconds since 1970; None for never.
        findings: what else a person should know of its devices, a sentence each.
    """

    id: str
    name: str
    state: str
    sentence: str
    pool: str
    devices: tuple[Device, ...]
    unavailable: tuple[str, ...]
    busy: int
    runs: tuple[str, ...]
    version: str
    seen_ns: int
    clock: ClockReading | None = None
    rules: NodeRules = NodeRules()
    shared: bool = True
    turns_ns: int | None = None
    findings: tuple[str, ...] = ()


class NodeList(Answer, frozen=True, kw_only=True):
    """All nodes."""

    nodes: tuple[NodeView, ...]


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


class ForgetRequest(Request, frozen=True, kw_only=True):
    """`POST /nodes/{node}/forget`: an operator knows that the machine is dead; its attempts are given up at once."""

    i_know_it_is_dead: bool


class PoolView(Answer, frozen=True, kw_only=True):
    """Nodes under one policy; `free` and `total` devices by type.

    Attributes:
        lends: whether it is reserved and lends idle devices to runs of `BEST_EFFORT` that name no pool.
        return_s: seconds within which they are back.
        isolation: "none" where an administrator accepts that runs of several principals share a uid, else "unset".
    """

    name: str
    kind: str
    nodes: tuple[str, ...]
    total: dict[str, int]
    free: dict[str, int]
    queued: int
    lends: bool = False
    return_s: float = 300.0
    isolation: str = "unset"


class PoolList(Answer, frozen=True, kw_only=True):
    """All pools."""

    pools: tuple[PoolView, ...]


class PoolRequest(Request, frozen=True, kw_only=True):
    """`PUT /pools/{name}`: make or change a pool; None leaves a thing as it is, or is what is usual in a new one.

    Attributes:
        kind: "on-demand" or "reserved".
        nodes: are moved into it.
        lends: as in `PoolView`.
        return_s: likewise.
        isolation: "none" or "unset", as in `PoolView`.
    """

    kind: str | None = None
    lends: bool | None = None
    return_s: float | None = None
    isolation: str | None = None
    nodes: tuple[str, ...] = ()


class JoinRequest(Request, frozen=True, kw_only=True):
    """A machine that wants to join.

    Attributes:
        name: what people call it.
        machine: `ambient.machine()`.
        instance: of its home.
        ray: whether it is to join the Ray cluster of the server.
    """

    name: str
    machine: str
    instance: str
    ray: bool = True


class RayPool(Answer, frozen=True, kw_only=True):
    """The Ray cluster of a server.

    Attributes:
        address: of its head.
        port: the first of the ports on the server's machine.
        token: of the cluster.
        version: of Ray; every machine needs the same.
        python: its interpreter; every machine needs the same minor version.
        problem: why its head does not answer the server either, or "": it may be on its way.
    """

    address: str
    port: int
    token: str
    version: str
    python: str
    problem: str = ""


class JoinAnswer(Answer, frozen=True, kw_only=True):
    """What is its own.

    Attributes:
        token: an agent's, for this machine.
        ray: how it joins the cluster; None where it did not ask.
    """

    token: str
    ray: RayPool | None


class InviteRequest(Request, frozen=True, kw_only=True):
    """Make a join token.

    Attributes:
        name: the only name it lets in, or "" for any.
        uses: how many machines it lets in.
        expires_s: how long, in seconds.
    """

    name: str = ""
    uses: int = 1
    expires_s: float = INVITED_S


class InviteAnswer(Answer, frozen=True, kw_only=True):
    """A join token; its secret is said this once.

    Attributes:
        id: of the token, with which it is revoked.
        token: the secret.
        expires_ns: nanoseconds since 1970.
    """

    id: str
    token: str
    uses: int
    expires_ns: int


class ApproveRequest(Request, frozen=True, kw_only=True):
    """Let in a node that waits.

    Attributes:
        name: of the node, or the identifier of its token where several have the name.
    """

    name: str
