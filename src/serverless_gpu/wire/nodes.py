"""Defines bodies for nodes, pools, node rules, and joining machines.

    GET    /nodes                                      → NodeList
    GET    /nodes/{node}                               → NodeView
    GET    /nodes/{node}/history                       → DeviceHistoryList
    GET    /devices?node                               → DeviceList
    POST   /nodes/{node}/forget      ForgetRequest     → NodeView         gives up the node's attempts at once
    PUT    /nodes/{node}/drain       NodeDrainRequest  → NodeView
    PUT    /nodes/{node}/calendar    CalendarRequest   → NodeView
    PUT    /nodes/{node}/quarantine  QuarantineRequest → NodeView
    GET    /pools                                      → PoolList
    PUT    /pools/{name}             PoolRequest       → PoolView

    POST   /agents/join              JoinRequest       → JoinAnswer       (a join token)
    GET    /agents/ray                                 → RayPool          (the token of a node that has joined)
    POST   /nodes/invite             InviteRequest     → InviteAnswer     (administrators)
    POST   /nodes/approve            ApproveRequest    → NodeView         (administrators)
    POST   /nodes/{node}/rotate                        → NodeView         (administrators) requests another key
    POST   /nodes/{node}/revoke                        → NodeView         (administrators) ends the node's access

The server stores each node's rules in its database, so that restarts do not change the rules. `sgpu node list` shows
the rules of each node. Operators and the node's owner may change a node's rules.

A join token (scope "joining") permits a limited number of home directories to join for a limited time. The answer to a
join request contains an agent token for one node name and one home directory. An operator can revoke each agent token
separately. If an answer is lost, the machine repeats the join request and receives a new agent token. The server does
not count the repeated request as another use of the join token. The answer to a join request also contains the Ray
token, which is absent from the join file.
"""

from __future__ import annotations

from serverless_gpu.model.egress import OPEN
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.isolation import NONE
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.node_keys import NodeKeys
from serverless_gpu.model.telemetry import GpuSample
from serverless_gpu.wire.agents import ClockReading
from serverless_gpu.wire.base import Answer, Request

INVITED_S = 86_400.0
"""Default lifetime of a join token in seconds."""


class NodeDrain(Answer, frozen=True, kw_only=True):
    """The drain of a node: principal, start time (nanoseconds since 1970) and reason.

    With `stop`, the server also stops the runs on the node.
    """

    by: str
    since_ns: int
    note: str = ""
    stop: bool = False


class NodeCalendar(Answer, frozen=True, kw_only=True):
    """The owner of a node, and the times at which other users may use the node."""

    owner: str = ""
    owner_first: bool = False
    shared: tuple[str, ...] = ()
    zone: str = ""


class LeftOut(Answer, frozen=True, kw_only=True):
    """A device that an operator has excluded from runs, with the time and reason."""

    uuid: str
    by: str
    since_ns: int
    note: str = ""


class NodeRules(Answer, frozen=True, kw_only=True):
    """All rules that operators and the owner have set for one node.

    Attributes:
        drain: the drain request, or None.
        quarantined: devices that an operator excluded, in addition to the node's own quarantine.
    """

    drain: NodeDrain | None = None
    calendar: NodeCalendar = NodeCalendar()
    quarantined: tuple[LeftOut, ...] = ()


