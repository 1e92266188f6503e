"""Messages between client, agent, supervisor, session and uplink on one node.

    client ──Launch──▶ agent ──Assign + the client's socket + a stem's socket──▶ supervisor
    client ◀──WaitingNote · Started · Output · Skipped · Stopped · Finished────── supervisor
    client ──Confirm, Cancel──▶ supervisor
    client or uplink ──OpenEndpoint + a socket──▶ supervisor              the supervisor passes the socket to the stem
    uplink ──Lease──▶ supervisor                          after each answer of the server; the run stops without a lease
    supervisor ──CrewNews──▶ uplink, uplink ──GangNews──▶ supervisor      for a gang on several nodes
    agent ──PreparingNote──▶ supervisor                   while the environment is being restored
    supervisor ──Borrow──▶ session ──Lent + lock descriptors──▶ supervisor ──Returned──▶ session

The agent passes the client's connection to the supervisor. The supervisor also accepts client messages on its own
socket, which `sgpu attach` and a new agent use. Messages are JSON objects, one per packet (`inside/channel.py`). If a
peer has a different `PROTOCOL`, the agent refuses its message and names this package's version.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from serverless_gpu.model.billing.pricing import UNPRICED, Tariff
from serverless_gpu.model.endpoint import EndpointTarget
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
"""Owner of a run whose real owner is unknown."""
# A loan packet contains a descriptor for each device. A packet carries at most 253 descriptors.
SESSION_DEVICES_MAX = 240
Kind = Literal["function", "session"]
"""Kind of an attempt: function run or session."""
Mode = Literal["", "overlay", "links"]
"""Method to restore an environment; "" lets the node choose."""
T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base class of all messages except `Stopped`."""


Sendable = Message | Stopped


class Context(Message, frozen=True, kw_only=True, tag="context"):
    """Settings of the caller's process at the time of the call, which ranks also get."""

    python: str
    flags: tuple[str, ...]  # Interpreter options, for example ``-O``.
    environ: dict[str, str]  # Environment variables of the caller. No process writes the caller's variables to a file.
    cwd: str
    umask: int
    argv: tuple[str, ...]
    sys_path: tuple[str, ...]
    descriptors_max: int = 1024  # Soft limit on open files.
    # Maps module names to files, for preloaded modules and for modules beside the script that hide installed modules.
    packages: dict[str, str] = {}
    copies: dict[str, str] = {}  # Maps captured code directories to their originals.


class EnvironmentRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for a restored environment: the address of a snapshot and its store."""

    snapshot: str  # Address of the environment's snapshot.
    store: str  # URL of the snapshot's store.
    token: str = ""  # Token that authenticates the node to a server's store.
    ca: str = ""  # Path of the store's certificates; "" selects the system's certificates.
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
    """Request to prepare a zygote with standby ranks and the tracker of the next run."""

    context: Context
    ranks: int = 1
    environment: EnvironmentRequest | None = None
    tracker: Tracking | None = None


class Launch(Message, frozen=True, kw_only=True, tag="launch"):
    """Request to run a function, or to hold devices for a session."""

    run_id: str
    fence: int
    directory: str
    spec: RunSpec
    candidates: tuple[Device, ...]
    world_size: int  # Number of the run's devices on this node.
    of_type: int = 0  # Number of all devices on this node that have the chosen type.
    context: Context
    called_ns: int
    tariff: Tariff = UNPRICED
    session: str = ""  # Id of the session whose devices the run uses, or "".
    idle_timeout_s: float | None = None  # Seconds without a run after which a session ends; None for a run.
    environment: EnvironmentRequest | None = None  # Environment to restore; None if ranks use the caller's files.
    # If `confirmed` is False, user code waits for `Confirm`. The client sends `Confirm` once the environment matches
    # its snapshot.
    confirmed: bool = True
    # Boottime at which the supervisor stops a server's run unless a `Lease` arrives; None for a local run.
    lease_ns: int | None = None
    secrets: DeliveredSecrets | None = None
    crews: tuple[CrewPlace, ...] = ()  # Nodes of a gang on several nodes, in the order of their numbers.
    crew: int = 0  # Number of this node in the gang.
    nonce: str = ""  # Secret by which the nodes of the gang authenticate each other.
    owner: str = ""  # Owner of the run, as principal and server; "" for the user of this node.
    isolation: Level = NONE
    # Reason why the ranks have no network rules, "" if the rules are in force, and None without isolation.
    egress_problem: str | None = None

    @property
    def all_crews(self) -> tuple[CrewPlace, ...]:
        """Return the `CrewPlace` of every node of the gang, also for a gang on one node."""
        return self.crews or (CrewPlace(number=0, node="", first_rank=0, gpus=self.world_size),)

    @property
    def numbers(self) -> range:
        """Return the rank numbers of the user's processes on this node."""
        return numbered(self.all_crews[self.crew], per_node=self.spec.per_node)


