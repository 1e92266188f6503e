"""Messages between an account without rights and the spawner.

    agent, supervisor ──▶ one request + descriptors ──▶ spawner ──▶ one answer, or a problem

A connection carries one request at a time. Each client process uses a connection of its own.
"""

from __future__ import annotations

import errno

import msgspec

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.model.egress import EgressPolicy
from serverless_gpu.model.isolation import Level
from serverless_gpu.node.isolation.levels import OfferedLevel
from serverless_gpu.node.isolation.principals import Principal
from serverless_gpu.node.isolation.sweeper import PrincipalFindings, SweepFindings


class SpawnerMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb"):
    """A request or an answer."""


class AskLevel(SpawnerMessage, frozen=True, kw_only=True, tag="measure"):
    """Request for the offered level. The answer is `LevelAnswer`."""


class AskPrincipal(SpawnerMessage, frozen=True, kw_only=True, tag="principal"):
    """Request for a principal, with the home directory of the node. The answer is `PrincipalAnswer`."""

    owner: str
    home: str


class AskZygote(SpawnerMessage, frozen=True, kw_only=True, tag="zygote"):
    """Request to start a zygote, with descriptors of its channel and log. The answer is `ZygoteAnswer`."""

    owner: str
    level: Level
    python: str
    flags: tuple[str, ...]
    environ: dict[str, str]
    mounts: tuple[dict[str, object], ...]
    cgroups: tuple[str, ...]
    trees: tuple[str, ...]
    preload: tuple[str, ...]


class AskEnvironment(SpawnerMessage, frozen=True, kw_only=True, tag="environment"):
    """Request to mount an environment. The answer is `Done` with a descriptor."""

    overlays: tuple[dict[str, object], ...]


class ShownFile(msgspec.Struct, frozen=True):
    """A file or directory of the node, with its path for the ranks."""

    source: str
    at: str
    writable: bool = False
    device: bool = False
    owner: int | None = None


class AskShow(SpawnerMessage, frozen=True, kw_only=True, tag="show"):
    """Request to mount files for a stem, with its pidfd. The answer is `Done` with a descriptor."""

    shown: tuple[ShownFile, ...]


class AskHide(SpawnerMessage, frozen=True, kw_only=True, tag="hide"):
    """Request to unmount the files below a directory, with a mount namespace. The answer is `Done`."""

    directory: str


class AskGive(SpawnerMessage, frozen=True, kw_only=True, tag="give"):
    """Request to let a principal use a file or directory. The answer is `Done`."""

    uid: int
    path: str
    writable: bool


class AskTake(SpawnerMessage, frozen=True, kw_only=True, tag="take"):
    """Request to take files back from a principal. The answer is `Done`."""

    uid: int
    path: str


class AskDevices(SpawnerMessage, frozen=True, kw_only=True, tag="devices"):
    """Request to limit the devices of a cgroup. The answer is `NoteAnswer`."""

    cgroup: str
    nodes: tuple[str, ...]


class AskStack(SpawnerMessage, frozen=True, kw_only=True, tag="stack"):
    """Request to open the file of a rank's stack. The answer is `Done` with a descriptor."""

    pid: int
    number: int


class AskKernelLog(SpawnerMessage, frozen=True, kw_only=True, tag="kernel_log"):
    """Request to open the kernel log. The answer is `Done` with a descriptor."""


class AskMemory(SpawnerMessage, frozen=True, kw_only=True, tag="memory"):
    """Request for the memory of a zygote and its standby processes. The answer is `MemoryAnswer`."""

    pids: tuple[int, ...]


class AskEgressState(SpawnerMessage, frozen=True, kw_only=True, tag="measure_egress"):
    """Request to try the network rules. The answer is `EgressAnswer`."""


class AskEnforce(SpawnerMessage, frozen=True, kw_only=True, tag="enforce"):
    """Request to load the rules for a policy, or to remove the policy. The answer is `NoteAnswer`."""

    home: str
    policy: EgressPolicy | None
    refresh: bool = False


