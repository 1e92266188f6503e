"""Nodes and attempts: an agent joins, gets its orders, and reports its attempts.

The agent dials out; nothing on a node listens, but a crew's supervisor while its gang meets
(`node/supervisor/rendezvous.py`).

    POST /agents                            AgentHello → AgentWelcome    (scope `agent`; again after a reconnect)
    POST /agents/{node}/heartbeat           Heartbeat  → HeartbeatAnswer
    GET  /agents/{node}/orders?instance&process  → stream of `Order`, those not acknowledged first
    POST /agents/{node}/orders/ack          OrdersTaken
    POST /attempts/{run}/{fence}/report     Report → ReportAnswer; also the heartbeat, every `heartbeat_s`
    GET  /attempts/{run}/{fence}/blobs/{digest}      → a part of the payload
    PUT  /blobs/{digest}, POST /blobs/missing        as for users (`blobs.py`)

A token is good for one node, which has one name and one home. A node whose token was not made for it by a join
(`wire/nodes.py`) waits for an administrator: its hello is refused (NotAllowed) until then.

An order may come again until it is acknowledged; it is taken once, by its gang. `Start` is acknowledged when the
attempt's directory says durably that it is being started.

Reports are made with the attempt's own token; on several nodes, each reports its crew. A report is applied whole or not
at all, and may come twice: logs by their offset, facts and files by their name, states because nothing goes backwards.
An answer with `stale` means that the attempt is over for the server: stop it, keep nothing running, report no more.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from serverless_gpu.model.billing.pricing import Tariff
from serverless_gpu.model.hangs.gang_hang_detection import CrewObservation, InspectionRequest, Judgement, Silence
from serverless_gpu.model.hangs.idleness import IdleVerdict
from serverless_gpu.model.hardware import Device, GpuType
from serverless_gpu.model.lifecycle.attempt import Fact, Reason, State, StopReason
from serverless_gpu.model.lifecycle.gang_lifecycle import Halt
from serverless_gpu.model.lifecycle.rendezvous import Chosen, CrewReach, Offer
from serverless_gpu.model.placement import CrewPlace
from serverless_gpu.model.spec import BlobReference, RunSpec
from serverless_gpu.units import format_duration_ms
from serverless_gpu.wire.access import SecretValue
from serverless_gpu.wire.base import Answer, Json, Request

CLOCK_OFF_S = 0.5
"""A node's clock that is further off than this, and than the measurement may be wrong, is reported as off."""


class AttemptSeen(Request, frozen=True, kw_only=True):
    """An attempt that a node looks after, or has news of that the server has not taken yet."""

    run_id: str
    fence: int
    state: State


class AgentHello(Request, frozen=True, kw_only=True):
    """A node as it introduces itself.

    Attributes:
        name: what people call it; the host name unless configured.
        machine: `ambient.machine()`.
        instance: of the node's home, made at random once: two homes of one machine are two nodes.
        pythons: versions it can restore a captured environment for, as ``"3.11"``; none when it does not say.
        boot_id: another one than before proves that nothing of before still runs.
        draining: why it is to be given nothing new, though what runs there goes on, or "".
        degraded: why nobody knows how its devices are, or ""; it is given nothing new until that is over.
        findings: what else a person should know of its devices, a sentence each.
        problem: why it can run nothing now, or "".
        takes: what it understands beyond its protocol: "renewal" of attempts' tokens, "secrets", devices to do
            "without", a spec's "max_run", "crews": a part of a gang that has others on other nodes.
        protocol: of `wire.base`; the server refuses what it does not speak by name.
        process: random, made by the uplink at its start: of two processes of a home, one is admitted.
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


class AgentWelcome(Answer, frozen=True, kw_only=True):
    """The node's identifier, and how often it is to be heard of.

    Attributes:
        stale: gangs (`run:fence`) among those it named that are over for the server: stop and forget them.
        at_ns: the server's time when it answered, nanoseconds since 1970; 0 from one of protocol 1.
    """

    node: str
    heartbeat_s: float
    partition_grace_s: float
    stale: tuple[str, ...] = ()
    at_ns: int = 0


class ClockReading(Request, frozen=True, kw_only=True):
    """How far a node's clock is from its server's, as the node has measured it.

    Attributes:
        ahead_ns: its wall clock less the server's, nanoseconds.
        error_ns: by how much that may be wrong: half of the time an answer took.
    """

    ahead_ns: Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
    error_ns: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


def is_off(clock: ClockReading | None) -> bool:
    """Return whether a node's clock is certainly so far off that times it writes mislead."""
    return clock is not None and abs(clock.ahead_ns) - clock.error_ns > CLOCK_OFF_S * 1e9


