"""Asks the spawner of this node, for agents and supervisors without the rights of root.

    find_spawner ─ SERVERLESS_GPU_SPAWNER names a socket ─▶ SpawnerClient
                 ├ this process is root ─▶ RootSpawner in this process
                 └ otherwise ─▶ SubordinateSpawner, which starts a spawner in a user namespace (`namespace_process.py`)

Failure cases: If the spawner does not run or does not answer in time, the verb raises IsolationUnavailable. The client
connects again for the next verb. A spawner in a user namespace that has ended starts again with the next verb.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.model.egress import EgressPolicy
from serverless_gpu.model.isolation import NONE
from serverless_gpu.node.inside import linux
from serverless_gpu.node.inside.channel import Channel, close_all
from serverless_gpu.node.isolation import SPAWNER, subordinates
from serverless_gpu.node.isolation.egress import EgressState
from serverless_gpu.node.isolation.grafts import Graft
from serverless_gpu.node.isolation.levels import OfferedLevel, missing_limits, problem_of_cgroups
from serverless_gpu.node.isolation.principals import Principal
from serverless_gpu.node.isolation.sweeper import PrincipalFindings, SweepFindings
from serverless_gpu.node.processes.process_tree import uid_of
from serverless_gpu.node.processes.spawn import clean_variables
from serverless_gpu.node.spawner import messages, namespace_process
from serverless_gpu.node.spawner.namespace_process import connected
from serverless_gpu.node.spawner.verbs import (
    RootSpawner,
    Spawner,
    ZygoteOrder,
    ZygoteProcess,
    open_kernel_log,
    open_stack,
)

_ANSWER_S = 60.0
_SWEEP_S = 600.0
_IDLE_MAX = 4
_DELEGATE = "start the node in a systemd unit with Delegate=yes (systemd-run --user --scope -p Delegate=yes …)"
_UNEXPECTED = "the node's spawner gave an answer of another kind"
_ANSWER = msgspec.json.Decoder(messages.Answer)


def find_spawner(environ: Mapping[str, str], purpose: str = "") -> Spawner:
    """Return the spawner of this node: its process, this process, or one with subordinate ids.

    Users with another `purpose` use other connections. A connection without concurrent requests stays the same, and so
    does the spawner's memory of what it has loaded.
    """
    path = environ.get(SPAWNER, "")
    if path:
        return _client_of(Path(path), os.getpid(), purpose)
    if os.geteuid() == 0:
        return RootSpawner(environ)
    return _subordinate_spawner(tuple(sorted(clean_variables(environ).items())), os.getpid(), purpose)


@functools.cache
def _client_of(path: Path, _pid: int, _purpose: str) -> SpawnerClient:
    """Return the client of this process. A forked process must not share its parent's connections."""
    return SpawnerClient(path)


@functools.cache
def _subordinate_spawner(variables: tuple[tuple[str, str], ...], _pid: int, _purpose: str) -> SubordinateSpawner:
    return SubordinateSpawner(dict(variables))


