"""Defines bodies between agents and the server for joining, orders, and reports about attempts.

The agent opens all connections between a node and the server. A node accepts connections only during the rendezvous of
a gang on several nodes (`node/supervisor/rendezvous.py`).

    POST /agents/challenge                  → SessionChallenge           (the node's own token)
    POST /agents/session                    SessionRequest → SessionAnswer
    POST /agents/key                        KeyRequest → SessionAnswer   (the token of a session, as for all others)
    POST /agents                            AgentHello → AgentWelcome    (scope `agent`; again after a reconnect)
    POST /agents/{node}/heartbeat           Heartbeat  → HeartbeatAnswer
    GET  /agents/{node}/orders?instance&process  → stream of `StreamedOrder`, unacknowledged orders first
    POST /agents/{node}/orders/ack          OrdersTaken
    POST /agents/{node}/canary              CanaryResult
    /agents/{node}/tunnels/{tunnel}/…       as for users (`tunnels.py`)
    POST /attempts/{run}/{fence}/report     Report → ReportAnswer; also the heartbeat, every `heartbeat_s`
    GET  /attempts/{run}/{fence}/blobs/{digest}      → a part of the payload
    PUT  /blobs/{digest}, POST /blobs/missing        as for users (`blobs.py`)

An agent's token is valid for one node, with one name and one home directory. A join creates a token for its node
(`wire/nodes.py`). If a token belongs to another node, the server refuses the hello message (NotAllowed) until an
administrator approves the node.

A node has an own key pair (`model/node_keys.py`). To open a session, the node signs a challenge of the server. The
session's token expires after `lifetime_s` seconds. The first hello message of a session binds the key to the node's own
token. From then on, the node's own token opens sessions of this key only, and no other request is valid with it. The
server refuses each second use of a challenge. A node of an earlier version has no key and uses its own token for all
requests.

If a heartbeat's answer contains `rotate`, the node makes another key pair and signs the new keys with both keys. After
the request, sessions of the old key are invalid.

The server seals secrets and the caller's context to the key of an order's node (`Start.sealed`).

The server may repeat an order until the node acknowledges the order. The node executes a repeated order only once. The
node acknowledges `Start` after it has durably recorded the start in the attempt directory.

The node sends each report with the token of the attempt. In an attempt on several nodes, each node reports about its
own ranks. The server applies a report completely or not at all. The server identifies log pieces by their offset, and
facts and files by their name. A repeated report therefore never restores an earlier state of the attempt. An answer
with `stale` states that the attempt has ended. After an answer with `stale`, the node must stop the attempt's processes
and send no more reports.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from serverless_gpu.model.billing.pricing import Tariff
from serverless_gpu.model.canary import CanaryReport
from serverless_gpu.model.egress import EgressPolicy
from serverless_gpu.model.hangs.gang_hang_detection import CrewObservation, InspectionRequest, Judgement, Silence
from serverless_gpu.model.hangs.idleness import IdleVerdict
from serverless_gpu.model.hardware import Device, GpuType
from serverless_gpu.model.isolation import NONE, Level
from serverless_gpu.model.lifecycle.attempt import Fact, Reason, State, StopReason
from serverless_gpu.model.lifecycle.gang_lifecycle import Halt
from serverless_gpu.model.lifecycle.rendezvous import Chosen, CrewReach, Offer
from serverless_gpu.model.node_keys import NodeKeys, Signature
from serverless_gpu.model.placement import CrewPlace
from serverless_gpu.model.spec import BlobReference, RunSpec
from serverless_gpu.model.telemetry import GpuSample
from serverless_gpu.units import format_duration_ms
from serverless_gpu.wire.access import SecretValue
from serverless_gpu.wire.base import Answer, Json, Request

CLOCK_OFF_S = 0.5
"""Minimum clock difference in seconds that the server reports."""


class SessionChallenge(Answer, frozen=True, kw_only=True):
    """A random text that a node must sign within a minute to open a session."""

    challenge: str


class SessionRequest(Request, frozen=True, kw_only=True):
    """A node's proof that it has the private keys.

    Attributes:
        challenge: the text of the last `SessionChallenge`.
        keys: the node's public keys.
        signature: signature of `node_keys.session_text` by `keys.signing`.
    """

    challenge: Annotated[str, msgspec.Meta(max_length=64)]
    keys: NodeKeys
    signature: Signature


class SessionAnswer(Answer, frozen=True, kw_only=True):
    """The token of a session, with its lifetime in seconds."""

    token: str
    lifetime_s: float


class KeyRequest(Request, frozen=True, kw_only=True):
    """A node's replacement of its keys.

    Attributes:
        keys: the node's new public keys.
        old: signature of `node_keys.rotation_text` by the node's old key.
        new: signature of the same text by the new key.
    """

    keys: NodeKeys
    old: Signature
    new: Signature


class AttemptSeen(Request, frozen=True, kw_only=True):
    """A running attempt on a node, or an ended attempt whose results the server has not accepted yet."""

    run_id: str
    fence: int
    state: State


class AgentHello(Request, frozen=True, kw_only=True):
    """The first message from a node to the server, with a description of the node.

    Attributes:
        name: display name, by default the host name.
        machine: `ambient.machine()`.
        instance: random identifier of the node's home directory. Two home directories on one machine are two nodes.
        pythons: Python versions, such as ``"3.11"``, for which the node can restore a captured environment. Empty if
            unknown.
        boot_id: boot identifier from the kernel. A new value proves that no process of the previous boot is running.
        draining: reason why the node accepts no new attempts while its runs continue, or "".
        degraded: reason why the state of the devices is unknown, or "". The server places no attempt on a degraded
            node.
        findings: further remarks about the devices for operators, one sentence each.
        problem: reason why the node cannot run attempts now, or "".
        takes: optional features that the node supports: "renewal" of attempts' tokens, "secrets", "without" (excluded
            devices), "max_run" in a spec, "crews" (gangs on several nodes), "canary", "egress" (network policies), and
            "tunnels".
        protocol: protocol version from `wire.base`. The server refuses an unsupported version with an error that names
            the version.
        isolation: strongest isolation level that the node offers (`model.isolation`), as the node measured it.
        isolation_problem: reason why the node offers no stronger level, and the means of the level without root, or "".
        addresses: addresses of the node's network interfaces, which the server closes for ranks of other gangs.
        egress_problem: reason why the node cannot enforce a network policy, or "".
        process: random identifier of the uplink process. If a home has two uplink processes, the server admits only
            one.
        keys: public keys of the session in which the node sends the message. None from a node of an earlier version.
        host: hash of the operating system's machine identifier, or "". Unlike `machine`, the value does not depend on
            the file system or the user.
    """

    name: str
    machine: str
    boot_id: str
    version: str
    protocol: int
    python: str
    platform: str
    pythons: tuple[str, ...] = ()
    instance: str = ""
    pool: str = ""
    devices: tuple[Device, ...]
    own_types: tuple[GpuType, ...] = ()
    unavailable: tuple[str, ...] = ()
    attempts: tuple[AttemptSeen, ...] = ()
    draining: str = ""
    problem: str = ""
    takes: tuple[str, ...] = ()
    degraded: str = ""
    findings: tuple[str, ...] = ()
    process: str = ""
    isolation: str = NONE
    isolation_problem: str = ""
    addresses: tuple[str, ...] = ()
    egress_problem: str = ""
    keys: NodeKeys | None = None
    host: str = ""


class AgentWelcome(Answer, frozen=True, kw_only=True):
    """The server's answer to a hello message, with the node's identifier and heartbeat interval.

    Attributes:
        stale: gangs (`run:fence`) from the hello that the server considers ended. The node must stop these gangs and
            delete their records.
        at_ns: the server's time of the answer, in nanoseconds since 1970. A server with protocol 1 sends 0.
    """

    node: str
    heartbeat_s: float
    partition_grace_s: float
    stale: tuple[str, ...] = ()
    at_ns: int = 0


class ClockReading(Request, frozen=True, kw_only=True):
    """The clock difference between a node and its server, according to the node's measurement.

    Attributes:
        ahead_ns: wall clock of the node minus wall clock of the server, in nanoseconds.
        error_ns: maximum error of the measurement: half of the round-trip time.
    """

    ahead_ns: Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
    error_ns: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


def is_off(clock: ClockReading | None) -> bool:
    """Return True if a node's clock error exceeds `CLOCK_OFF_S` plus the measurement error."""
    return clock is not None and abs(clock.ahead_ns) - clock.error_ns > CLOCK_OFF_S * 1e9