class StatusRequest(Message, frozen=True, kw_only=True, tag="status_request"):
    """Request for the agent's status."""


class ZygoteStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of an interpreter that the agent keeps warm or cannot keep warm."""

    python: str
    state: Literal["starting", "ready", "cold"]  # ``"cold"``: the agent keeps no zygote for this interpreter.
    pid: int | None = None  # Pid of the zygote, if any.
    reason: str = ""
    environment: str = ""  # Snapshot address; "" for the caller's files.
    owner: str = ""  # Owner of the zygote; "" for the user of this node.
    memory_bytes: int = 0  # Memory of the zygote and its standby processes (PSS); 0 until it is known.


class EnvironmentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of a snapshot that this node has restored or is restoring."""

    snapshot: str
    state: Literal["restoring", "ready"]
    mode: Mode = ""  # Restore method; "" while the method is unknown.
    sentence: str = ""  # Progress of the restore as text.


class AttemptStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of a running attempt or session."""

    run_id: str
    pid: int  # Pid of the attempt's supervisor; 0 if the agent does not know the pid.
    kind: Kind
    adopted: bool = False  # True if an earlier agent started the attempt.
    environment: str = ""  # Snapshot address of the attempt's ranks, or "".


class Status(Message, frozen=True, kw_only=True, tag="status"):
    """Status of the agent and of all processes that it controls."""

    pid: int
    zygotes: tuple[ZygoteStatus, ...]
    attempts: tuple[AttemptStatus, ...]
    queued: tuple[str, ...]
    cgroups: str  # Directory of the runs' cgroups; "" if no cgroup is usable.
    cgroups_problem: str = ""
    environments: tuple[EnvironmentStatus, ...] = ()


class Retire(Message, frozen=True, kw_only=True, tag="retire"):
    """Request that the agent exits. Running attempts continue."""


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """Answer that the receiver refuses a request."""

    code: str
    message: str
    hint: str = ""


class Standby(Message, frozen=True, kw_only=True, tag="standby"):
    """Report of a supervisor on standby that waits for an attempt."""

    pid: int


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The operating system's account of a principal. Principals with a uid of the range have no account."""

    name: str
    gid: int
    groups: tuple[int, ...]  # Supplementary groups.
    home: str  # Home directory, at the same path on the node and in the sandbox.


class Assign(Message, frozen=True, kw_only=True, tag="assign"):
    """The agent's assignment of an attempt to a supervisor."""

    launch: Launch
    asked_ns: int  # Boottime at which the launch arrived.
    checkpoints: str = ""  # Directory of all runs' checkpoints on this node.
    uid: int = 0  # Uid of the run's principal; 0 at the isolation level `none`.
    user_home: str = ""  # Home directory of the run's principal on this node.
    account: Account | None = None


class Stem(Message, frozen=True, kw_only=True, tag="stem"):
    """The stem of an attempt, with the attached socket, or the problem that prevented the start."""

    pid: int = 0
    cgroups: tuple[str, ...] = ()  # Cgroups that the agent made for the stem.
    warm: bool = False  # True if the zygote was already running.
    warm_reason: str = ""
    problem: str = ""  # Error message if the stem could not start.
    reason: Reason = Reason.START_FAILED
    context: Context | None = None  # Context of the ranks if their paths differ from the caller's paths.
    environment: str = "live"  # Description of the environment in the receipt.


class PreparingNote(Message, frozen=True, kw_only=True, tag="preparing"):
    """Progress of restoring a run's environment, which the agent sends repeatedly."""

    sentence: str


class Accepted(Message, frozen=True, kw_only=True, tag="accepted"):
    """Report that a supervisor controls the run."""

    pid: int


class WaitingNote(Message, frozen=True, kw_only=True, tag="waiting"):
    """Reason why a run has not started yet or makes no progress."""

    sentence: str
    passing: bool = False  # True for a progress message that is soon outdated.
    lasting: bool = False  # True for a message that stays valid after user code begins.
    # Start of the wait for devices, in nanoseconds since 1970. The next message with `queued_ns` replaces this message.
    queued_ns: int | None = None


class SessionReady(Message, frozen=True, kw_only=True, tag="held"):
    """Report that a session has reserved its devices."""

    devices: tuple[Device, ...]


class Borrow(Message, frozen=True, kw_only=True, tag="borrow"):
    """Supervisor's request to borrow devices of a session until the supervisor closes the connection."""

    run_id: str
    count: int