class SpawnedZygote:
    """A zygote that the spawner has started. Only the spawner could read the exit code."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    @property
    def pid(self) -> int:
        return self._pid

    def poll(self) -> int | None:
        return None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self._pid, signal.SIGKILL)


class SpawnerClient:
    """Connections to the spawner's process, made when a thread needs one. Thread-safe.

    The threads of a process do not wait for each other.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._idle: list[Channel] = []  # Connections that no thread uses.

    def measure(self) -> OfferedLevel:
        try:
            answer, _ = self._ask(messages.AskLevel())
        except (OSError, IsolationUnavailable) as error:
            return OfferedLevel(NONE, _line(error))
        return answer.offered if isinstance(answer, messages.LevelAnswer) else OfferedLevel(NONE, _UNEXPECTED)

    def principal(self, owner: str, home: Path) -> Principal:
        answer, _ = self._ask(messages.AskPrincipal(owner=owner, home=str(home)))
        if not isinstance(answer, messages.PrincipalAnswer):
            raise IsolationUnavailable(_UNEXPECTED, hint=self._hint)
        return answer.principal

    def start_zygote(self, order: ZygoteOrder, *, channel_fd: int, log: int) -> ZygoteProcess:
        interpreter = order.interpreter
        request = messages.AskZygote(
            owner=order.owner,
            level=order.level,
            python=interpreter.python,
            flags=tuple(interpreter.flags),
            environ=dict(interpreter.environ),
            mounts=tuple(dict(mount) for mount in interpreter.mounts),
            cgroups=tuple(interpreter.cgroups),
            trees=tuple(order.trees),
            preload=tuple(order.preload),
        )
        answer, _ = self._ask(request, (channel_fd, log))
        if not isinstance(answer, messages.ZygoteAnswer):
            raise IsolationUnavailable(_UNEXPECTED, hint=self._hint)
        return SpawnedZygote(answer.pid)

    def environment(self, overlays: Sequence[Mapping[str, object]]) -> int:
        return self._descriptor(messages.AskEnvironment(overlays=tuple(dict(each) for each in overlays)))

    def show(self, stem_pidfd: int, shown: Sequence[Graft]) -> int:
        request = messages.AskShow(shown=tuple(messages.ShownFile(*each) for each in shown))
        return self._descriptor(request, (stem_pidfd,))

    def hide(self, namespace: int, directory: str) -> None:
        self._ask(messages.AskHide(directory=directory), (namespace,))

    def limit_devices(self, cgroup: str, nodes: Sequence[str]) -> str:
        answer, _ = self._ask(messages.AskDevices(cgroup=cgroup, nodes=tuple(nodes)))
        return answer.note if isinstance(answer, messages.NoteAnswer) else _UNEXPECTED

    def give(self, uid: int, path: str, *, writable: bool) -> None:
        self._ask(messages.AskGive(uid=uid, path=path, writable=writable))

    def take(self, uid: int, path: str) -> None:
        self._ask(messages.AskTake(uid=uid, path=path))

    def open_stack(self, pid: int, number: int) -> int:
        return self._descriptor(messages.AskStack(pid=pid, number=number))

    def open_kernel_log(self) -> int:
        return self._descriptor(messages.AskKernelLog())

    def memory_of(self, pids: Sequence[int]) -> int:
        answer, _ = self._ask(messages.AskMemory(pids=tuple(pids)))
        if not isinstance(answer, messages.MemoryAnswer):
            raise IsolationUnavailable(_UNEXPECTED, hint=self._hint)
        return answer.memory_bytes

    def measure_egress(self) -> EgressState:
        try:
            answer, _ = self._ask(messages.AskEgressState())
        except (OSError, IsolationUnavailable) as error:
            return EgressState(str(error), is_loaded=False)
        if not isinstance(answer, messages.EgressAnswer):
            return EgressState(_UNEXPECTED, is_loaded=False)
        return EgressState(answer.problem, answer.is_loaded)

    def enforce(self, home: Path, policy: EgressPolicy | None, *, refresh: bool = False) -> str:
        answer, _ = self._ask(messages.AskEnforce(home=str(home), policy=policy, refresh=refresh))
        if not isinstance(answer, messages.NoteAnswer):
            raise IsolationUnavailable(_UNEXPECTED, hint=self._hint)
        return answer.note

    def confine(self, home: Path, uid: int, *, confined: bool) -> None:
        self._ask(messages.AskConfine(home=str(home), uid=uid, confined=confined))

    def admit(self, uid: int, addresses: Sequence[str]) -> None:
        self._ask(messages.AskAdmit(uid=uid, addresses=tuple(addresses)))

    def sweep(self) -> SweepFindings:
        answer, _ = self._ask(messages.AskSweep(), limit_s=_SWEEP_S)
        if not isinstance(answer, messages.SweepAnswer):
            raise IsolationUnavailable(_UNEXPECTED, hint=self._hint)
        return answer.findings

    def findings(self, note: str = "") -> PrincipalFindings:
        answer, _ = self._ask(messages.AskFindings(note=note))
        if not isinstance(answer, messages.FindingsAnswer):
            raise IsolationUnavailable(_UNEXPECTED, hint=self._hint)
        return answer.found

    def close(self) -> None:
        """Close the unused connections. The next verb makes a new one."""
        while self._idle:
            self._idle.pop().close()

    @property
    def _hint(self) -> str:
        return f"start the spawner as root: sgpu node spawner --socket {self._path}"

    def _descriptor(self, request: messages.Request, fds: tuple[int, ...] = ()) -> int:
        _, received = self._ask(request, fds)
        if len(received) != 1:
            close_all(received)
            raise IsolationUnavailable(_UNEXPECTED, hint=self._hint)
        return received[0]

    def _ask(
        self, request: messages.Request, fds: tuple[int, ...] = (), limit_s: float = _ANSWER_S
    ) -> tuple[messages.Answer, tuple[int, ...]]:
        """Return the spawner's answer with its descriptors. Raises OSError or IsolationUnavailable."""
        channel = received = None
        try:
            channel = self._take_channel()
            channel.sock.settimeout(limit_s)
            channel.send(msgspec.json.encode(request), fds)
            received = channel.receive()
            if received is None:
                raise ConnectionResetError
            answer = _ANSWER.decode(received[0])
        except (OSError, msgspec.MsgspecError) as error:
            if received is not None:
                close_all(received[1])
            if channel is not None:
                channel.close()
            self.close()
            problem = f"the node's spawner at {self._path} does not answer: {str(error) or type(error).__name__}"
            raise IsolationUnavailable(problem, hint=self._hint) from None
        self._idle.append(channel)
        if len(self._idle) > _IDLE_MAX:
            self._idle.pop(0).close()
        if isinstance(answer, messages.Problem):
            raise answer.exception
        return answer, received[1]

    def _take_channel(self) -> Channel:
        """Return an unused connection, or make one.

        A signal handler may use a verb while its own thread waits for an answer.
        """
        while True:
            try:
                channel = self._idle.pop()
            except IndexError:
                return self._connect()
            if not linux.readable([channel.fileno()], 0):
                return channel
            channel.close()  # The spawner has ended. It sends nothing without a request.

    def _connect(self) -> Channel:
        connection = connected(self._path)
        connection.settimeout(_ANSWER_S)
        return Channel(connection)