def clock_text(clock: ClockReading | None) -> str:
    """Return a remark about a wrong clock for use after the node's name, or ""."""
    if clock is None or not is_off(clock):
        return ""
    apart = format_duration_ms(abs(clock.ahead_ns) // 1_000_000)
    return f"has a clock that is {apart} {'ahead of' if clock.ahead_ns > 0 else 'behind'} the server's"


class DeviceSample(Request, frozen=True, kw_only=True):
    """The latest measured values of one GPU.

    Attributes:
        uuid: identifier of the device.
        run: run that holds the device, or "" for none or an unknown holder.
        sample: measured values.
    """

    uuid: str
    run: str = ""
    sample: GpuSample


class Heartbeat(Request, frozen=True, kw_only=True):
    """A heartbeat of a node, with the current state of its devices.

    `unavailable` contains the UUIDs of devices that other users hold or that are in quarantine.

    Attributes:
        renew: gangs that need new tokens, because the server refused their tokens.
        clock: difference between the clocks of the node and the server, or None if unknown.
        process: random identifier of the uplink process, as in `AgentHello`.
        egress: digest of the network policy that the node has applied, or None if the node supports no policies.
        samples: latest measured values of the node's GPUs; empty without a GPU or without recent values.
    """

    devices: tuple[Device, ...]
    instance: str = ""
    pythons: tuple[str, ...] = ()
    unavailable: tuple[str, ...] = ()
    attempts: tuple[AttemptSeen, ...] = ()
    draining: str = ""
    problem: str = ""
    renew: tuple[str, ...] = ()
    clock: ClockReading | None = None
    degraded: str = ""
    findings: tuple[str, ...] = ()
    process: str = ""
    egress: str | None = None
    samples: tuple[DeviceSample, ...] = ()


class HeartbeatAnswer(Answer, frozen=True, kw_only=True):
    """The server's answer to a heartbeat.

    Attributes:
        stale: gangs that the server considers ended. The node must stop these gangs and delete their records.
        tokens: new tokens by gang, for the gangs in `renew` that belong to this node.
        at_ns: the server's time of the answer, as in `AgentWelcome`.
        egress: network policy of the node's pool if the node has applied another policy. None for no change, and for a
            pool without isolation.
        rotate: True if the node must replace its keys, because an administrator has requested this.
    """

    stale: tuple[str, ...] = ()
    tokens: dict[str, str] = msgspec.field(default_factory=dict)
    at_ns: int = 0
    egress: EgressPolicy | None = None
    rotate: bool = False


class PrivatePart(Answer, frozen=True, kw_only=True):
    """The part of a start order that only its node may read, as JSON in `Start.sealed`.

    Attributes:
        context: the caller's context with the caller's variables, as in `Start`.
        secrets: secrets of the attempt, as in `Start`.
    """

    context: msgspec.Raw
    secrets: tuple[SecretValue, ...] = ()


class Start(Answer, frozen=True, kw_only=True, tag="start"):
    """An order to start an attempt.

    Attributes:
        seq: number of the order.
        token: token of the attempt, which permits only reports about this attempt. If the node supports "renewal", the
            token expires soon after the attempt's lease, and answers to reports contain the next token.
        gpu_type: GPU type that the scheduler chose.
        world_size: number of devices of the gang on all of its nodes.
        context: the caller's context, as in `RunRequest`.
        call: the pickled call, as in `RunRequest`. None if the call is a blob.
        submitted_ns: time of the client's request, in nanoseconds since 1970.
        secrets: secrets of the attempt. Empty if the node does not support the feature "secrets".
        without: UUIDs of devices that the attempt must not use, even if the node reports these devices as free.
        tariff: price of the attempt. None from an old server, in which case the node uses its local prices.
        crews: parts of a gang on several nodes, in node order. Empty for a gang on one node.
        crew: number of the part that this node must start.
        isolation: isolation level of the attempt's ranks, which the pool requires.
        egress: network policy of the pool, which the node applies before the attempt starts. None without isolation.
        nonce: random text by which the nodes of a gang recognize each other. "" for a gang on one node.
        sealed: `PrivatePart`, sealed to the node's key. `context` and `secrets` are then empty. b"" for a node without
            a key.
    """

    seq: int
    run_id: str
    fence: int
    token: str
    spec: RunSpec
    gpu_type: str
    world_size: int
    context: msgspec.Raw
    call: bytes | None = None
    snapshot: str = ""
    owner: str = ""
    submitted_ns: int = 0
    partition_grace_s: float = 900.0
    secrets: tuple[SecretValue, ...] = ()
    without: tuple[str, ...] = ()
    tariff: Tariff | None = None
    crews: tuple[CrewPlace, ...] = ()
    crew: int = 0
    nonce: str = ""
    isolation: Level = NONE
    egress: EgressPolicy | None = None
    sealed: bytes = b""

    @property
    def gpus(self) -> int:
        """The number of devices that the attempt uses on the node of the order."""
        return self.crews[self.crew].gpus if self.crews else self.world_size


class ReportNow(Answer, frozen=True, kw_only=True, tag="look"):
    """An order to report about an attempt immediately, because the state of the gang has changed.

    The node does not acknowledge the order, so `seq` is 0. The order already contains the news about the gang, so that
    the node can act before it has sent the report.

    Attributes:
        offers: the same field as in `ReportAnswer`, like `chosen`, `release` and `peer_failed`.
    """

    run_id: str
    fence: int
    seq: int = 0
    offers: tuple[Offer, ...] = ()
    chosen: Chosen | None = None
    release: bool = False
    peer_failed: str = ""


class Stop(Answer, frozen=True, kw_only=True, tag="stop"):
    """An order to stop an attempt gracefully.

    Attributes:
        released: True if all ranks on all nodes had returned before the stop request. The ranks may then exit, and the
            attempt succeeds when its results arrive.
    """

    seq: int
    run_id: str
    fence: int
    reason: StopReason
    released: bool = False


class RunCanary(Answer, frozen=True, kw_only=True, tag="canary"):
    """An order to run the canary. The node answers with `CanaryResult` instead of an acknowledgement.

    Attributes:
        id: identifier of the request. The node runs a repeated request only once.
        isolation: isolation level of the canary's run, which the node's pool requires.
        services: addresses that the run must not reach, by name, such as ``database_port``. Commas separate several
            addresses (``HOST:PORT``) of one name.
        egress: network policy of the pool, as in `Start`.
    """

    id: str
    isolation: Level = NONE
    services: dict[str, str] = msgspec.field(default_factory=dict)
    egress: EgressPolicy | None = None


class OpenTunnel(Answer, frozen=True, kw_only=True, tag="tunnel"):
    """An order to connect to a tunnel (`wire/tunnels.py`).

    The node connects instead of acknowledging the order.

    Attributes:
        id: identifier of the tunnel. The node continues a tunnel that it already serves.
    """

    id: str
    run_id: str
    fence: int


Order = Start | Stop | ReportNow
StreamedOrder = Order | RunCanary | OpenTunnel


class CanaryResult(Request, frozen=True, kw_only=True):
    """The report of a canary that the server requested."""

    id: str
    report: CanaryReport


class OrdersTaken(Request, frozen=True, kw_only=True):
    """Numbers (`seq`) of the orders that the node acknowledges."""

    seqs: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)], ...]