class NodeView(Answer, frozen=True, kw_only=True):
    """The API view of a node.

    Attributes:
        state: UP, DRAINING, DEGRADED, SILENT, GONE, REVOKED or PENDING. `sentence` gives the reason for DRAINING and
            DEGRADED, and the start of the silence for SILENT. PENDING means that an administrator must approve the
            node, and `id` is then the identifier of its token.
        busy: number of devices that runs of the server currently use.
        clock: last reported difference between the clocks of the node and the server, or None.
        rules: rules that operators and the owner have set.
        shared: True if the calendar currently lets users other than the owner use the node.
        turns_ns: time of the next change of `shared`, in nanoseconds since 1970, or None for never.
        findings: further remarks about the devices for operators, one sentence each.
        isolation: strongest isolation level that the node offers, as the node measured it.
        isolation_problem: reason why the node offers no stronger level, and the means of the level without root, or "".
        egress_problem: reason why the node cannot enforce a network policy, or "".
        key: fingerprint of the node's public keys, or "" for a node without a key.
        enrolled_ns: time when the server bound the key, in nanoseconds since 1970, or None.
        rotating: True if an administrator has requested another key, and the node has not replaced its key yet.
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
    isolation: str = NONE
    isolation_problem: str = ""
    egress_problem: str = ""
    key: str = ""
    enrolled_ns: int | None = None
    rotating: bool = False


class NodeList(Answer, frozen=True, kw_only=True):
    """The list of all nodes."""

    nodes: tuple[NodeView, ...]


class HolderRun(Answer, frozen=True, kw_only=True):
    """The run that holds a device.

    Attributes:
        run: identifier of the run, or "" if the caller may not see the run.
        name: name of the run, or "" if the caller may not see the run.
        state: state of the attempt on the device's node.
        since_ns: time of the placement, nanoseconds since 1970.
    """

    run: str
    name: str
    owner: str
    team: str
    state: State
    since_ns: int


class DeviceView(Answer, frozen=True, kw_only=True):
    """One device of a node, with its holder and its latest measured values.

    Attributes:
        node: name of the node. `node_id` is its identifier.
        state: free, held, quarantined, outside (in use by programs outside this server, or left out), or away.
        note: reason of a quarantine, or "".
        holder: the run that holds the device; None for a free device, and before the node has named its devices.
        sample: latest measured values, at most 30 s old, or None.
    """

    uuid: str
    index: int
    type: str
    product: str
    kind: DeviceKind
    memory_bytes: int
    node: str
    node_id: str
    pool: str
    state: str
    note: str = ""
    holder: HolderRun | None = None
    sample: GpuSample | None = None


class DeviceList(Answer, frozen=True, kw_only=True):
    """The devices of one node or of all nodes."""

    devices: tuple[DeviceView, ...]


class DeviceHistoryView(Answer, frozen=True, kw_only=True):
    """The highest measured values of one device in buckets of 30 seconds, over at most two hours.

    Attributes:
        at_s: start of each bucket, in seconds since 1970.
        series: values of each series of `model.device_history`, with None for an unknown value.
    """

    uuid: str
    at_s: tuple[int, ...]
    series: dict[str, tuple[float | None, ...]]


class DeviceHistoryList(Answer, frozen=True, kw_only=True):
    """The histories of a node's devices since the start of the server."""

    devices: tuple[DeviceHistoryView, ...]


class NodeDrainRequest(Request, frozen=True, kw_only=True):
    """Start or end the drain of a node for a given reason.

    Attributes:
        stop: True if the server should also stop the runs on the node gracefully. If possible, the runs continue on
            other nodes.
    """

    on: bool
    stop: bool = False
    note: str = ""


class CalendarRequest(Request, frozen=True, kw_only=True):
    """Replace the calendar of a node, with its owner and the times for other users.

    Attributes:
        owner: principal who may always use the node, or "" for none.
        owner_first: True if the owner's runs preempt runs of other users even while the node is shared.
        shared: times at which other users may use the node, such as ``"mon-fri 19:00-07:00"``. Empty means always.
        zone: time zone of `shared`, such as ``"Europe/Berlin"``. "" means UTC.
    """

    owner: str = ""
    owner_first: bool = False
    shared: tuple[str, ...] = ()
    zone: str = ""


class QuarantineRequest(Request, frozen=True, kw_only=True):
    """Exclude a device of a node from runs, or include the device again, with a reason.

    Attributes:
        uuid: UUID of the device.
    """

    uuid: str
    on: bool
    note: str = ""


class ForgetRequest(Request, frozen=True, kw_only=True):
    """Confirm that a node's machine is permanently off, so that the server can end the node's attempts."""

    i_know_it_is_dead: bool


