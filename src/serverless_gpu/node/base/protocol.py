"""What client, agent and supervisor say to each other on one node.

    client ──Launch──▶ agent ──Assign + the client's socket + a stem's socket──▶ supervisor
    client ◀──Waiting · Started · Output · Skipped · Stopped · Finished────────── supervisor
    client ──Confirm, Cancel──▶ supervisor
    uplink ──Lease──▶ supervisor                          whenever the server has answered; else the run is stopped
    supervisor ──CrewNews──▶ uplink, uplink ──GangNews──▶ supervisor      of a gang on several nodes
    agent ──Preparing──▶ supervisor                       while the environment is being restored
    supervisor ──Borrow──▶ session ──Lent + lock descriptors──▶ supervisor ──Returned──▶ session

The agent gives the client's connection away. The same words are spoken on the supervisor's own socket, by which
`attach`, and a new agent after the old one died, find an attempt.
Messages are JSON objects, one per packet (`inside/channel.py`). A peer of another `PROTOCOL` is refused by name.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from serverless_gpu.model.billing.pricing import UNPRICED, Tariff
from serverless_gpu.model.gangs.crew import CrewPlace, numbered
from serverless_gpu.model.gangs.gang_lifecycle import Halt
from serverless_gpu.model.gangs.rendezvous import Chosen, CrewReach, Offer
from serverless_gpu.model.hangs.gang_hang_detection import Ask, CrewObservation, Judgement
from serverless_gpu.model.hardware import Device, GpuType
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.model.secrets import DeliveredSecrets
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.model.telemetry.idleness import IdleVerdict
from serverless_gpu.model.tracking_context import Tracking
from serverless_gpu.node.base.packets import decoded
from serverless_gpu.node.base.statuses import AttemptStatus, EnvironmentStatus, Kind, Mode, ZygoteStatus
from serverless_gpu.node.base.stop_message import Stopped as Stopped
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.version import __version__

PROTOCOL = 8
UNKNOWN_OWNER = "?"
"""Owner of a run that is somebody's, and nothing says whose."""
SESSION_DEVICES_MAX = 240  # a loan is one packet with a descriptor for each, and a packet carries 253


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages but `Stopped`, which is in a module of its own."""


Sendable = Message | Stopped


class Context(Message, frozen=True, kw_only=True, tag="context"):
    """The caller's process at the moment of the call, which ranks take on.

    Attributes:
        python: path of the interpreter.
        flags: interpreter options it was started with, for example ``-O``.
        environ: environment variables; they go over sockets and never into a file.
        descriptors_max: the soft limit on open descriptors.
        packages: the file this process imports (or would import) a module from, for those of which a zygote may have
            another: what it preloads, and what lies beside the script under the name of something installed.
        copies: directories of code that are captured copies, and where the originals are; none when ranks use those.
    """

    python: str
    flags: tuple[str, ...]
    environ: dict[str, str]
    cwd: str
    umask: int
    argv: tuple[str, ...]
    sys_path: tuple[str, ...]
    descriptors_max: int = 1024
    packages: dict[str, str] = {}
    copies: dict[str, str] = {}


class EnvironmentRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The environment that ranks are to have: a snapshot in a store, and nothing else of the caller's disk.

    Attributes:
        snapshot: its address.
        store: URL of the store; token: what one of a server is asked with.
        ca: file with the certificates that such a one is trusted by; "" for the system's.
        mode: how it must be restored; "" leaves that to the node.
    """

    snapshot: str
    store: str
    token: str = ""
    ca: str = ""
    mode: Mode = ""


class Greeting(Message, frozen=True, kw_only=True, tag="greeting"):
    """The agent's first words on every connection."""

    protocol: int
    version: str
    pid: int
    devices: tuple[Device, ...]
    own_types: tuple[GpuType, ...] = ()
    prices: dict[str, Tariff] = {}
    problem: str = ""
    unavailable: tuple[str, ...] = ()


class Prewarm(Message, frozen=True, kw_only=True, tag="prewarm"):
    """Have a zygote ready for this context, ranks standing by, and what tracks such a run."""

    context: Context
    ranks: int = 1
    environment: EnvironmentRequest | None = None
    tracker: Tracking | None = None