NOT_SENT = "results do not get to the server: "
"""Prefix of a node's message about results that the node cannot deliver. Waiting clients show the message."""


class LogPiece(Request, frozen=True, kw_only=True):
    """A piece of a log file with the output of a rank or the telemetry samples of a node.

    In a piece with telemetry samples, `rank` is the node's number.
    """

    rank: int
    stream: Literal["stdout", "stderr", "telemetry"]
    offset: int
    data: bytes


class File(Request, frozen=True, kw_only=True):
    """An output file of an attempt, with its bytes or the reference of an uploaded blob."""

    name: str
    size: int
    inline: bytes | None = None
    blob: BlobReference | None = None


class Ending(Request, frozen=True, kw_only=True):
    """The final state of an attempt. The node reports output files no later than the final state.

    Attributes:
        began: True if user code had started.
        stopped: `node.protocol.Stopped` as JSON. The field is unset if the supervisor died.
        log_ends: end offset of each log that the server did not store completely: ``"<rank>.<stream>"`` → bytes.
        proven: True if the node's kernel confirms that no process of the attempt is running. Otherwise the server
            starts no other attempt and places nothing on the node until the confirmation.
    """

    state: State
    reason: Reason
    began: bool
    stopped: Json = msgspec.UNSET
    log_ends: dict[str, int] = msgspec.field(default_factory=dict)
    proven: bool = True


