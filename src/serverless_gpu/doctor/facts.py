"""Data types of a diagnosis: facts about a machine, checks that judge the facts, and findings.

Probes gather the facts. Tests construct facts by hand. If an area's probe failed or did not run, the area's value is an
`UnknownFact` with the reason.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import wraps
from typing import TypeVar

import msgspec

from serverless_gpu.model.hardware import Device
from serverless_gpu.model.isolation import NONE
from serverless_gpu.node.base.protocol import ZygoteStatus
from serverless_gpu.node.devices.nvml import Unavailable, Usage

NO_HOME = "no home directory is available"


class UnknownFact(msgspec.Struct, frozen=True):
    """The reason why a probe returned no facts about an area."""

    why: str = "no probe has run"


class Disk(msgspec.Struct, frozen=True):
    """The file system that contains a path.

    `files` is the number of inodes, or 0 if the file system does not count inodes.
    """

    place: str
    total_bytes: int
    free_bytes: int
    files: int = 0
    free_files: int = 0


class HomeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The home directory."""

    root: str = ""  # Path of the home directory, or "" if no directory is usable.
    problem: str = ""
    hint: str = ""
    note: str = ""  # Reason why another home directory replaces the requested one, or "".
    filesystem: str = ""
    is_noexec: bool = False
    flock_refusal: str = ""  # Reason why the file system refuses file locks, or "".
    record_lock_refusal: str = ""  # Reason why the file system refuses SQLite's locks, or "".
    configuration_problem: str = ""
    temporary_problem: str = ""  # Reason why processes cannot create temporary files, or "".
    sockets: str = ""
    sockets_problem: str = ""
    disks: tuple[Disk, ...] = ()


class RunsFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The home directory's run directories."""

    count: int = 0
    size_bytes: int = 0
    days: float | None = None  # Retention time of ended runs in days, or None for no limit.
    size_bytes_max: int | None = None  # Maximum total size of ended runs, or None for no limit.
    last_run: str = ""  # Identifier of the latest run that has a receipt.
    warm: bool = False
    warm_reason: str = ""


class AgentFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The home directory's agent."""

    pid: int | None = None  # Process id of the agent, or None if no agent runs.
    version: str = ""
    python: str = ""
    problem: str = ""  # Reason why the agent does not answer, or "".
    hint: str = ""
    zygotes: tuple[ZygoteStatus, ...] = ()
    attempts: int = 0
    queued: int = 0
    others: dict[str, str] = {}


class PrincipalFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The principals of a node that gives them uids of their own."""

    count: int = 0  # Number of principals with a uid of the range.
    swept_s: float | None = None  # Seconds since the last sweep, or None without a sweep.
    findings: tuple[str, ...] = ()  # What principals left behind, as sentences.


class ServerNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that belongs to the server."""

    name: str
    state: str
    sentence: str = ""
    # Seconds since the node's last message by the server's clock, or None if unknown.
    silent_s: float | None = None
    clock: str = ""  # Text about the clock difference between node and server, or "" if the clocks agree.
    drained: bool = False  # True if an operator has drained the node. A drained node starts no new runs.
    unfiltered: str = ""  # Reason why a node with isolation has no network rules, or "".
    has_key: bool = True  # True if the server has bound a key of the node, so that its token alone is not valid.
    key_days: int | None = None  # Age of the key in days, or None if unknown.
    pool: str = ""
    isolation: str = NONE  # Strongest isolation level that the node has measured.
    isolation_problem: str = ""  # Reason why the node offers no stronger level, or "".


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The server that runs remote calls."""

    url: str = ""  # Address of the server, or "" if no server is configured.
    profile: str = ""  # File that names the server, or "" if environment variables name the server.
    embedded: bool = False  # True if `sgpu up` with this home directory wrote the profile file.
    problem: str = ""  # Reason why the server profile is not usable, or "".
    hint: str = ""
    is_private: bool = True  # True if only the current user can read the token.
    away: str = ""  # Reason why the server does not answer, or "".
    unwell: tuple[str, ...] = ()  # Problems that the server's `/health` reports.
    version: str = ""  # Version of serverless-gpu on the server.
    # `protocol` is the server's protocol number. `own_protocol` is the client's protocol number. `protocols` lists all
    # protocol numbers that the server accepts.
    protocol: int = 0
    protocols: tuple[int, ...] = ()
    own_protocol: int = 0
    # Seconds by which the server's clock is ahead of this machine's clock, or None if the server sent no time.
    clock_ahead_s: int | None = None
    principal: str = ""  # Principal that owns the token.
    token_problem: str = ""  # Reason why the server rejects the token, or "".
    nodes: tuple[ServerNode, ...] | None = None  # Nodes of the server, or None if the principal may not list nodes.
    # Pools that run only the first administrator's code, or None if the principal may not list pools.
    closed_pools: tuple[str, ...] | None = None
    shared_pools: tuple[str, ...] = ()  # Pools in which several principals share one operating-system user.
    levels: Mapping[str, str] = {}  # Isolation of each pool: the level of its runs, or "unset".
    # Number of principals that may start runs, or None if the principal may not list users.
    principals: int | None = None
    # Seconds until the server's certificate expires (negative after the expiry), or None if no certificate is readable.
    certificate_left_s: float | None = None


class CgroupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The cgroup in which supervisors limit and end the runs' process trees."""

    path: str = ""  # Path of the cgroup v2 directory, or "".
    problem: str = ""
    controllers: tuple[str, ...] = ()


class IsolationFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The strongest isolation level that this user's agent can give to runs on this machine."""

    level: str = NONE
    problem: str = ""  # Reason why no stronger level is possible, or "".


class LimitFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Resource limits of the doctor process, which ranks inherit. None means that no limit is set."""

    descriptors: int | None = None
    descriptors_hard: int | None = None
    processes: int | None = None
    address_space_bytes: int | None = None
    shared_memory: Disk | None = None


class KernelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel release, and the reason and remedy for unusable pidfds."""

    release: str = ""
    pidfd_refusal: str = ""
    hint: str = ""


class NetworkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's loopback interface, ports and host name."""

    loopback_problem: str = ""
    port_problem: str = ""
    ports: int = 0
    sockets_used: int = 0
    hostname: str = ""
    hostname_problem: str = ""


class MountFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a trial mount of an environment. `is_root` is True if root tried the mount."""

    problem: str = ""
    is_root: bool = False


class GpuHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's memory errors and compute capability.

    A value is None if the GPU does not report the value.
    """

    capability: tuple[int, int] | None = None
    uncorrected_errors: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of this machine."""

    on_bus: int = 0  # Number of NVIDIA display controllers on the PCI bus.
    device_files: int = 0  # The number of `/dev/nvidia<n>` files.
    binding_problem: str = ""  # Reason why the NVML binding cannot be loaded, or "".
    driver: str = ""  # Driver version, or "" without a driver.
    cuda: tuple[int, int] | None = None  # The newest CUDA version that the driver supports.
    devices: tuple[Device, ...] = ()
    unavailable: tuple[Unavailable, ...] = ()
    usage: dict[str, Usage] = {}
    health: dict[str, GpuHealth] = {}
    held: dict[str, str] = {}  # Identifier of the run that holds a device, by device UUID.
    quarantined: dict[str, tuple[str, str]] = {}  # Quarantine reason and path of the quarantine note, by device UUID.
    # Reason why the doctor cannot read the kernel log, or "". The kernel log contains the driver's GPU errors.
    kernel_log: str = ""
    suspects: tuple[str, ...] = ()  # Messages about GPUs that are probably broken.


class Shadow(msgspec.Struct, frozen=True, kw_only=True):
    """A file that hides an installed module of the same name."""

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
    """The build and the number of devices that torch reports. `devices` is None if torch did not answer."""

    version: str = ""
    cuda: str = ""
    hip: str = ""
    devices: int | None = None
    architectures: tuple[str, ...] = ()
    problem: str = ""


class ImportFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of importing common packages, and the OpenMP runtimes that the packages loaded."""

    modules: dict[str, Imported] = {}
    torch: TorchFacts | None = None
    openmp: tuple[str, ...] = ()


