"""Values of a diagnosis: facts that were seen on this machine, checks that judge them, and what a check found.

Probes gather facts, and tests write them by hand. An area that could not be looked at is `UnknownFact`, with the
reason; so is every area that was not gathered.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import wraps
from typing import TypeVar

import msgspec

from serverless_gpu.model.hardware import Device
from serverless_gpu.node.base.protocol import ZygoteStatus
from serverless_gpu.node.devices.nvml import Unavailable, Usage

NO_HOME = "there is no home to look at"


class UnknownFact(msgspec.Struct, frozen=True):
    """Why an area could not be looked at."""

    why: str = "it was not looked at"


class Disk(msgspec.Struct, frozen=True):
    """A file system at one place; `files` is how many inodes it has, 0 where it counts none."""

    place: str
    total_bytes: int
    free_bytes: int
    files: int = 0
    free_files: int = 0


class HomeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The home directory."""

    root: str = ""  # where it is; "" if missing
    problem: str = ""
    hint: str = ""
    note: str = ""  # why it is not the one that was asked for
    filesystem: str = ""
    is_noexec: bool = False
    flock_refusal: str = ""  # why files cannot be locked there, or ""
    record_lock_refusal: str = ""  # why SQLite cannot lock its files there, or ""
    configuration_problem: str = ""
    temporary_problem: str = ""  # why temporary files cannot be made, or ""
    sockets: str = ""
    sockets_problem: str = ""
    disks: tuple[Disk, ...] = ()


class RunsFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The run directories."""

    count: int = 0
    size_bytes: int = 0
    days: float | None = None  # runs are deleted after that many; None for never
    size_bytes_max: int | None = None  # ended runs take at most this; None for no limit
    last_run: str = ""  # the latest run with a receipt; with whether it started warm, and why not
    warm: bool = False
    warm_reason: str = ""


class AgentFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The agent of this home."""

    pid: int | None = None  # None when none runs
    version: str = ""
    python: str = ""
    problem: str = ""  # why it does not answer
    hint: str = ""
    zygotes: tuple[ZygoteStatus, ...] = ()
    attempts: int = 0
    queued: int = 0
    others: dict[str, str] = {}


class ServerNode(msgspec.Struct, frozen=True, kw_only=True):
    """One machine of the server."""

    name: str
    state: str
    sentence: str = ""
    # How long ago it was heard of, in seconds of the server's clock; None where that is not known.
    silent_s: float | None = None
    clock: str = ""  # how far its clock is off, in words that follow its name; "" where it is not
    drained: bool = False  # whether an operator drained it: it gets nothing new


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The server that remote calls go to."""

    url: str = ""  # where it is; "" where none is configured
    profile: str = ""  # the file that says so; "" where variables do
    embedded: bool = False  # whether `sgpu up` of this home wrote it
    problem: str = ""  # why what is configured cannot be used
    hint: str = ""
    is_private: bool = True  # whether only this user can read the token
    away: str = ""  # why it does not answer
    unwell: tuple[str, ...] = ()  # what its `/health` says is wrong
    version: str = ""  # its version of this package
    protocol: int = 0  # what it speaks; `protocols` are all that it takes, `own_protocol` is what we speak
    protocols: tuple[int, ...] = ()
    own_protocol: int = 0
    clock_ahead_s: int | None = None  # how much its clock is ahead of ours, in whole seconds; None where it did not say
    principal: str = ""  # whose the token is
    token_problem: str = ""  # why the token is not taken
    nodes: tuple[ServerNode, ...] | None = None  # its machines; None where one may not look at them
    # Those that run the code of its first administrator only; None where one may not look at pools.
    closed_pools: tuple[str, ...] | None = None
    shared_pools: tuple[str, ...] = ()  # those where several principals share one operating-system user
    principals: int | None = None  # how many principals may start runs; None where one may not look at them
    # How long its certificate is good, in seconds; negative once it has ended; None where it has none, or that could
    # not be seen.
    certificate_left_s: float | None = None


class CgroupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How process trees are ended and limited."""

    path: str = ""  # the v2 directory, or ""
    problem: str = ""
    controllers: tuple[str, ...] = ()


class LimitFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of this process, which ranks inherit; None is unlimited."""

    descriptors: int | None = None
    descriptors_hard: int | None = None
    processes: int | None = None
    address_space_bytes: int | None = None
    shared_memory: Disk | None = None


class KernelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Linux: its release, why processes cannot be followed by pidfd, or "", and what helps then."""

    release: str = ""
    pidfd_refusal: str = ""
    hint: str = ""


class NetworkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Loopback, ports and this machine's name."""

    loopback_problem: str = ""
    port_problem: str = ""
    ports: int = 0
    sockets_used: int = 0
    hostname: str = ""
    hostname_problem: str = ""


class MountFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Why restored environments cannot be mounted here, or "", and whether it was root who tried."""

    problem: str = ""
    is_root: bool = False


class GpuHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What a card says about its own memory, and what it can run; None where it does not say."""

    capability: tuple[int, int] | None = None
    uncorrected_errors: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of this machine."""

    on_bus: int = 0  # NVIDIA display controllers on the PCI bus
    device_files: int = 0  # how many `/dev/nvidia<n>` there are
    binding_problem: str = ""  # why NVML cannot even be loaded
    driver: str = ""  # its version; "" if missing
    cuda: tuple[int, int] | None = None  # the newest CUDA the driver can run
    devices: tuple[Device, ...] = ()
    unavailable: tuple[Unavailable, ...] = ()
    usage: dict[str, Usage] = {}
    health: dict[str, GpuHealth] = {}
    held: dict[str, str] = {}  # who holds which device: run by uuid
    quarantined: dict[str, tuple[str, str]] = {}  # why, by uuid, and the note's file
    # Why the kernel's log cannot be read, where the driver tells of GPUs that fail; "" where it can.
    kernel_log: str = ""
    suspects: tuple[str, ...] = ()  # GPUs that are suspected of being broken, a sentence each


class Shadow(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is found before another module of the same name."""

    name: str
    file: str
    other: str
    is_stdlib: bool = False


class Broken(msgspec.Struct, frozen=True, kw_only=True):
    """An installed package whose requirement is not met; `found` is "" where it is not installed."""

    package: str
    version: str
    requirement: str
    found: str = ""


class InterpreterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The interpreter and what is installed for it."""

    executable: str = ""
    version: str = ""
    prefix: str = ""
    base_prefix: str = ""
    path: tuple[str, ...] = ()
    packages: dict[str, str] = {}
    shadows: tuple[Shadow, ...] = ()
    broken: tuple[Broken, ...] = ()
    broken_problem: str = ""  # why requirements could not be compared


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """What importing one module did."""

    outcome: str  # ``"ok"``, ``"absent"``, ``"raised"``, ``"crashed"``, ``"hung"`` or ``"untried"``
    error: str = ""
    written: str = ""


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What torch says about itself; `devices` is None where it could not be asked."""

    version: str = ""
    cuda: str = ""
    hip: str = ""
    devices: int | None = None
    architectures: tuple[str, ...] = ()
    problem: str = ""


class ImportFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What importing the usual packages did, and the OpenMP runtimes they brought, by package."""

    modules: dict[str, Imported] = {}
    torch: TorchFacts | None = None
    openmp: tuple[str, ...] = ()


class TrackingServer(msgspec.Struct, frozen=True, kw_only=True):
    """An MLflow server of this home."""

    uri: str
    stage: str
    store: str = ""  # whose it is, as may be shown; "" for the home's own
    database: str = ""
    file: str = ""  # path of the database, where it is a file of this machine, else ""
    python: str = ""
    version: str = ""
    problem: str = ""
    pid: int | None = None
    away: str = ""  # why it does not answer, although it is reported as ready


class TrackingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Where runs would be tracked."""

    off: str = ""
    installed: bool = False
    uri: str = ""  # of MLFLOW_TRACKING_URI, without credentials
    away: str | None = None  # why that does not answer; None where it is no server
    servers: tuple[TrackingServer, ...] = ()