class Report(Request, frozen=True, kw_only=True):
    """Changes of an attempt since the last report with an answer.

    Attributes:
        state: state of the attempt on the node: STARTING, RUNNING or STOPPING.
        sentence: reason for a wait, or a remark about the attempt.
        world_size: number of ranks, if known.
        exec_ns: start of user code by the server's clock, in nanoseconds since 1970. None before the start.
        ending: the final state of the attempt, after all ranks have ended.
        receipt: `model.receipt.Receipt` as JSON, after the release of the devices. The receipt completes the attempt.
        freed: True if no process of the attempt is running and the devices are released. The node may still have to
            send outputs.
        tracked: link to the run in MLflow, if known.
        offer: addresses at which the gang's other nodes can try to reach this node before the rendezvous.
        reach: results of this node's connection tests to the gang's other nodes.
        returned: True if all ranks on this node have returned and wait for ranks on other nodes.
        halt: reason why the attempt ends early. The node sends the reason before the ranks have ended.
        silence: silence of this node's ranks, for a gang on several nodes. None while the ranks produce output.
        seen: observations of this node's ranks after the last inspection request.
        idle: the action that this node's idle time requires, for a gang on several nodes.
        saved: number of the newest attempt with checkpoints that this node can see. 0 means none or unknown.
    """

    state: State
    sentence: str = ""
    world_size: int = 0
    gpus: tuple[str, ...] = ()
    exec_ns: int | None = None
    logs: tuple[LogPiece, ...] = ()
    facts: tuple[Fact, ...] = ()
    files: tuple[File, ...] = ()
    ending: Ending | None = None
    receipt: Json = msgspec.UNSET
    freed: bool = False
    tracked: str = ""
    offer: Offer | None = None
    reach: CrewReach | None = None
    returned: bool = False
    halt: Halt | None = None
    silence: Silence | None = None
    seen: CrewObservation | None = None
    idle: IdleVerdict = IdleVerdict.GO_ON
    saved: int = 0


