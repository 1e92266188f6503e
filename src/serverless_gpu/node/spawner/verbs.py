"""The verbs that need the rights of root, and their execution in a process of root.

    verb                 what root does
    measure              tries the isolation levels of the node
    principal            assigns a uid and a home directory
    start_zygote         starts an interpreter with the uid and the isolation of a principal
    environment          mounts a restored environment for a stem
    show, hide           mounts files and devices of an attempt for its ranks, and unmounts them
    limit_devices        limits the device nodes that the processes of a cgroup can open
    give, take           changes the owner of an attempt's files, to the principal and back
    open_stack           opens the memory file in which a rank writes its stack
    open_kernel_log      opens the kernel log, which names failed GPUs
    memory_of            measures the memory of a zygote
    measure_egress       tries the network rules in a network namespace of its own
    enforce              loads the network rules for the policy of a node, or removes the policy
    confine              closes everything but the index proxy for the uid of a build
    admit                applies the network rules to a uid, and opens the addresses of a gang for the uid
    sweep                removes what principals left on the node
    findings             returns the findings of the sweeper, and adds a finding of the agent

A node that runs as root executes the verbs in its agent and supervisors (`RootSpawner`). On a node with a spawner,
agent and supervisors use an account without rights. They ask the spawner's process (`client.py`).

Failure cases: A verb raises OSError or IsolationUnavailable before the first rank starts, and the attempt fails. No
verb ends processes, because the agent owns the cgroups of its attempts. `give` and `take` skip files with further hard
links, because such a file could also lie outside of the attempt.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.model.egress import Destination, EgressPolicy
from serverless_gpu.model.isolation import Level
from serverless_gpu.node.devices.kernel_log import KERNEL
from serverless_gpu.node.inside import protocol as inside
from serverless_gpu.node.isolation import grafts, machine_egress, nft, sweeper
from serverless_gpu.node.isolation.device_filter import limit_devices
from serverless_gpu.node.isolation.egress import EgressState
from serverless_gpu.node.isolation.grafts import Graft
from serverless_gpu.node.isolation.inspection import memory_of
from serverless_gpu.node.isolation.levels import OfferedLevel, measure
from serverless_gpu.node.isolation.principals import RANGE, Principal, PrincipalMap, Principals, uid_range
from serverless_gpu.node.isolation.sweeper import PrincipalFindings, SweepFindings
from serverless_gpu.node.isolation.views import view_of
from serverless_gpu.node.processes.spawn import CallerInterpreter, zygote_process

_WRITABLE = 0o2770
"""Mode of directories for a principal. Their files keep the group of the node, which may also read and write."""
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DEPTH_MAX = 64
_STACK = f"/memfd:{inside.STACK_FILE}"


class ZygoteOrder(NamedTuple):
    """A zygote of a principal, with the directories of its restored environment."""

    owner: str
    level: Level
    interpreter: CallerInterpreter
    trees: Sequence[str]
    preload: Sequence[str]


class ZygoteProcess(Protocol):
    """A started zygote, as `subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """Return the pid on the node."""

    def poll(self) -> int | None:
        """Return the exit code, or None if the zygote runs or the code is unknown."""

    def kill(self) -> None:
        """Kill the zygote, if this process has the right."""


class Spawner(Protocol):
    """The verbs of root on a node. Each verb raises OSError or IsolationUnavailable."""

    def measure(self) -> OfferedLevel:
        """Return the isolation level that this node offers."""

    def principal(self, owner: str, home: Path) -> Principal:
        """Return the principal of an owner of runs. `home` is the home directory of the node."""

    def start_zygote(self, order: ZygoteOrder, *, channel_fd: int, log: int) -> ZygoteProcess:
        """Start a zygote of a principal, with its end of the channel and a descriptor of its log."""

    def environment(self, overlays: Sequence[Mapping[str, object]]) -> int:
        """Return a descriptor of a mounted environment. The caller closes the descriptor."""

    def show(self, stem_pidfd: int, shown: Sequence[Graft]) -> int:
        """Mount files into the mount namespace of a stem, and return a descriptor of the namespace."""

    def hide(self, namespace: int, directory: str) -> None:
        """Unmount files of an attempt from a mount namespace."""

    def limit_devices(self, cgroup: str, nodes: Sequence[str]) -> str:
        """Let processes of a cgroup open only basic devices and `nodes`. Return a note for the receipt, or ""."""

    def give(self, uid: int, path: str, *, writable: bool) -> None:
        """Let a principal use the files of a directory, or read a single file."""

    def take(self, uid: int, path: str) -> None:
        """Make the node the owner of a directory and of all files that a principal owns below it."""

    def open_stack(self, pid: int, number: int) -> int:
        """Return a descriptor of the memory file for a rank's stack, which is descriptor `number` of the rank."""

    def open_kernel_log(self) -> int:
        """Return a descriptor of the kernel log."""

    def memory_of(self, pids: Sequence[int]) -> int:
        """Return the memory of processes in bytes, where each sharer of a page counts for its part (PSS)."""

    def measure_egress(self) -> EgressState:
        """Try the network rules in a network namespace of its own. The call takes about 0.2 s."""

    def enforce(self, home: Path, policy: EgressPolicy | None, *, refresh: bool = False) -> str:
        """Load the network rules for the policy of a node, or remove the policy.

        Return a note for the log, or "". `home` is the home directory of the node. With `refresh`, the rules follow
        changes of names and of other nodes' policies.
        """

    def confine(self, home: Path, uid: int, *, confined: bool) -> None:
        """Close everything but the index proxy for the uid of a build of a node, or open it again."""

    def admit(self, uid: int, addresses: Sequence[str]) -> None:
        """Apply the network rules to a principal, and open addresses of its gang for `egress_rules.GANG_S`."""

    def sweep(self) -> SweepFindings:
        """Remove what principals certainly left behind, and return the findings."""

    def findings(self, note: str = "") -> PrincipalFindings:
        """Return the latest findings about the principals, after adding a finding of the agent."""


class RootSpawner:
    """Executes the verbs in this process. The process needs the rights of root."""

    def __init__(
        self,
        environ: Mapping[str, str],
        account: int = 0,
        group: int = 0,
        opened: Sequence[Destination] | None = None,
    ) -> None:
        self._environ = environ
        self._account = account  # The uid and gid of the node's files.
        self._group = group
        self._principals = Principals(environ)
        self._egress = machine_egress.MachineEgress(environ, opened)

    def measure(self) -> OfferedLevel:
        return measure(self._environ)

    def principal(self, owner: str, home: Path) -> Principal:
        return self._principals.of(owner, home)

    def start_zygote(self, order: ZygoteOrder, *, channel_fd: int, log: int) -> ZygoteProcess:
        principal = self._principals.of(order.owner)
        view = view_of(principal, order.interpreter.python, order.trees)
        interpreter = order.interpreter._replace(view=view, level=order.level)
        return zygote_process(interpreter, order.preload, channel_fd=channel_fd, log=log)

    def environment(self, overlays: Sequence[Mapping[str, object]]) -> int:
        return grafts.detached_environment(overlays)

    def show(self, stem_pidfd: int, shown: Sequence[Graft]) -> int:
        return grafts.graft(stem_pidfd, shown, self._account)

    def hide(self, namespace: int, directory: str) -> None:
        grafts.remove_grafts(namespace, directory)

    def limit_devices(self, cgroup: str, nodes: Sequence[str]) -> str:
        return limit_devices(Path(cgroup) if cgroup else None, nodes, self._account)

    def give(self, uid: int, path: str, *, writable: bool) -> None:
        if writable:
            for fd, is_directory in _owned(path, self._account):
                os.fchown(fd, uid, self._group)
                if is_directory:
                    os.fchmod(fd, _WRITABLE)
            return
        has_own_group = uid in uid_range(self._environ.get(RANGE, ""))
        for fd, _ in _owned(path, self._account):
            if has_own_group:
                os.fchown(fd, -1, uid)
                os.fchmod(fd, 0o440)
            else:  # The primary group of an account can have other members.
                os.fchown(fd, uid, -1)
                os.fchmod(fd, 0o400)

    def take(self, uid: int, path: str) -> None:
        for fd, is_directory in _owned(path, uid):
            os.fchown(fd, self._account, self._group)
            if is_directory:
                os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) | 0o700)

    def open_stack(self, pid: int, number: int) -> int:
        return open_stack(pid, number)

    def open_kernel_log(self) -> int:
        return open_kernel_log()

    def memory_of(self, pids: Sequence[int]) -> int:
        return memory_of(pids)

    def measure_egress(self) -> EgressState:
        problem = machine_egress.measure(self._environ)
        return EgressState(problem, is_loaded=not problem and nft.exists(self._environ))

    def enforce(self, home: Path, policy: EgressPolicy | None, *, refresh: bool = False) -> str:
        if policy is None:
            self._egress.remove(str(home))
            return ""
        return self._egress.enforce(str(home), policy, refresh=refresh)

    def confine(self, home: Path, uid: int, *, confined: bool) -> None:
        self._egress.confine(str(home), uid, confined=confined)

    def close_network(self, owner: str) -> None:
        """Ensure that network rules apply to a principal, if the machine can load rules."""
        with contextlib.suppress(OSError, msgspec.MsgspecError, IsolationUnavailable):
            self._egress.protect(self._principals.of(owner).uid)

    def admit(self, uid: int, addresses: Sequence[str]) -> None:
        nft.cover(uid, self._environ)
        nft.admit(uid, addresses, self._environ)

    def sweep(self) -> SweepFindings:
        return sweeper.sweep(PrincipalMap(self._environ))

    def findings(self, note: str = "") -> PrincipalFindings:
        known = PrincipalMap(self._environ)
        if note:
            sweeper.note_finding(known, note)
        return PrincipalFindings(len(known.read()), sweeper.read_findings(known.place))


def open_stack(pid: int, number: int) -> int:
    """Return a descriptor of the memory file for a rank's stack. Raises OSError."""
    path = f"/proc/{pid}/fd/{number}"
    if not os.readlink(path).startswith(_STACK):  # Opening another file could have effects.
        raise OSError(errno.EINVAL, "not the file of a stack", path)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    if not os.readlink(f"/proc/self/fd/{fd}").startswith(_STACK):  # The rank has replaced the descriptor.
        os.close(fd)
        raise OSError(errno.EINVAL, "not the file of a stack", path)
    return fd


def open_kernel_log() -> int:
    """Return a descriptor of the kernel log. Raises OSError."""
    return os.open(KERNEL, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _owned(path: str, uid: int, at: int | None = None, depth: int = 0) -> Iterator[tuple[int, bool]]:
    """Yield descriptors of a file, or of a directory and the files below it, that belong to a uid.

    The descriptor is valid until the next one is requested. The second item is True for a directory.
    """
    try:
        fd = os.open(path, _OPEN, dir_fd=at)
    except OSError:
        if at is None:
            raise
        return  # A link, or a file that has gone.
    try:
        status = os.fstat(fd)
        is_directory = stat.S_ISDIR(status.st_mode)
        is_own = status.st_uid == uid
        if is_own and (is_directory or (stat.S_ISREG(status.st_mode) and status.st_nlink == 1)):
            yield fd, is_directory
        if is_directory and depth < _DEPTH_MAX:
            for name in os.listdir(fd):
                yield from _owned(name, uid, fd, depth + 1)
    finally:
        os.close(fd)