class AskConfine(SpawnerMessage, frozen=True, kw_only=True, tag="confine"):
    """Request to confine a build to the index proxy, or to end this. The answer is `Done`."""

    home: str
    uid: int
    confined: bool


class AskAdmit(SpawnerMessage, frozen=True, kw_only=True, tag="admit"):
    """Request to apply the rules to a principal, and to open addresses of its gang. The answer is `Done`."""

    uid: int
    addresses: tuple[str, ...]


class AskSweep(SpawnerMessage, frozen=True, kw_only=True, tag="sweep"):
    """Request to remove what principals left. The answer is `SweepAnswer`."""


class AskFindings(SpawnerMessage, frozen=True, kw_only=True, tag="findings"):
    """Request for the latest findings, after adding one. The answer is `FindingsAnswer`."""

    note: str = ""


class LevelAnswer(SpawnerMessage, frozen=True, kw_only=True, tag="level"):
    """The level that the node offers."""

    level: Level
    problem: str

    @property
    def offered(self) -> OfferedLevel:
        """Return the level as a value."""
        return OfferedLevel(self.level, self.problem)


class PrincipalAnswer(SpawnerMessage, frozen=True, kw_only=True, tag="found"):
    """A principal of the node."""

    principal: Principal


class ZygoteAnswer(SpawnerMessage, frozen=True, kw_only=True, tag="started"):
    """The pid of a started zygote."""

    pid: int


class NoteAnswer(SpawnerMessage, frozen=True, kw_only=True, tag="note"):
    """The spawner has executed the request, with a note for the receipt, or ""."""

    note: str


class MemoryAnswer(SpawnerMessage, frozen=True, kw_only=True, tag="memory_bytes"):
    """Memory of processes in bytes."""

    memory_bytes: int


class EgressAnswer(SpawnerMessage, frozen=True, kw_only=True, tag="egress"):
    """Result of a trial of the network rules."""

    problem: str
    is_loaded: bool


class SweepAnswer(SpawnerMessage, frozen=True, kw_only=True, tag="swept"):
    """Findings of a sweep."""

    findings: SweepFindings


class FindingsAnswer(SpawnerMessage, frozen=True, kw_only=True, tag="found_principals"):
    """Number of principals, and the latest findings about them."""

    found: PrincipalFindings


class Done(SpawnerMessage, frozen=True, kw_only=True, tag="done"):
    """The spawner has executed the request."""


class Problem(SpawnerMessage, frozen=True, kw_only=True, tag="problem"):
    """The spawner could not or may not execute the request."""

    message: str
    hint: str = ""
    code: int = 0  # Number of the operating system's error, or 0 for `IsolationUnavailable`.

    @classmethod
    def of(cls, error: OSError | IsolationUnavailable) -> Problem:
        """Return the problem for an exception."""
        if isinstance(error, IsolationUnavailable):
            return cls(message=error.message, hint=error.hint or "")
        where = f": {error.filename}" if error.filename else ""
        return cls(message=f"{error.strerror or error}{where}", code=error.errno or errno.EIO)

    @property
    def exception(self) -> OSError | IsolationUnavailable:
        """Return the exception that the verb raises in the client."""
        if self.code:
            return OSError(self.code, self.message)
        return IsolationUnavailable(self.message, hint=self.hint)


Request = (
    AskLevel
    | AskPrincipal
    | AskZygote
    | AskEnvironment
    | AskShow
    | AskDevices
    | AskHide
    | AskGive
    | AskTake
    | AskStack
    | AskKernelLog
    | AskMemory
    | AskEgressState
    | AskEnforce
    | AskConfine
    | AskAdmit
    | AskSweep
    | AskFindings
)
Answer = (
    LevelAnswer
    | PrincipalAnswer
    | ZygoteAnswer
    | NoteAnswer
    | MemoryAnswer
    | EgressAnswer
    | SweepAnswer
    | FindingsAnswer
    | Done
    | Problem
)
