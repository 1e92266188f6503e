"""Messages between client, agent, supervisor, session and uplink on one node.

    client ──Launch──▶ agent ──Assign + the client's socket + a stem's socket──▶ supervisor
    client ◀──WaitingNote · Started · Output · Skipped · Stopped · Finished────── supervisor
    client ──Confirm, Cancel──▶ supervisor
    uplink ──Lease──▶ supervisor                          after each answer of the server; the run stops without a lease
    supervisor ──CrewNews──▶ uplink, uplink ──GangNews──▶ supervisor      for a gang on several nodes
    agent ──PreparingNote──▶ supervisor                   while the environment is being restored
    supervisor ──Borrow──▶ session ──Lent + lock descriptors──▶ supervisor ──Returned──▶ session

The agent hands the client's connection to the supervisor. The supervisor's own socket accepts the same messages. `sgpu
attach` and a new agent find an attempt by the supervisor's socket. Messages are JSON objects, one per packet
(`inside/channel.py`). A peer with a different `PROTOCOL` receives a refusal that names the version of this package.
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
from serverless_gpu.model.isolation import NONE, Level
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
"""Placeholder for the owner of a run if the owner is unknown."""
# A loan is one packet with one descriptor per device, and a packet carries at most 253 descriptors.
SESSION_DEVICES_MAX = 240
Kind = Literal["function", "session"]
"""Kind of an attempt: a function's run or a session."""
Mode = Literal["", "overlay", "links"]
"""Method to restore an environment; "" lets the node choose."""
T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages except `Stopped`, which readers of run directories also use."""


Sendable = Message | Stopped


class Context(Message, frozen=True, kw_only=True, tag="context"):
    """The caller's process at the time of the call. Ranks get the same settings."""

    python: str
    flags: tuple[str, ...]  # Interpreter options, for example ``-O``.
    environ: dict[str, str]  # Sent over sockets only, never written to a file.
    cwd: str
    umask: int
    argv: tuple[str, ...]
    sys_path: tuple[str, ...]
    descriptors_max: int = 1024  # Soft limit of open files.
    # Files by module name. The mapping contains preloaded modules, because a zygote may have loaded other files. The
    # mapping also contains modules beside the script that hide installed modules.
    packages: dict[str, str] = {}
    copies: dict[str, str] = {}  # captured code directory → original directory; empty if ranks use the originals


class EnvironmentRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The environment of ranks: a snapshot in a store, without other files of the caller."""

    snapshot: str  # Address of the snapshot.
    store: str  # URL
    token: str = ""  # Token for a server's store.
    ca: str = ""  # File with the store's trusted certificates; "" selects the system's certificates.
    mode: Mode = ""  # Method to restore the environment; "" lets the node choose.


class Greeting(Message, frozen=True, kw_only=True, tag="greeting"):
    """The agent's first message on every connection."""

    protocol: int
    version: str
    pid: int
    devices: tuple[Device, ...]
    own_types: tuple[GpuType, ...] = ()
    prices: dict[str, Tariff] = {}
    problem: str = ""
    unavailable: tuple[str, ...] = ()


class Prewarm(Message, frozen=True, kw_only=True, tag="prewarm"):
    """Request to prepare a zygote with standby ranks, and the tracker that the next run will use."""

    context: Context
    ranks: int = 1
    environment: EnvironmentRequest | None = None
    tracker: Tracking | None = None


class Launch(Message, frozen=True, kw_only=True, tag="launch"):
    """Request to run a function call in a run directory or, for a session, to hold devices."""

    run_id: str
    fence: int
    directory: str
    spec: RunSpec
    candidates: tuple[Device, ...]
    world_size: int  # Number of devices on this node.
    of_type: int = 0  # Number of this node's devices of the chosen type.
    context: Context
    called_ns: int
    tariff: Tariff = UNPRICED
    session: str = ""  # Session whose devices the run uses, or "".
    idle_timeout_s: float | None = None  # Seconds without a run after which a session ends.
    environment: EnvironmentRequest | None = None  # None if ranks use the caller's own files.
    # If False, user code waits for `Confirm`. The client sends `Confirm` once the environment matches its snapshot.
    confirmed: bool = True
    # Boottime at which a server's run stops itself unless a `Lease` arrives; None for a run of this node's own user.
    lease_ns: int | None = None
    secrets: DeliveredSecrets | None = None
    crews: tuple[CrewPlace, ...] = ()  # Nodes of a gang on several nodes, in the order of their numbers.
    crew: int = 0  # Number of this node in the gang.
    nonce: str = ""  # Secret by which the nodes of the gang authenticate each other.
    owner: str = ""  # Owner of the run, as principal and server; "" for the user of this node.
    isolation: Level = NONE

    @property
    def all_crews(self) -> tuple[CrewPlace, ...]:
        """Return the `CrewPlace` of every node of the gang, or a single place for a gang on one node."""
        return self.crews or (CrewPlace(number=0, node="", first_rank=0, gpus=self.world_size),)

    @property
    def numbers(self) -> range:
        """Return the numbers of the user's processes that this node runs."""
        return numbered(self.all_crews[self.crew], per_node=self.spec.per_node)