class ListeningPort(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A port that a process listens on; `address` is "*" for all."""

    port: int
    address: str
    process: str


class PoolFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The Ray of the pool that this home is in."""

    directory: str = ""  # of its files; "" if missing
    address: str = ""
    version: str = ""
    without_token: tuple[str, ...] = ()  # processes that do not ask for one
    token_problem: str = ""  # who else can read the token, or ""
    listeners: tuple[ListeningPort, ...] = ()
    addresses: tuple[str, ...] = ()
    unfenced: str = ""  # why ranks could end it, or ""
    processes: int = 0


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was seen; `cwd` is where the caller stands, "" when that place does not exist any more."""

    environ: Mapping[str, str] = {}
    python: str = ""
    cwd: str = ""
    home: HomeFacts | UnknownFact = UnknownFact()
    runs: RunsFacts | UnknownFact = UnknownFact()
    agent: AgentFacts | UnknownFact = UnknownFact()
    cgroups: CgroupFacts | UnknownFact = UnknownFact()
    server: ServerFacts | UnknownFact = UnknownFact()
    pool: PoolFacts | UnknownFact = UnknownFact()
    limits: LimitFacts | UnknownFact = UnknownFact()
    kernel: KernelFacts | UnknownFact = UnknownFact()
    network: NetworkFacts | UnknownFact = UnknownFact()
    mounts: MountFacts | UnknownFact = UnknownFact()
    gpus: GpuFacts | UnknownFact = UnknownFact()
    interpreter: InterpreterFacts | UnknownFact = UnknownFact()
    imports: ImportFacts | UnknownFact = UnknownFact()
    tracking: TrackingFacts | UnknownFact = UnknownFact()

    @property
    def python_command(self) -> str:
        """Return the interpreter as a word of a command line that a person copies into a shell."""
        return shlex.quote(self.python)


class CheckOutcome(StrEnum):
    """What a check says."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"


class CheckGroup(StrEnum):
    """Where a check looks, in the order of the report."""

    MACHINE = "machine"
    AGENT = "agent"
    SERVER = "server"
    GPUS = "GPUs"
    ENVIRONMENT = "environment"
    TRACKING = "tracking"
    RUNS = "runs"


class Finding(msgspec.Struct, frozen=True):
    """One thing a check saw; `mend` is the command or sentence that helps, where the row's own is not exact enough."""

    outcome: CheckOutcome
    sentence: str
    mend: str = ""


Probe = Callable[[MachineFacts], Sequence[Finding]]
A = TypeVar("A")


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One row: a trouble people have, why, and what mends it."""

    code: str  # stable name
    group: CheckGroup  # where it looks
    title: str  # what it is about, in a few words
    symptoms: tuple[str, ...]  # what a person sees, verbatim where there is a text
    cause: str  # why, in a sentence
    mend: str  # what to do, a command or a sentence
    # Judges the facts; None for what only a run can show. No finding means that it does not apply here.
    probe: Probe | None = None


def about(
    look: Callable[[MachineFacts], A | UnknownFact],
) -> Callable[[Callable[[MachineFacts, A], Sequence[Finding]]], Probe]:
    """Return a decorator for a probe that judges one area: where that could not be looked at, nothing is known."""

    def decorate(judge: Callable[[MachineFacts, A], Sequence[Finding]]) -> Probe:
        @wraps(judge)
        def probe(facts: MachineFacts) -> Sequence[Finding]:
            area = look(facts)
            return unknown(area.why) if isinstance(area, UnknownFact) else judge(facts, area)

        return probe

    return decorate


def ok(sentence: str) -> list[Finding]:
    """Return the one finding of a check that is fine."""
    return [Finding(CheckOutcome.OK, sentence)]


def warning(sentence: str, mend: str = "") -> list[Finding]:
    """Return the one finding of a check that will bite sooner or later."""
    return [Finding(CheckOutcome.WARNING, sentence, mend)]


def failed(sentence: str, mend: str = "") -> list[Finding]:
    """Return the one finding of a check that keeps runs from working."""
    return [Finding(CheckOutcome.FAILED, sentence, mend)]


def unknown(sentence: str, mend: str = "") -> list[Finding]:
    """Return the one finding of a check that could not see what it needs."""
    return [Finding(CheckOutcome.UNKNOWN, sentence, mend)]
