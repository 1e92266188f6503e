"""Types of `--json` output that are not defined in another module.

`sgpu schema COMMAND` prints a type as a JSON schema. Only `sgpu schema` loads this module. Tests compare each command's
output with the command's type.

Times ending in `_ns` are nanoseconds since 1970. All other times are UTC timestamps in ISO 8601 format. Money amounts
are in micros (millionths of the currency).
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from serverless_gpu.cli.environments.show import Pth
from serverless_gpu.cli.this_machine import ServerState
from serverless_gpu.environment.documents import SnapshotMember
from serverless_gpu.environment.scan.changes import Change
from serverless_gpu.environment.stores.collection import Tally
from serverless_gpu.model.cost import Cost
from serverless_gpu.model.lifecycle.attempt import Stopped
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.base.protocol import Status
from serverless_gpu.wire.runs import AttemptView

# --- runs -------------------------------------------------------------------------------------------------------------


class RunCrew(TypedDict):
    """A node of a server run and the state of its ranks."""

    node: str
    state: str
    reason: str | None
    first_rank: int
    gpus: int
    sentence: str
    heard: str
    started: str | None
    ended: str | None


class ListedRun(TypedDict):
    """A run in the output of `sgpu runs`. Some keys exist only for local runs or server runs."""

    id: str
    kind: str
    name: str
    state: str
    reason: str | None
    live: bool
    created: str
    started: str | None
    ended: str | None
    took_ms: int | None
    ranks: int
    gpu_type: str | None
    gpu_ms: int | None
    micros: int | None
    currency: str | None
    # Keys that only a local run has.
    devices: NotRequired[list[str] | None]
    directory: NotRequired[str]
    problem: NotRequired[str]
    size_bytes: NotRequired[int]
    # Keys that only a server run has.
    gpus: NotRequired[int]
    owner: NotRequired[str]
    team: NotRequired[str]
    pool: NotRequired[str]
    node: NotRequired[str]
    nodes: NotRequired[list[RunCrew]]
    attempt: NotRequired[int]
    sentence: NotRequired[str]
    waiting: NotRequired[dict[str, Any] | None]
    server: NotRequired[bool]


class RunFile(TypedDict):
    """A file that belongs to a run."""

    name: str
    size_bytes: int


class RunDetails(ListedRun):
    """All details of one run in the output of `sgpu show`."""

    spec: RunSpec | None
    receipt: Receipt | None
    failure: str
    files: list[RunFile]
    # Keys that only a local run has.
    stopped: NotRequired[Stopped | None]
    tracked: NotRequired[str]
    # Keys that only a server run has.
    attempts: NotRequired[list[AttemptView]]
    receipts: NotRequired[dict[str, Receipt | None]]
    cost: NotRequired[Cost | None]


class ResultCopy(TypedDict):
    """Copy of one rank's result in a file."""

    rank: int
    path: str
    size_bytes: int


class MetricSeries(TypedDict):
    """Samples of one telemetry metric."""

    times: list[float]
    values: list[float]


MetricSeriesByName = dict[str, MetricSeries]


class DryRunEstimate(TypedDict):
    """Estimated start time and cost of a run."""

    start: str | None
    seconds: float | None
    is_bound: bool
    basis: str
    node: str
    nodes: list[str]
    place: int
    impossible: bool
    cost: Any
    policy: str
    budgets: list[str]


class DryRun(TypedDict):
    """Run request and estimate in the output of `sgpu submit --dry-run`."""

    submitted: bool
    server: str | None
    imports: str
    snapshot: str | None
    spec: RunSpec
    estimate: DryRunEstimate


# --- this machine -----------------------------------------------------------------------------------------------------


class MlflowState(TypedDict):
    """An MLflow server of this home directory."""

    uri: str
    ready: bool
    stage: str
    problem: str
    store: str
    pid: int | None
    version: str
    python: str
    memory_bytes: int
    used_s: float
    directory: str


class MachineStatus(TypedDict):
    """State of the agent, the server and the MLflow servers of this home directory."""

    agent: Status | None
    server: ServerState | None
    mlflow: list[MlflowState]


class ListedDevice(TypedDict):
    """A device of this machine."""

    uuid: str
    type: str
    kind: str
    memory_bytes: int
    state: str