class PoolView(Answer, frozen=True, kw_only=True):
    """A pool of nodes with one policy. The fields `free` and `total` contain numbers of devices by type.

    Attributes:
        lends: True if the pool is reserved and lends idle devices to `BEST_EFFORT` runs that name no pool.
        return_s: maximum seconds until borrowing runs release lent devices.
        isolation: isolation level of the pool's runs, and the minimum for its nodes. "none": an administrator accepts
            that runs of several principals share a uid. "unset": the pool serves only the first administrator.
        egress: network policy of the pool's runs: "open", "pool" or "none", as in `model.egress`.
        allow: destinations that the policy opens, such as "pypi.org:443" or "10.1.0.0/16".
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
    egress: str = OPEN
    allow: tuple[str, ...] = ()


class PoolList(Answer, frozen=True, kw_only=True):
    """The list of all pools."""

    pools: tuple[PoolView, ...]


class PoolRequest(Request, frozen=True, kw_only=True):
    """`PUT /pools/{name}`: create or change a pool.

    A field with None keeps its value. In a new pool, the field gets its default.

    Attributes:
        kind: "on-demand" or "reserved".
        nodes: nodes to move into the pool.
        lends: True if a reserved pool lends idle devices, as in `PoolView`.
        return_s: maximum seconds until borrowing runs release lent devices, as in `PoolView`.
        isolation: a level of `model.isolation` or "unset", as in `PoolView`.
        egress: network policy, as in `PoolView`.
        allow: the complete list of destinations, as in `PoolView`.
    """

    kind: str | None = None
    lends: bool | None = None
    return_s: float | None = None
    isolation: str | None = None
    egress: str | None = None
    allow: tuple[str, ...] | None = None
    nodes: tuple[str, ...] = ()


class JoinRequest(Request, frozen=True, kw_only=True):
    """The request of a machine to join the server.

    Attributes:
        name: display name of the node.
        machine: `ambient.machine()`.
        instance: identifier of the machine's home directory.
        ray: True if the machine also joins the server's Ray cluster.
        keys: public keys of the node, or None from an earlier version. The server binds the keys to the new token. The
            first session proves that the node has the private keys.
    """

    name: str
    machine: str
    instance: str
    ray: bool = True
    keys: NodeKeys | None = None


class RayPool(Answer, frozen=True, kw_only=True):
    """Address and credentials of a server's Ray cluster.

    Attributes:
        address: address of the cluster's head.
        port: first port of Ray's port range on the server's machine.
        token: token of the cluster.
        version: Ray version. Every machine of the cluster needs the same Ray version.
        python: Python version of the cluster. Every machine needs the same minor version of Python.
        problem: reason why the cluster's head does not answer the server, or "". The head may still be starting.
    """

    address: str
    port: int
    token: str
    version: str
    python: str
    problem: str = ""


class JoinAnswer(Answer, frozen=True, kw_only=True):
    """The credentials of a newly joined machine.

    Attributes:
        token: agent's token for this machine.
        ray: data for joining the Ray cluster, or None if the machine did not request the data.
        waits: message that an administrator must approve the machine, because another node has its name. "" for an
            admitted machine. A waiting machine does not get `ray`.
    """

    token: str
    ray: RayPool | None
    waits: str = ""


class InviteRequest(Request, frozen=True, kw_only=True):
    """Create a join token.

    Attributes:
        name: the only permitted node name, or "" for any name.
        uses: number of machines that may join.
        expires_s: lifetime of the join token in seconds.
    """

    name: str = ""
    uses: int = 1
    expires_s: float = INVITED_S


class InviteAnswer(Answer, frozen=True, kw_only=True):
    """A new join token. The server returns a token's secret only once.

    Attributes:
        id: identifier of the token, for its revocation.
        token: the secret of the join token.
        expires_ns: expiry time in nanoseconds since 1970.
    """

    id: str
    token: str
    uses: int
    expires_ns: int


class ApproveRequest(Request, frozen=True, kw_only=True):
    """Approve a node whose state is PENDING.

    Attributes:
        name: name of the node. If several nodes have the same name, the identifier of the node's token.
    """

    name: str