class Lent(Message, frozen=True, kw_only=True, tag="lent"):
    """Session's loan of devices, with lock descriptors and a pipe that reports the end of the loan."""

    devices: tuple[Device, ...]


class Returned(Message, frozen=True, kw_only=True, tag="returned"):
    """State of the borrowed devices after a run, as verified by the run's supervisor."""

    unfit: tuple[str, ...] = ()  # Uuids of devices that the supervisor put in quarantine.


class Started(Message, frozen=True, kw_only=True, tag="started"):
    """Report that user code is about to begin."""

    at_ns: int


class Tracked(Message, frozen=True, kw_only=True, tag="tracked"):
    """Report of the MLflow run that belongs to this run."""

    run_id: str  # MLflow's run id; "" while the supervisor knows only the link.
    url: str


class Output(Message, frozen=True, kw_only=True, tag="output"):
    """Output of a rank, as text for a terminal."""

    rank: int
    stream: str
    text: str


class Skipped(Message, frozen=True, kw_only=True, tag="skipped"):
    """Report of bytes missing from a rank's live output and, with `lost`, from its log file."""

    rank: int
    stream: str
    bytes: int
    lost: bool


class Finished(Message, frozen=True, kw_only=True, tag="finished"):
    """Report that the supervisor has verified and released the devices, with the final receipt."""

    receipt: Receipt


class Cancel(Message, frozen=True, kw_only=True, tag="cancel"):
    """Request to stop a run, or a session with its runs."""

    reason: StopReason = StopReason.CANCEL


class Lease(Message, frozen=True, kw_only=True, tag="lease"):
    """Report that the server has answered and extended the run's lease to a boottime of the node."""

    deadline_ns: int


class Confirm(Message, frozen=True, kw_only=True, tag="confirm"):
    """Report that the environment matches the launch, which permits user code to start."""


class OpenEndpoint(Message, frozen=True, kw_only=True, tag="open_endpoint"):
    """Request to connect the attached socket to a port, a socket or a new program in the attempt.

    The answer is the first line of the socket (`node/inside/endpoint.py`).
    """

    target: EndpointTarget


class CrewNews(Message, frozen=True, kw_only=True, tag="crew_news"):
    """State of a node's part of a gang, for the other nodes of the gang.

    The supervisor sends its complete `CrewNews` after each change.
    """

    offer: Offer | None = None  # Network addresses of the node, once the node has devices and a stem.
    reach: CrewReach | None = None  # Nodes of the gang that this node has reached over the network.
    returned: bool = False  # True once all ranks of this node wait for ranks of other nodes to return.
    halt: Halt | None = None  # Reason why this node ends its ranks early.
    silent: int = 0  # Sequence number of the current period without output; 0 while ranks print.
    silent_since_ns: int = 0  # Boottime at which the period without output began.
    seen: CrewObservation | None = None  # Ranks of this node at the last rank inspection.
    idle: IdleVerdict = IdleVerdict.GO_ON  # Progress of this node's devices toward the idle limit.


class GangNews(Message, frozen=True, kw_only=True, tag="gang_news"):
    """The server's view of a gang, as in `ReportAnswer`, which the uplink sends repeatedly."""

    offers: tuple[Offer, ...] = ()
    chosen: Chosen | None = None
    release: bool = False
    peer_failed: str = ""
    ask: InspectionRequest | None = None
    judgement: Judgement | None = None
    idle: IdleVerdict | None = None


class AttemptSnapshot(Message, frozen=True, kw_only=True, tag="snapshot"):
    """A supervisor's first message on its own socket. Only gangs on several nodes set `crew`."""

    run_id: str
    fence: int
    state: State
    pid: int
    waiting: str = ""
    kind: Kind = "function"
    tracked: Tracked | None = None
    crew: CrewNews | None = None


# Message types are ordered by sender: client to agent, agent, client to supervisor, sessions, supervisor.
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
    | OpenEndpoint
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
    """Return the socket path of the agent for this protocol and package version."""
    return sockets / f"agent-{PROTOCOL}-{__version__}.sock"


def portable(text: str) -> str:
    """Return text in a form that JSON can represent, even if the text contains undecodable bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "\0" + os.fsencode(text).hex()  # Environment variables and paths cannot contain a NUL character.
    return text


def original(text: str) -> str:
    """Return the original text that `portable` converted."""
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
    """Return the message in a packet, or close the packet's descriptors and raise MsgspecError."""
    try:
        return decoder.decode(received[0])
    except (msgspec.MsgspecError, RecursionError) as error:
        close_all(received[1])
        raise msgspec.DecodeError(str(error)) from None