class GpuList(TypedDict):
    """Devices of this machine, and reasons for unusable devices."""

    devices: list[ListedDevice]
    unavailable: list[str]


class TopFrame(TypedDict):
    """One frame of `sgpu top`. The value null means unknown."""

    at_ns: int
    node: str
    host: dict[str, Any]
    devices: list[dict[str, Any]]
    runs: list[dict[str, Any]]


class DoctorFinding(TypedDict):
    """A finding of a check."""

    outcome: str
    sentence: str
    mend: str


class DoctorCheck(TypedDict):
    """One check of `sgpu doctor` and its findings."""

    code: str
    group: str
    title: str
    cause: str
    findings: list[DoctorFinding]


class DoctorReport(TypedDict):
    """Results of all checks by `sgpu doctor`."""

    version: str
    python: str
    failed: bool
    checks: list[DoctorCheck]


class Setting(TypedDict):
    """A server setting, its value and the value's origin."""

    name: str
    value: Any
    origin: str


LogLine = dict[str, Any]
"""A line of the server's log: `ts`, `level`, `logger`, `msg`, and fields of the logged event."""

# --- environments -----------------------------------------------------------------------------------------------------


class EnvironmentRoot(TypedDict):
    """A directory of `sys.path` and its units."""

    kind: str
    directory: str
    before: Any
    members: list[SnapshotMember]
    unowned: list[str]
    generated: list[str]
    pth: list[Pth]


class EnvironmentDetails(TypedDict):
    """Contents of a Python environment."""

    known: bool
    address: str
    captured: str | None
    size_bytes: int
    files: int
    interpreter: str
    python: str
    prefix: str
    roots: list[EnvironmentRoot]
    left_out: list[str]
    variables: Any


class EnvironmentFingerprint(TypedDict):
    """Address of an environment and its changes since the last capture."""

    address: str
    known: bool
    last: str | None
    changes: list[Change]
    times_ms: dict[str, int]


class EnvironmentDifference(TypedDict):
    """Differences between two snapshots."""

    old: str
    new: str
    changes: list[Change]
    variables_added: list[str]
    variables_removed: list[str]


class EnvironmentCapture(TypedDict):
    """Result of a capture."""

    address: str
    size_bytes: int
    files: int
    units: int
    new: list[SnapshotMember]
    sent_bytes: int
    store: str
    took_ms: int
    left_out: list[str]
    repaired: NotRequired[list[str]]


class EnvironmentRestore(TypedDict):
    """Result of a restore."""

    address: str
    tree: str
    python: str
    linked: int
    copied: int
    fetched_bytes: int
    units_fetched: int
    ms: int
    note: str
    size_bytes: int
    files: int


class EnvironmentCollection(TypedDict):
    """Result of a store garbage collection."""

    kept: Tally
    condemned: Tally
    waiting: Tally
    deleted: Tally
    deleted_keys: list[str]
    condemned_keys: list[str]
    unreadable: list[str]
    busy: bool
    dry_run: bool
    store: str
    in_use: list[str]
    cache_units: int
    cache_bytes: int
    cache_freed_bytes: int


# --- money and planning -----------------------------------------------------------------------------------------------

UsageReport = TypedDict(
    "UsageReport",
    {
        "report": list[dict[str, Any]],
        "from": str,
        "to": str,
        "totals": list[dict[str, Any]],
        "is_cut": bool,
        "remarks": list[str],
        "formulas": list[str],
    },
)
"""Usage and cost report with one row for each group."""

Advice = TypedDict(
    "Advice",
    {
        "source": str,
        "from": str,
        "to": str,
        "left_out": list[str],
        "gpu_type": str,
        "attempts": int,
        "gpu_ms": int,
        "unpriced_ms": int,
        "charged_micros": int,
        "waited_gpu_ms": int,
        "currency": str,
        "advice": dict[str, Any] | None,
        "queues": list[dict[str, Any]],
        "runs": list[dict[str, Any]],
        "formulas": list[Any],
    },
)
"""Recommended number of reserved GPUs, the costs, and runs that underused their GPUs."""


class Simulation(TypedDict):
    """Replay outcome of each scheduling policy."""

    trace: str
    left_out: dict[str, int]
    cluster: str
    gpus: int
    gang_gpus: int
    impossible: dict[str, int]
    policies: dict[str, dict[str, Any]]