class StatusRequest(Message, frozen=True, kw_only=True, tag="status_request"):
    """Request for the agent's status."""


class ZygoteStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An interpreter that the agent keeps warm, or the reason why it cannot be kept warm."""

    python: str
    state: Literal["starting", "ready", "cold"]  # ``"cold"``: the agent keeps no zygote for this interpreter.
    pid: int | None = None  # Pid of the zygote, if any.
    reason: str = ""
    environment: str = ""  # Snapshot address; "" for the caller's files.
    owner: str = ""  # Owner of the zygote; "" for the user of this node.


class EnvironmentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that this node has restored or is restoring."""

    snapshot: str
    state: Literal["restoring", "ready"]
    mode: Mode = ""  # Method of the restore; "" while unknown.
    sentence: str = ""  # Progress of the restore.


class AttemptStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A running attempt or session."""

    run_id: str
    pid: int  # Pid of the attempt's supervisor; 0 while unknown.
    kind: Kind
    adopted: bool = False  # True if an earlier agent started the attempt.
    environment: str = ""  # Snapshot address of the attempt's ranks, or "".


class Status(Message, frozen=True, kw_only=True, tag="status"):
    """State of the agent and of all processes that it controls."""

    pid: int
    zygotes: tuple[ZygoteStatus, ...]
    attempts: tuple[AttemptStatus, ...]
    queued: tuple[str, ...]
    cgroups: str  # Directory of the cgroups of this home's runs; "" if none is usable.
    cgroups_problem: str = ""
    environments: tuple[EnvironmentStatus, ...] = ()


class Retire(Message, frozen=True, kw_only=True, tag="retire"):
    """Request that the agent exits: running attempts continue, new ones are refused."""


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """Answer that the receiver started nothing."""

    code: str
    message: str
    hint: str = ""


class Standby(Message, frozen=True, kw_only=True, tag="standby"):
    """Report of a started supervisor that waits for an attempt."""

    pid: int


class Assign(Message, frozen=True, kw_only=True, tag="assign"):
    """The agent's assignment of an attempt to a supervisor."""

    launch: Launch
    asked_ns: int  # Boottime at which the launch arrived.
    checkpoints: str = ""  # Directory of all runs' checkpoints on this node.
    uid: int = 0  # Uid of the ranks in their sandbox; 0 without a sandbox.


class Stem(Message, frozen=True, kw_only=True, tag="stem"):
    """The stem of an attempt with its attached socket, or the problem that prevented it."""

    pid: int = 0
    warm: bool = False  # True if the zygote was already running.
    warm_reason: str = ""
    problem: str = ""  # Text for people; `reason` is for programs.
    reason: Reason = Reason.START_FAILED
    context: Context | None = None  # Set if paths differ from the caller's paths, as in a restored environment.
    environment: str = "live"  # Line about the environment for the receipt.


class PreparingNote(Message, frozen=True, kw_only=True, tag="preparing"):
    """Progress of the environment that a run needs before it gets its stem.

    The agent sends this message repeatedly.
    """

    sentence: str


class Accepted(Message, frozen=True, kw_only=True, tag="accepted"):
    """Report that a supervisor controls the run."""

    pid: int


class WaitingNote(Message, frozen=True, kw_only=True, tag="waiting"):
    """Reason why the run has not started yet or makes no progress."""

    sentence: str
    passing: bool = False  # True for a progress message that the next message soon replaces.
    lasting: bool = False  # True for a message about the run that stays true after user code begins.
    # Start of the wait for devices, in nanoseconds since 1970. The next message with this field replaces this message.
    queued_ns: int | None = None


class SessionReady(Message, frozen=True, kw_only=True, tag="held"):
    """Report that a session has its devices."""

    devices: tuple[Device, ...]


class Borrow(Message, frozen=True, kw_only=True, tag="borrow"):
    """A supervisor's request for devices of a session. Closing the connection returns the devices."""

    run_id: str
    count: int


class Lent(Message, frozen=True, kw_only=True, tag="lent"):
    """A session's loan, with lock descriptors and the pipe that shows whether the devices are in use."""

    devices: tuple[Device, ...]


class Returned(Message, frozen=True, kw_only=True, tag="returned"):
    """State of the borrowed devices after a run, as the run's supervisor verified it."""

    unfit: tuple[str, ...] = ()  # Devices in quarantine, because the supervisor could not verify that they are free.