def clock_text(clock: ClockReading | None) -> str:
    """Return the remark about a node's clock that is off, to follow its name, or ""."""
    if clock is None or not is_off(clock):
        return ""
    apart = format_duration_ms(abs(clock.ahead_ns) // 1_000_000)
    return f"has a clock that is {apart} {'ahead of' if clock.ahead_ns > 0 else 'behind'} the server's"


class Heartbeat(Request, frozen=True, kw_only=True):
    """A node is there; its devices as they are now (`unavailable`: uuids taken by others, or in quarantine).

    Attributes:
        renew: gangs whose tokens were refused, for which it wants others.
        clock: how far its clock is off; None while that is not known.
        process: as in `AgentHello`.
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


class HeartbeatAnswer(Answer, frozen=True, kw_only=True):
    """What the server makes of a sign of life.

    Attributes:
        stale: gangs that are over for the server: stop and forget them.
        tokens: new tokens by gang, of those that were wanted and are this node's.
        at_ns: as in `AgentWelcome`.
    """

    stale: tuple[str, ...] = ()
    tokens: dict[str, str] = msgspec.field(default_factory=dict)
    at_ns: int = 0


class Start(Answer, frozen=True, kw_only=True, tag="start"):
    """Start an attempt.

    Attributes:
        seq: of the order.
        token: the attempt's own; it can report about this attempt and nothing else. It ends soon after the attempt's
            lease where the node takes "renewal", and a report is answered with the next one.
        gpu_type: chosen by the scheduler.
        world_size: devices of the gang, on all of its nodes.
        context: as in `RunRequest`.
        call: as in `RunRequest`; None when it is a blob.
        submitted_ns: when the client asked, nanoseconds since 1970.
        secrets: the attempt's; none where the node does not take "secrets".
        without: uuids of devices that it is not to get, whatever the node thinks of them.
        tariff: what it pays; None from a server that does not say: the node has prices of its own.
        crews: of the gang, by their numbers, where it is on several nodes; none where it is on one.
        crew: which of them this node is to start.
        nonce: of the gang, by which its crews know each other; "" where it is on one node.
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

    @property
    def gpus(self) -> int:
        """Return how many devices it is to have on this node."""
        return self.crews[self.crew].gpus if self.crews else self.world_size


class ReportNow(Answer, frozen=True, kw_only=True, tag="look"):
    """Report about an attempt now, for the answer has something for it; `seq` is 0, and it is not acknowledged.

    What the answer would say of the meeting and of the end comes along, so that nothing waits for the report.

    Attributes:
        offers: as in `ReportAnswer`; likewise `chosen`, `release` and `peer_failed`.
    """

    run_id: str
    fence: int
    seq: int = 0
    offers: tuple[Offer, ...] = ()
    chosen: Chosen | None = None
    release: bool = False
    peer_failed: str = ""


class Stop(Answer, frozen=True, kw_only=True, tag="stop"):
    """Stop an attempt in order.

    Attributes:
        released: all of its ranks had returned before that was asked, on every node: those here may exit, and it has
            succeeded, if only its results come.
    """

    seq: int
    run_id: str
    fence: int
    reason: StopReason
    released: bool = False


Order = Start | Stop | ReportNow


class OrdersTaken(Request, frozen=True, kw_only=True):
    """Orders that need not come again, by `seq`."""

    seqs: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)], ...]


NOT_SENT = "results do not get to the server: "
"""How a sentence begins that says so, and why: clients that wait for the run show it."""


class LogPiece(Request, frozen=True, kw_only=True):
    """Bytes of a file from `offset` on: what a rank wrote, or the samples of a node (`rank` is its number then)."""

    rank: int
    stream: Literal["stdout", "stderr", "telemetry"]
    offset: int
    data: bytes


class File(Request, frozen=True, kw_only=True):
    """An output of the attempt: its bytes, or where they were put as a blob before."""

    name: str
    size: int
    inline: bytes | None = None
    blob: BlobReference | None = None


class Ending(Request, frozen=True, kw_only=True):
    """How the attempt ended; every file it has was reported before or with it.

    Attributes:
        began: whether user code had started.
        stopped: `node.protocol.Stopped` as JSON; unset when its supervisor was lost.
        log_ends: where logs end on the node that the server had no room for: ``"<rank>.<stream>"`` → bytes.
        proven: whether the node's kernel says that no process of it is left; if not, there is no other attempt, and
            nothing is placed on the node until it is.
    """

    state: State
    reason: Reason
    began: bool
    stopped: Json = msgspec.UNSET
    log_ends: dict[str, int] = msgspec.field(default_factory=dict)
    proven: bool = True


class Report(Request, frozen=True, kw_only=True):
    """What is new about an attempt since the last report that was answered.

    Attributes:
        state: STARTING, RUNNING or STOPPING as the node sees it.
        sentence: what it waits for, or says about itself.
        world_size: ranks, once known.
        exec_ns: when user code began, nanoseconds since 1970 in the server's time, as far as the node knows that; None
            while it has not.
        ending: set once no rank runs any more.
        receipt: `model.receipt.Receipt` as JSON, once devices are given back; with it the attempt is settled.
        freed: no process of it is left, and its devices are given back; outputs may still be on their way.
        tracked: link to the run in MLflow, once known.
        offer: where this crew can be tried by the others, before they have met.
        reach: what it reached of the others, once all offers were told to it.
        returned: all of its ranks have returned, and wait for those on other nodes.
        halt: why it ends before its end, as soon as that is known: its ending may take a while.
        silence: of its ranks, of a gang on several nodes; None while they say something.
        seen: what it saw of its ranks when it was asked last.
        idle: how far its devices are from being idle for too long, of a gang on several nodes.
        saved: number of the newest attempt of the run whose checkpoints this node sees; 0 for none, or not known.
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
    """What the server makes of a report.

    Attributes:
        stale: the attempt is over for the server.
        stop: the run is to be stopped, and why.
        offsets: where a log piece did not continue what the server has: `"<rank>.<stream>"` → the offset it wants.
        partition_grace_s: seconds from the *start* of the request for which the attempt may go on without another
            answer.
        heartbeat_s: report at least this often.
        token: to be used from now on, or "": the one that was used is good for a while.
        offers: of all crews, once they are there, until this one has said what it reached.
        chosen: how the gang meets, once that is decided; user code waits for it.
        release: all ranks have returned, on every node: those here may exit.
        peer_failed: what failed on another node, for people, or "": this crew is to end, too.
        ask: the ranks of all nodes are silent, and to be looked at.
        judgement: what came of that, or of the last time.
        idle: how far devices of all nodes are; None where that is not known.
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
