"""Values of a diagnosis: facts about this machine, checks that judge the facts, and findings.

Probes gather facts, and tests construct facts by hand. An area is `UnknownFact`, with a reason, if its probe failed or
did not run.
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

NO_HOME = "no home directory is available"


class UnknownFact(msgspec.Struct, frozen=True):
    """The reason why a probe returned no facts about an area."""

    why: str = "no probe has run"


class Disk(msgspec.Struct, frozen=True):
    """A file system at one path.

    `files` is the number of inodes, or 0 if the file system does not count inodes.
    """

    place: str
    total_bytes: int
    free_bytes: int
    files: int = 0
    free_files: int = 0


class HomeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The home directory."""

    root: str = ""  # Path of the home, or "" if no home is usable.
    problem: str = ""
    hint: str = ""
    note: str = ""  # Reason why the home is not the requested directory, or "".
    filesystem: str = ""
    is_noexec: bool = False
    flock_refusal: str = ""  # Reason why the file system refuses file locks, or "".
    record_lock_refusal: str = ""  # Reason why the file system refuses SQLite's locks, or "".
    configuration_problem: str = ""
    temporary_problem: str = ""  # Reason why temporary files cannot be created, or "".
    sockets: str = ""
    sockets_problem: str = ""
    disks: tuple[Disk, ...] = ()


class RunsFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The run directories of the home."""

    count: int = 0
    size_bytes: int = 0
    days: float | None = None  # Retention time of runs in days, or None for no limit.
    size_bytes_max: int | None = None  # Maximum size of all ended runs, or None for no limit.
    last_run: str = ""  # The latest run that has a receipt.
    warm: bool = False
    warm_reason: str = ""


class AgentFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The agent of this home."""

    pid: int | None = None  # Process id of the agent, or None if no agent runs.
    version: str = ""
    python: str = ""
    problem: str = ""  # Reason why the agent does not answer, or "".
    hint: str = ""
    zygotes: tuple[ZygoteStatus, ...] = ()
    attempts: int = 0
    queued: int = 0
    others: dict[str, str] = {}


class ServerNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the server."""

    name: str
    state: str
    sentence: str = ""
    # Seconds since the last message of the node, by the server's clock, or None if unknown.
    silent_s: float | None = None
    clock: str = ""  # Text about the clock difference that follows the node's name, or "" if the clocks agree.
    drained: bool = False  # True if an operator drained the node, so that it starts no new runs.


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The server that runs remote calls."""

    url: str = ""  # Address of the server, or "" if no server is configured.
    profile: str = ""  # File that names the server, or "" if environment variables name the server.
    embedded: bool = False  # True if `sgpu up` of this home wrote the profile file.
    problem: str = ""  # Reason why the server's configuration is not usable, or "".
    hint: str = ""
    is_private: bool = True  # True if only this user can read the token.
    away: str = ""  # Reason why the server does not answer, or "".
    unwell: tuple[str, ...] = ()  # Problems that the server's `/health` reports.
    version: str = ""  # The server's version of this package.
    # `protocol` is the server's protocol number, and `own_protocol` is the client's. `protocols` lists all protocols
    # that the server accepts.
    protocol: int = 0
    protocols: tuple[int, ...] = ()
    own_protocol: int = 0
    # Seconds by which the server's clock is ahead of this machine, or None if the server sent no time.
    clock_ahead_s: int | None = None
    principal: str = ""  # The owner of the token.
    token_problem: str = ""  # Reason why the server rejects the token, or "".
    nodes: tuple[ServerNode, ...] | None = None  # Nodes of the server, or None without permission to list nodes.
    # Pools that run only the code of the first administrator, or None without permission to list pools.
    closed_pools: tuple[str, ...] | None = None
    shared_pools: tuple[str, ...] = ()  # Pools in which several principals share one operating-system user.
    principals: int | None = None  # Number of principals that may start runs, or None without permission to list users.
    # Seconds until the server's certificate expires, negative after its expiry. None without a readable certificate.
    certificate_left_s: float | None = None


class CgroupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The cgroup with which supervisors limit and end the process trees of runs."""

    path: str = ""  # The cgroup v2 directory, or "".
    problem: str = ""
    controllers: tuple[str, ...] = ()


class LimitFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of this process, which ranks inherit. None means no limit."""

    descriptors: int | None = None
    descriptors_hard: int | None = None
    processes: int | None = None
    address_space_bytes: int | None = None
    shared_memory: Disk | None = None


class KernelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel release, and the reason and remedy if pidfds do not work."""

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
    """The result of a trial mount of an environment. `is_root` is True if the root user tried the mount."""

    problem: str = ""
    is_root: bool = False


class GpuHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The memory errors and compute capability of a GPU.

    None means that the GPU does not report the value.
    """

    capability: tuple[int, int] | None = None
    uncorrected_errors: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of this machine."""

    on_bus: int = 0  # The number of NVIDIA display controllers on the PCI bus.
    device_files: int = 0  # The number of `/dev/nvidia<n>` files.
    binding_problem: str = ""  # Reason why the NVML binding cannot be loaded, or "".
    driver: str = ""  # Driver version, or "" without a driver.
    cuda: tuple[int, int] | None = None  # The newest CUDA version that the driver supports.
    devices: tuple[Device, ...] = ()
    unavailable: tuple[Unavailable, ...] = ()
    usage: dict[str, Usage] = {}
    health: dict[str, GpuHealth] = {}
    held: dict[str, str] = {}  # The run that holds each device, by device UUID.
    quarantined: dict[str, tuple[str, str]] = {}  # Quarantine reason and path of the quarantine note, by device UUID.
    # Reason why the doctor cannot read the kernel log, or "". The kernel log contains the driver's GPU errors.
    kernel_log: str = ""
    suspects: tuple[str, ...] = ()  # A message for each GPU that is probably broken.


class Shadow(msgspec.Struct, frozen=True, kw_only=True):
    """A file that hides another module of the same name."""

    name: str
    file: str
    other: str
    is_stdlib: bool = False


class Broken(msgspec.Struct, frozen=True, kw_only=True):
    """An installed package with an unmet requirement. `found` is "" if the required package is missing."""

    package: str
    version: str
    requirement: str
    found: str = ""


class InterpreterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The interpreter and its installed packages."""

    executable: str = ""
    version: str = ""
    prefix: str = ""
    base_prefix: str = ""
    path: tuple[str, ...] = ()
    packages: dict[str, str] = {}
    shadows: tuple[Shadow, ...] = ()
    broken: tuple[Broken, ...] = ()
    broken_problem: str = ""  # Reason why the doctor cannot check the packages' requirements, or "".


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of importing one module."""

    outcome: str  # The outcome: ``"ok"``, ``"absent"``, ``"raised"``, ``"crashed"``, ``"hung"`` or ``"untried"``.
    error: str = ""
    written: str = ""


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The build and devices that torch reports. `devices` is None if torch did not answer."""

    version: str = ""
    cuda: str = ""
    hip: str = ""
    devices: int | None = None
    architectures: tuple[str, ...] = ()
    problem: str = ""


class ImportFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of importing the usual packages, and the paths of the OpenMP runtimes that they loaded."""

    modules: dict[str, Imported] = {}
    torch: TorchFacts | None = None
    openmp: tuple[str, ...] = ()


class TrackingServer(msgspec.Struct, frozen=True, kw_only=True):
    """An MLflow server of this home."""

    uri: str
    stage: str
    store: str = ""  # Store of the server, without credentials, or "" for the home's own store.
    database: str = ""
    file: str = ""  # Path of the store's database file, or "" for any other store.
    python: str = ""
    version: str = ""
    problem: str = ""
    pid: int | None = None
    away: str = ""  # Reason why a server in the stage "ready" does not answer, or "".


class TrackingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The tracking destination of new runs, and the MLflow servers of this home."""

    off: str = ""
    installed: bool = False
    uri: str = ""  # MLFLOW_TRACKING_URI without credentials.
    # Reason why the tracking server does not answer, or "" if the server answers. None if the URI is not an HTTP
    # address.
    away: str | None = None
    servers: tuple[TrackingServer, ...] = ()


class ListeningPort(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A port on which a process listens. The `address` "*" denotes all addresses."""

    port: int
    address: str
    process: str


class PoolFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The Ray cluster of this home's pool."""

    directory: str = ""  # Directory of the pool's files, or "" without a pool.
    address: str = ""
    version: str = ""
    without_token: tuple[str, ...] = ()  # Ray processes that require no token.
    token_problem: str = ""  # Problem of the token file, such as other users who can read it, or "".
    listeners: tuple[ListeningPort, ...] = ()
    addresses: tuple[str, ...] = ()
    unfenced: str = ""  # Reason why ranks could end Ray, or "".
    processes: int = 0


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All facts that the probes gathered.

    `cwd` is the caller's working directory, or "" if it no longer exists.
    """

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
        """Return the interpreter, quoted for a shell command line."""
        return shlex.quote(self.python)


class CheckOutcome(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"


class CheckGroup(StrEnum):
    """The area of a check, in the order of the report."""

    MACHINE = "machine"
    AGENT = "agent"
    SERVER = "server"
    GPUS = "GPUs"
    ENVIRONMENT = "environment"
    TRACKING = "tracking"
    RUNS = "runs"


class Finding(msgspec.Struct, frozen=True):
    """A result of a check. `mend` is a remedy that replaces the general remedy of the check, or ""."""

    outcome: CheckOutcome
    sentence: str
    mend: str = ""


Probe = Callable[[MachineFacts], Sequence[Finding]]
A = TypeVar("A")


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table of checks: a common problem, its cause and its remedy."""

    code: str  # Stable name of the check.
    group: CheckGroup  # Area of the check.
    title: str  # Short title of the check.
    symptoms: tuple[str, ...]  # Symptoms that users see, verbatim where possible.
    cause: str  # The cause, in one or two sentences.
    mend: str  # The remedy: a command or a sentence.
    # Function that judges the facts, or None for a problem that only a run can show. A check without findings does not
    # apply.
    probe: Probe | None = None


def about(
    look: Callable[[MachineFacts], A | UnknownFact],
) -> Callable[[Callable[[MachineFacts, A], Sequence[Finding]]], Probe]:
    """Return a decorator for a check of one area.

    Without facts about the area, the check reports "unknown".
    """

    def decorate(judge: Callable[[MachineFacts, A], Sequence[Finding]]) -> Probe:
        @wraps(judge)
        def probe(facts: MachineFacts) -> Sequence[Finding]:
            area = look(facts)
            return unknown(area.why) if isinstance(area, UnknownFact) else judge(facts, area)

        return probe

    return decorate


def ok(sentence: str) -> list[Finding]:
    """Return a single finding with the outcome "ok"."""
    return [Finding(CheckOutcome.OK, sentence)]


def warning(sentence: str, mend: str = "") -> list[Finding]:
    """Return a single finding with a problem that may affect runs later."""
    return [Finding(CheckOutcome.WARNING, sentence, mend)]


def failed(sentence: str, mend: str = "") -> list[Finding]:
    """Return a single finding with a problem that prevents runs."""
    return [Finding(CheckOutcome.FAILED, sentence, mend)]


def unknown(sentence: str, mend: str = "") -> list[Finding]:
    """Return a single finding of a check that lacks facts."""
    return [Finding(CheckOutcome.UNKNOWN, sentence, mend)]