class Launch(Message, frozen=True, kw_only=True, tag="launch"):
    """Run the call that lies in a run directory; or, for a session, hold devices and run nothing.

    Attributes:
        world_size: devices that it has on this node.
        of_type: how many devices of the type that was chosen this node has.
        session: the session whose devices the run uses, or "".
        idle_timeout_s: set for a session: it ends when no run has used it for so long.
        environment: the snapshot whose restored copy ranks import from; None for the caller's files as they are.
        confirmed: whether user code may start; else the client says `Confirm` once it knows that the environment is
            still what the snapshot says, or goes away.
        lease_ns: of a run that a server gave to this node: boottime after which it stops itself, unless a `Lease` comes
            before; None for a run of this node's own.
        secrets: where its secrets are; None where it has none.
        crews: of a gang on several nodes, by their numbers; none of one that is on this node alone.
        crew: which of them this is.
        nonce: of the gang, by which its crews know each other.
        owner: the principal whose run it is, and the server that says so; "" for a run of this node's user.
    """

    run_id: str
    fence: int
    directory: str
    spec: RunSpec
    candidates: tuple[Device, ...]
    world_size: int
    of_type: int = 0
    context: Context
    called_ns: int
    tariff: Tariff = UNPRICED
    session: str = ""
    idle_timeout_s: float | None = None
    environment: EnvironmentRequest | None = None
    confirmed: bool = True
    lease_ns: int | None = None
    secrets: DeliveredSecrets | None = None
    crews: tuple[CrewPlace, ...] = ()
    crew: int = 0
    nonce: str = ""
    owner: str = ""

    @property
    def all_crews(self) -> tuple[CrewPlace, ...]:
        """Return the crews of the gang, also where that is this one alone."""
        return self.crews or (CrewPlace(number=0, node="", first_rank=0, gpus=self.world_size),)

    @property
    def numbers(self) -> range:
        """Return the numbers of the user's processes on this node."""
        return numbered(self.all_crews[self.crew], per_node=self.spec.per_node)


class StatusRequest(Message, frozen=True, kw_only=True, tag="status_request"):
    """Ask the agent what it looks after."""


class Status(Message, frozen=True, kw_only=True, tag="status"):
    """What the agent looks after.

    Attributes:
        cgroups: the directory its runs' cgroups are in; "" where it can use none.
        cgroups_problem: why it can use none.
    """

    pid: int
    zygotes: tuple[ZygoteStatus, ...]
    attempts: tuple[AttemptStatus, ...]
    queued: tuple[str, ...]
    cgroups: str
    cgroups_problem: str = ""
    environments: tuple[EnvironmentStatus, ...] = ()


class Retire(Message, frozen=True, kw_only=True, tag="retire"):
    """Have the agent end: running attempts go on, new ones are refused."""


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """Nothing was started."""

    code: str
    message: str
    hint: str = ""


class Standby(Message, frozen=True, kw_only=True, tag="standby"):
    """A supervisor has started and waits for an attempt."""

    pid: int


class Assign(Message, frozen=True, kw_only=True, tag="assign"):
    """The agent hands an attempt to a supervisor.

    Attributes:
        asked_ns: boottime at which the launch arrived.
        checkpoints: directory of all runs' checkpoints on this node.
    """

    launch: Launch
    asked_ns: int
    checkpoints: str = ""


class Stem(Message, frozen=True, kw_only=True, tag="stem"):
    """The stem for an attempt, its socket attached; or why there is none.

    Attributes:
        warm: whether it comes from a zygote that was there before.
        warm_reason: why not, in words.
        problem: why there is none, in words, and `reason` for machines.
        context: what ranks take on, where that is not the caller's own: paths of a restored environment.
        environment: for the receipt.
    """

    pid: int = 0
    warm: bool = False
    warm_reason: str = ""
    problem: str = ""
    reason: Reason = Reason.START_FAILED
    context: Context | None = None
    environment: str = "live"


class PreparingNote(Message, frozen=True, kw_only=True, tag="preparing"):
    """What a run waits for before it gets its stem; said again while it gets on."""

    sentence: str


class Accepted(Message, frozen=True, kw_only=True, tag="accepted"):
    """A supervisor has the run."""

    pid: int


class Waiting(Message, frozen=True, kw_only=True, tag="waiting"):
    """Why the run has not started yet, or does not get on.

    Attributes:
        passing: it is how far something is, and soon another.
        lasting: it is no wait, but what the run says of itself, and stays true once user code begins.
        queued_ns: since when it waits for devices, nanoseconds since 1970, if that is what it does: the next such
            sentence replaces this one.
    """

    sentence: str
    passing: bool = False
    lasting: bool = False
    queued_ns: int | None = None


class SessionReady(Message, frozen=True, kw_only=True, tag="held"):
    """A session has its devices."""

    devices: tuple[Device, ...]


class Borrow(Message, frozen=True, kw_only=True, tag="borrow"):
    """A supervisor asks a session for devices; the connection is the loan, its end gives them back."""

    run_id: str
    count: int


class Lent(Message, frozen=True, kw_only=True, tag="lent"):
    """A session lends devices; attached are their lock descriptors and the pipe that says who still has them."""

    devices: tuple[Device, ...]


class Returned(Message, frozen=True, kw_only=True, tag="returned"):
    """What a supervisor found when it looked at borrowed devices after its run.

    Attributes:
        unfit: identifiers of those that are not proven free; they are in quarantine.
    """

    unfit: tuple[str, ...] = ()