class SubordinateSpawner(SpawnerClient):
    """Asks a spawner in a user namespace of this account, which the first verb starts.

    A spawner in a user namespace cannot open the kernel log, and runs without isolation need no spawner.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(Path("/"))
        self._environ = environ

    def measure(self) -> OfferedLevel:
        try:
            ids = subordinates.find_ids(self._environ)
            if problem := problem_of_cgroups(self._environ):
                raise IsolationUnavailable(f"the account cannot end the processes of a run: {problem}", hint=_DELEGATE)
        except (OSError, IsolationUnavailable) as error:
            return OfferedLevel(NONE, f"the node's agent does not run as root and has no spawner, and {_line(error)}")
        level, problem = super().measure()
        if level == NONE:
            return OfferedLevel(NONE, problem)
        missing = " and ".join(missing_limits(self._environ))
        lacks = f", without the cgroup controllers {missing}. Remedy: {_DELEGATE}" if missing else ""
        return OfferedLevel(level, f"{problem}{', ' if problem else ''}with {ids}{lacks}")

    def open_stack(self, pid: int, number: int) -> int:
        return open_stack(pid, number) if uid_of(pid) == os.geteuid() else super().open_stack(pid, number)

    def open_kernel_log(self) -> int:
        return open_kernel_log()

    @property
    def _hint(self) -> str:
        return f"read {namespace_process.log_path(self._environ)}"

    def _connect(self) -> Channel:
        self._path = namespace_process.socket_path(self._environ)
        connection = namespace_process.connect(self._environ)
        connection.settimeout(_ANSWER_S)
        return Channel(connection)


def _line(error: Exception) -> str:
    """Return an error and its remedy as one line."""
    if isinstance(error, IsolationUnavailable):
        return f"{error.message}. Remedy: {error.hint}" if error.hint else error.message
    return str(error)