class TrackingServer(msgspec.Struct, frozen=True, kw_only=True):
    """One of the home directory's MLflow servers."""

    uri: str
    stage: str
    store: str = ""  # MLflow store of the server, without credentials, or "" for the home directory's store.
    database: str = ""
    file: str = ""  # Path of the MLflow store's database file, or "" for any other store.
    python: str = ""
    version: str = ""
    problem: str = ""
    pid: int | None = None
    away: str = ""  # Reason why an MLflow server in the stage "ready" does not answer, or "".


class TrackingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The tracking destination of new runs, and the home directory's MLflow servers."""

    off: str = ""
    installed: bool = False
    uri: str = ""  # MLFLOW_TRACKING_URI without credentials.
    # Reason why the tracking server does not answer, "" if the server answers, or None if the URI is not an HTTP
    # address.
    away: str | None = None
    servers: tuple[TrackingServer, ...] = ()


class ListeningPort(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A port on which a process listens. The `address` "*" denotes all addresses."""

    port: int
    address: str
    process: str


class PoolFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The Ray cluster of the home directory's pool."""

    directory: str = ""  # Directory that contains the pool's files, or "" without a pool.
    address: str = ""
    version: str = ""
    without_token: tuple[str, ...] = ()  # Ray processes that require no token.
    token_problem: str = ""  # Problem with the token file, for example that other users can read the file, or "".
    listeners: tuple[ListeningPort, ...] = ()
    addresses: tuple[str, ...] = ()
    unfenced: str = ""  # Reason why ranks could end the pool's Ray processes, or "".
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
    principals: PrincipalFacts | UnknownFact = UnknownFact()
    isolation: IsolationFacts | UnknownFact = UnknownFact()
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
        """Return the interpreter's path, quoted for a shell command line."""
        return shlex.quote(self.python)


class CheckOutcome(StrEnum):
    """The result category of a doctor check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"


class CheckGroup(StrEnum):
    """The area of a doctor check, in the report's order."""

    MACHINE = "machine"
    AGENT = "agent"
    SERVER = "server"
    GPUS = "GPUs"
    ENVIRONMENT = "environment"
    TRACKING = "tracking"
    RUNS = "runs"


class Finding(msgspec.Struct, frozen=True):
    """A finding of a doctor check. `mend` replaces the check's general remedy, unless `mend` is ""."""

    outcome: CheckOutcome
    sentence: str
    mend: str = ""


Probe = Callable[[MachineFacts], Sequence[Finding]]
A = TypeVar("A")


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A doctor check for a common problem, with the problem's cause and remedy."""

    code: str  # Stable name of the check.
    group: CheckGroup  # Area of the check.
    title: str  # Short title of the check.
    symptoms: tuple[str, ...]  # Symptoms that users see, verbatim where possible.
    cause: str  # Cause of the problem in one or two sentences.
    mend: str  # Remedy for the problem: a command or a sentence.
    # Function that judges the facts, or None for a problem that only a run can show. A check that returns no findings
    # does not apply.
    probe: Probe | None = None


def about(
    look: Callable[[MachineFacts], A | UnknownFact],
) -> Callable[[Callable[[MachineFacts, A], Sequence[Finding]]], Probe]:
    """Return a decorator for a function that checks one area's facts.

    If the area's facts are missing, the decorated check reports "unknown".
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
    """Return a single finding with a problem that may affect later runs."""
    return [Finding(CheckOutcome.WARNING, sentence, mend)]


def failed(sentence: str, mend: str = "") -> list[Finding]:
    """Return a single finding with a problem that prevents runs."""
    return [Finding(CheckOutcome.FAILED, sentence, mend)]


def unknown(sentence: str, mend: str = "") -> list[Finding]:
    """Return a single finding of a check that lacks facts."""
    return [Finding(CheckOutcome.UNKNOWN, sentence, mend)]