class ReportAnswer(Answer, frozen=True, kw_only=True):
    """The server's answer to a report about an attempt.

    Attributes:
        stale: True if the server considers the attempt ended.
        stop: reason of a stop request, or None.
        offsets: next required offset of each log whose piece did not continue the server's copy: `"<rank>.<stream>"` →
            offset.
        partition_grace_s: seconds for which the attempt may continue without another answer, from the *start* of the
            request.
        heartbeat_s: maximum interval between two reports, in seconds.
        token: new token of the attempt, or "" if the current token stays valid.
        offers: offers of all nodes of the gang, as soon as the server has all of them. Empty after this node has
            reported its reach.
        chosen: rendezvous of the gang, after the server has chosen one. User code starts only after the rendezvous.
        release: True if all ranks on all nodes have returned. The ranks on this node may then exit.
        peer_failed: failure on another node as a sentence, or "". After a failure on another node, the ranks on this
            node must end.
        ask: request to inspect the ranks, because the ranks of all nodes are silent.
        judgement: result of the current or the last inspection of the ranks.
        idle: the action that the idle time of all nodes requires. None if unknown.
    """

    stale: bool = False
    stop: StopReason | None = None
    offsets: dict[str, int] = msgspec.field(default_factory=dict)
    partition_grace_s: float = 900.0
    heartbeat_s: float = 5.0
    token: str = ""
    offers: tuple[Offer, ...] = ()
    chosen: Chosen | None = None
    release: bool = False
    peer_failed: str = ""
    ask: InspectionRequest | None = None
    judgement: Judgement | None = None
    idle: IdleVerdict | None = None
