"""Messages of client, agent and supervisor on one node.

    client ──Launch──▶ agent ──Assign + the client's socket + a stem's socket──▶ supervisor
    client ◀──WaitingNote · Started · Output · Skipped · Stopped · Finished────── supervisor
    client ──Confirm, Cancel──▶ supervisor
    uplink ──Lease──▶ supervisor                          whenever the server has answered; else the run is stopped
    supervisor ──CrewNews──▶ uplink, uplink ──GangNews──▶ supervisor      of a gang on several nodes
    agent ──PreparingNote──▶ supervisor                   while the environment is being restored
    supervisor ──Borrow──▶ session ──Lent + lock descriptors──▶ supervisor ──Returned──▶ session

The agent gives the client's connection away. The supervisor's own socket takes the same messages: `attach`, and a new
agent after the old one died, find an attempt by it. Messages are JSON objects, one per packet (`inside/channel.py`). A
peer of another `PROTOCOL` is refused by name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from serverless_gpu.model.billing.pricing import UNPRICED, Tariff
from serverless_gpu.model.hangs.gang_hang_detection import CrewObservation, InspectionRequest, Judgement
from serverless_gpu.model.hangs.idleness import IdleVerdict
from serverless_gpu.model.hardware import Device, GpuType
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.lifecycle.attempt import Stopped as Stopped
from serverless_gpu.model.lifecycle.gang_lifecycle import Halt
from serverless_gpu.model.lifecycle.rendezvous import Chosen, CrewReach, Offer
from serverless_gpu.model.placement import CrewPlace, numbered
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.model.secrets import DeliveredSecrets
from serverless_gpu.model.spec import RunSpec, Tracking
from serverless_gpu.node.inside.channel import Channel, close_all
from serverless_gpu.version import __version__

PROTOCOL = 8
UNKNOWN_OWNER = "?"
"""Owner of a run whose owner is unknown."""
SESSION_DEVICES_MAX = 240  # a loan is one packet with a descriptor for each, and a packet carries 253
Kind = Literal["function", "session"]
"""Kind of an attempt's directory."""
Mode = Literal["", "overlay", "links"]
"""Way to restore an environment; "" leaves that to the node."""
T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages but `Stopped`, which readers of run directories need, too."""


Sendable = Message | Stopped


class Context(Message, frozen=True, kw_only=True, tag="context"):
    """The caller's process at the moment of the call, which ranks take on."""

    python: str
    flags: tuple[str, ...]  # interpreter options, for example ``-O``
    environ: dict[str, str]  # goes over sockets and never into a file
    cwd: str
    umask: int
    argv: tuple[str, ...]
    sys_path: tuple[str, ...]
    descriptors_max: int = 1024  # soft limit
    # file of each module that a zygote may have otherwise: preloaded ones, and those beside the script that hide
    # installed ones
    packages: dict[str, str] = {}
    copies: dict[str, str] = {}  # captured directories of code and their originals; empty when ranks use the originals


class EnvironmentRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The environment of ranks: a snapshot in a store, and nothing else of the caller's disk."""

    snapshot: str  # its address
    store: str  # URL
    token: str = ""  # for a server's store
    ca: str = ""  # file with the store's trusted certificates; "" for the system's
    mode: Mode = ""  # how it must be restored; "" leaves that to the node


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
    """Run the call that lies in a run directory; or, for a session, hold devices and run nothing."""

    run_id: str
    fence: int
    directory: str
    spec: RunSpec
    candidates: tuple[Device, ...]
    world_size: int  # devices on this node
    of_type: int = 0  # devices of the chosen type that this node has
    context: Context
    called_ns: int
    tariff: Tariff = UNPRICED
    session: str = ""  # whose devices the run uses, or ""
    idle_timeout_s: float | None = None  # of a session: it ends when no run has used it for so long
    environment: EnvironmentRequest | None = None  # None for the caller's files as they are
    # if False, user code waits for `Confirm`, which the client sends once the environment matches its snapshot
    confirmed: bool = True
    # boottime after which a server's run stops itself unless a `Lease` comes before; None for this node's own
    lease_ns: int | None = None
    secrets: DeliveredSecrets | None = None
    crews: tuple[CrewPlace, ...] = ()  # of a gang on several nodes, by number
    crew: int = 0  # its number among them
    nonce: str = ""  # by which the crews of the gang know each other
    owner: str = ""  # principal and server; "" for the user of this node

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


class ZygoteStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An interpreter that is kept warm, or that cannot be."""

    python: str
    state: Literal["starting", "ready", "cold"]  # ``"cold"``: without a zygote, and the next run gets none
    pid: int | None = None  # of the zygote, if any
    reason: str = ""
    environment: str = ""  # snapshot address; "" for the caller's files
    owner: str = ""  # "" for the user of this node


class EnvironmentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that this node has restored, or is restoring."""

    snapshot: str
    state: Literal["restoring", "ready"]
    mode: Mode = ""  # how it was restored; "" while unknown
    sentence: str = ""  # its progress


class AttemptStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A running run or session."""

    run_id: str
    pid: int  # of its supervisor; 0 while unknown
    kind: Kind
    adopted: bool = False  # started by an earlier agent
    environment: str = ""  # snapshot address of its ranks, or ""


class Status(Message, frozen=True, kw_only=True, tag="status"):
    """State of the agent and all it controls."""

    pid: int
    zygotes: tuple[ZygoteStatus, ...]
    attempts: tuple[AttemptStatus, ...]
    queued: tuple[str, ...]
    cgroups: str  # directory of its runs' cgroups; "" where it can use none
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
    """The agent hands an attempt to a supervisor."""

    launch: Launch
    asked_ns: int  # boottime at which the launch arrived
    checkpoints: str = ""  # directory of all runs' checkpoints on this node


class Stem(Message, frozen=True, kw_only=True, tag="stem"):
    """The stem for an attempt, its socket attached; or the problem that prevented it."""

    pid: int = 0
    warm: bool = False  # whether its zygote was there before
    warm_reason: str = ""
    problem: str = ""  # in words; `reason` is for machines
    reason: Reason = Reason.START_FAILED
    context: Context | None = None  # set where paths differ from the caller's: in a restored environment
    environment: str = "live"  # for the receipt


class PreparingNote(Message, frozen=True, kw_only=True, tag="preparing"):
    """Progress of the preparation that a run waits for before it gets its stem; repeated."""

    sentence: str


class Accepted(Message, frozen=True, kw_only=True, tag="accepted"):
    """A supervisor has the run."""

    pid: int


class WaitingNote(Message, frozen=True, kw_only=True, tag="waiting"):
    """Reason why the run has not started yet, or does not get on."""

    sentence: str
    passing: bool = False  # a progress sentence that another one replaces soon
    lasting: bool = False  # no wait: a sentence of the run about itself that stays true once user code begins
    queued_ns: int | None = None  # waiting for devices since then (1970); the next such sentence replaces this one


class SessionReady(Message, frozen=True, kw_only=True, tag="held"):
    """A session has its devices."""

    devices: tuple[Device, ...]


class Borrow(Message, frozen=True, kw_only=True, tag="borrow"):
    """A supervisor asks a session for devices; the connection is the loan, its end gives them back."""

    run_id: str
    count: int


class Lent(Message, frozen=True, kw_only=True, tag="lent"):
    """A session's loan; attached are lock descriptors and the pipe that tells who still has them."""

    devices: tuple[Device, ...]


class Returned(Message, frozen=True, kw_only=True, tag="returned"):
    """State of borrowed devices as a supervisor found it after its run."""

    unfit: tuple[str, ...] = ()  # in quarantine: not proven free


class Started(Message, frozen=True, kw_only=True, tag="started"):
    """The first user byte is about to run."""

    at_ns: int


class Tracked(Message, frozen=True, kw_only=True, tag="tracked"):
    """The run has a run in MLflow."""

    run_id: str  # MLflow's; "" where only the link is known
    url: str


class Output(Message, frozen=True, kw_only=True, tag="output"):
    """Bytes a rank wrote, as text for a terminal."""

    rank: int
    stream: str
    text: str


class Skipped(Message, frozen=True, kw_only=True, tag="skipped"):
    """Size of live output that was left out at this point; `lost`: the rank's file lacks it, too."""

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
    """State of a crew for the others of its gang; sent whole whenever something changes."""

    offer: Offer | None = None  # where the others can try it, once it has devices and a stem
    reach: CrewReach | None = None  # the others it reached
    returned: bool = False  # all of its ranks have returned, and wait for the others
    halt: Halt | None = None  # why it ends early
    silent: int = 0  # number of the silence of its ranks; 0 while they print
    silent_since_ns: int = 0  # boottime
    seen: CrewObservation | None = None  # its ranks at the last inspection
    idle: IdleVerdict = IdleVerdict.GO_ON  # how far its devices are from being idle for too long


class GangNews(Message, frozen=True, kw_only=True, tag="gang_news"):
    """The server's state of the gang, as in `ReportAnswer`; may repeat."""

    offers: tuple[Offer, ...] = ()
    chosen: Chosen | None = None
    release: bool = False
    peer_failed: str = ""
    ask: InspectionRequest | None = None
    judgement: Judgement | None = None
    idle: IdleVerdict | None = None


class AttemptSnapshot(Message, frozen=True, kw_only=True, tag="snapshot"):
    """A supervisor's first message on its own socket; `crew` is that of a gang on several nodes."""

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
    | AttemptSnapshot
    | CrewNews
    | WaitingNote
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
    """Return text that JSON can carry: Python shows undecodable bytes as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "\0" + os.fsencode(text).hex()  # no variable or path contains a NUL
    return text


def original(text: str) -> str:
    """Return what `portable` was given."""
    return os.fsdecode(bytes.fromhex(text[1:])) if text.startswith("\0") else text


def send(channel: Channel, message: Sendable, fds: tuple[int, ...] = ()) -> None:
    """Send a message with descriptors; OSError: the peer is gone, BlockingIOError: it does not read."""
    channel.send(_encoder.encode(message), fds)


def receive(channel: Channel) -> tuple[AnyMessage, tuple[int, ...]] | None:
    """Return the next message and its descriptors, or None when the peer is gone; raises MsgspecError."""
    received = channel.receive()
    return None if received is None else (decoded(_decoder, received), received[1])


def decoded(decoder: msgspec.json.Decoder[T], received: tuple[bytes, tuple[int, ...]]) -> T:
    """Return the message in a packet; on MsgspecError its descriptors are closed."""
    try:
        return decoder.decode(received[0])
    except (msgspec.MsgspecError, RecursionError) as error:
        close_all(received[1])
        raise msgspec.DecodeError(str(error)) from None