class Started(Message, frozen=True, kw_only=True, tag="started"):
    """Report that user code is about to begin."""

    at_ns: int


class Tracked(Message, frozen=True, kw_only=True, tag="tracked"):
    """Report that MLflow has a run for this run."""

    run_id: str  # MLflow's run id; "" while only the link is known.
    url: str


class Output(Message, frozen=True, kw_only=True, tag="output"):
    """Output of a rank, as text for a terminal."""

    rank: int
    stream: str
    text: str


class Skipped(Message, frozen=True, kw_only=True, tag="skipped"):
    """Report of bytes that are missing from the live output at this position.

    With `lost`, the rank's log file lacks the bytes too.
    """

    rank: int
    stream: str
    bytes: int
    lost: bool


class Finished(Message, frozen=True, kw_only=True, tag="finished"):
    """Report that the supervisor verified and released the devices. The receipt is final."""

    receipt: Receipt


class Cancel(Message, frozen=True, kw_only=True, tag="cancel"):
    """Request to stop a run, or a session with its runs. A session accepts no other stop request."""

    reason: StopReason = StopReason.CANCEL


class Lease(Message, frozen=True, kw_only=True, tag="lease"):
    """Report that the server has answered: the run may continue until the given boottime of the node."""

    deadline_ns: int


class Confirm(Message, frozen=True, kw_only=True, tag="confirm"):
    """Report that the environment matches the launch, so user code may start."""


class CrewNews(Message, frozen=True, kw_only=True, tag="crew_news"):
    """State of this node's part of a gang, for the other nodes of the gang.

    The supervisor sends the complete state after each change.
    """

    offer: Offer | None = None  # Network addresses of the node, once it has devices and a stem.
    reach: CrewReach | None = None  # Other nodes of the gang that this node reached.
    returned: bool = False  # True once all ranks of this node have returned and wait for the ranks of other nodes.
    halt: Halt | None = None  # Reason for which this node ends its ranks early.
    silent: int = 0  # Number of the current period without output; 0 while ranks print.
    silent_since_ns: int = 0  # boottime
    seen: CrewObservation | None = None  # State of this node's ranks at the last rank inspection.
    idle: IdleVerdict = IdleVerdict.GO_ON  # Progress of this node's devices toward the idle limit.


class GangNews(Message, frozen=True, kw_only=True, tag="gang_news"):
    """The server's state of a gang, as in `ReportAnswer`. The uplink sends the state repeatedly."""

    offers: tuple[Offer, ...] = ()
    chosen: Chosen | None = None
    release: bool = False
    peer_failed: str = ""
    ask: InspectionRequest | None = None
    judgement: Judgement | None = None
    idle: IdleVerdict | None = None


class AttemptSnapshot(Message, frozen=True, kw_only=True, tag="snapshot"):
    """A supervisor's first message on its own socket.

    `crew` is set for a gang on several nodes.
    """

    run_id: str
    fence: int
    state: State
    pid: int
    waiting: str = ""
    kind: Kind = "function"
    tracked: Tracked | None = None
    crew: CrewNews | None = None


# Ordered by sender: client to agent, agent, client to supervisor, sessions, supervisor.
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
    """Return the path of the agent's socket. Each protocol and package version has its own agent."""
    return sockets / f"agent-{PROTOCOL}-{__version__}.sock"


def portable(text: str) -> str:
    """Return text in a form that JSON supports, even if the text contains undecodable bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "\0" + os.fsencode(text).hex()  # No environment variable or path contains a NUL.
    return text


def original(text: str) -> str:
    """Return the original text of a result of `portable`."""
    return os.fsdecode(bytes.fromhex(text[1:])) if text.startswith("\0") else text


def send(channel: Channel, message: Sendable, fds: tuple[int, ...] = ()) -> None:
    """Send a message with attached descriptors.

    Raises OSError if the peer has closed its socket, and BlockingIOError if the peer does not read.
    """
    channel.send(_encoder.encode(message), fds)


def receive(channel: Channel) -> tuple[AnyMessage, tuple[int, ...]] | None:
    """Return the next message and its descriptors, or None at end of file. Raises MsgspecError."""
    received = channel.receive()
    return None if received is None else (decoded(_decoder, received), received[1])


def decoded(decoder: msgspec.json.Decoder[T], received: tuple[bytes, tuple[int, ...]]) -> T:
    """Return the message in a packet.

    Closes the descriptors of the packet if decoding raises MsgspecError.
    """
    try:
        return decoder.decode(received[0])
    except (msgspec.MsgspecError, RecursionError) as error:
        close_all(received[1])
        raise msgspec.DecodeError(str(error)) from None