class Started(Message, frozen=True, kw_only=True, tag="started"):
    """The first user byte is about to run."""

    at_ns: int


class Tracked(Message, frozen=True, kw_only=True, tag="tracked"):
    """The run has a run in MLflow.

    Attributes:
        run_id: MLflow's; "" where only the link is known, which has it.
        url: what a person opens.
    """

    run_id: str
    url: str


class Output(Message, frozen=True, kw_only=True, tag="output"):
    """Bytes a rank wrote, as text for a terminal."""

    rank: int
    stream: str
    text: str


class Skipped(Message, frozen=True, kw_only=True, tag="skipped"):
    """Live output that was left out at this point, so many bytes; `lost`: it is not in the rank's file either."""

    rank: int
    stream: str
    bytes: int
    lost: bool


class Finished(Message, frozen=True, kw_only=True, tag="finished"):
    """The GPUs were checked and given back; the receipt is final."""

    receipt: Receipt


class Cancel(Message, frozen=True, kw_only=True, tag="cancel"):
    """Stop the run; with a session, which knows no other reason, its runs as well."""

    reason: StopReason = StopReason.CANCEL


class Lease(Message, frozen=True, kw_only=True, tag="lease"):
    """The server has answered: the run may go on until this boottime of the node."""

    deadline_ns: int


class Confirm(Message, frozen=True, kw_only=True, tag="confirm"):
    """The environment is what the launch says: user code may start."""


class CrewNews(Message, frozen=True, kw_only=True, tag="crew_news"):
    """What a crew has to say to the others of its gang; all of it, whenever something of it is new.

    Attributes:
        offer: where the others can try it, once it has devices and a stem.
        reach: what it reached of them.
        returned: all of its ranks have returned, and wait for the others.
        halt: why it ends before its end.
        silent: number of the silence of its ranks; 0 while they say something.
        silent_since_ns: since when, boottime.
        seen: what it saw of its ranks when it was asked last.
        idle: how far its devices are from being idle for too long.
    """

    offer: Offer | None = None
    reach: CrewReach | None = None
    returned: bool = False
    halt: Halt | None = None
    silent: int = 0
    silent_since_ns: int = 0
    seen: CrewObservation | None = None
    idle: IdleVerdict = IdleVerdict.GO_ON


class GangNews(Message, frozen=True, kw_only=True, tag="gang_news"):
    """What the server says of the gang, as in `ReportAnswer`; may come again."""

    offers: tuple[Offer, ...] = ()
    chosen: Chosen | None = None
    release: bool = False
    peer_failed: str = ""
    ask: Ask | None = None
    judgement: Judgement | None = None
    idle: IdleVerdict | None = None


class Snapshot(Message, frozen=True, kw_only=True, tag="snapshot"):
    """A supervisor's first words on its own socket; `tracked` once that was said, `crew` of a gang on several nodes."""

    run_id: str
    fence: int
    state: State
    pid: int
    waiting: str = ""
    kind: Kind = "function"
    tracked: Tracked | None = None
    crew: CrewNews | None = None


# By who says it: the client to the agent, the agent, the client to a supervisor, about sessions, a supervisor.
AnyMessage = (
    Prewarm
    | Launch
    | StatusRequest
    | Retire
    | Greeting
    | Refused
    | Status
    | Assign
    | Stem
    | PreparingNote
    | Confirm
    | Cancel
    | Lease
    | GangNews
    | Borrow
    | Lent
    | Returned
    | SessionReady
    | Standby
    | Accepted
    | Snapshot
    | CrewNews
    | Waiting
    | Started
    | Tracked
    | Output
    | Skipped
    | Stopped
    | Finished
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyMessage] = msgspec.json.Decoder(AnyMessage)


def agent_socket(sockets: Path) -> Path:
    """Return where the agent listens; another protocol or version of this package is another agent."""
    return sockets / f"agent-{PROTOCOL}-{__version__}.sock"


def portable(text: str) -> str:
    """Return text that JSON can carry: variables and paths may be any bytes, which Python shows as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "\0" + os.fsencode(text).hex()  # no variable or path contains a NUL
    return text


def original(text: str) -> str:
    """Return what `portable` was given."""
    return os.fsdecode(bytes.fromhex(text[1:])) if text.startswith("\0") else text


def send(channel: Channel, message: Sendable, fds: tuple[int, ...] = ()) -> None:
    """Send a message with descriptors.

    Raises:
        OSError: the peer is gone; `BlockingIOError` when it does not read.
    """
    channel.send(_encoder.encode(message), fds)


def receive(channel: Channel) -> tuple[AnyMessage, tuple[int, ...]] | None:
    """Return the next message and its descriptors, or None when the peer is gone.

    Raises:
        msgspec.MsgspecError: the peer speaks another language.
    """
    received = channel.receive()
    return None if received is None else (decoded(_decoder, received), received[1])
