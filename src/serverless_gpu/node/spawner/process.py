"""The spawner: a process of root that executes a few verbs for the account of the node's agent.

    /run/serverless-gpu/spawner.sock (mode 0660, group of the account)
        │ connect, SO_PEERCRED
        ▼
    spawner (root) ── fork per connection ──▶ worker ── checks, executes, answers ──▶ zygotes, mounts, owners of files

Agent, uplink, monitor and supervisors run with the account and without capabilities. A worker executes one request at a
time. Zygotes and mounts outlive their worker and the spawner.

Failure cases:

* Another user than the account or root connects: the spawner closes the connection.
* A request is not valid or not permitted (`permissions.py`): the worker answers with the problem and continues.
* The client ends: its worker reads end of file and exits.
* The spawner ends: workers and zygotes continue, and new connections fail until the spawner runs again.
* Too many connections: the spawner closes further connections until a worker ends.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from serverless_gpu.errors import InvalidValue, IsolationUnavailable, StorageError
from serverless_gpu.model.egress import Destination, destination
from serverless_gpu.node.inside.channel import Channel, close_all
from serverless_gpu.node.isolation import accounts
from serverless_gpu.node.isolation.grafts import Graft
from serverless_gpu.node.isolation.principals import RANGE, uid_range
from serverless_gpu.node.processes.process_tree import uid_of
from serverless_gpu.node.processes.spawn import CallerInterpreter
from serverless_gpu.node.spawner import messages, permissions
from serverless_gpu.node.spawner.verbs import RootSpawner, ZygoteOrder

WORKERS_MAX = 1_024
IDLE_S = 10.0
"""Seconds without a connection after which the spawner reaps its workers, and ends if it has subordinate ids."""
_BACKLOG = 128
_REQUEST = msgspec.json.Decoder(messages.Request)


class AgentAccount(NamedTuple):
    """The account of the node's agent."""

    name: str
    uid: int
    gid: int


def find_account(name: str) -> AgentAccount:
    """Return an account by its name or uid. Raises InvalidValue for root and for unknown accounts."""
    try:
        found = pwd.getpwuid(int(name)) if name.isascii() and name.isdigit() else pwd.getpwnam(name)
    except KeyError:
        hint = f"create it: useradd --system --home-dir /var/lib/serverless-gpu --shell /usr/sbin/nologin {name}"
        raise InvalidValue(f"this machine has no account {name!r}", hint=hint) from None
    if found.pw_uid == 0:
        raise InvalidValue("the account of the agent must not be root", hint="name another account with --account")
    return AgentAccount(found.pw_name, found.pw_uid, found.pw_gid)


def listen(path: Path, account: AgentAccount) -> socket.socket:
    """Return the listening socket, which only root and the account's group may use. Raises StorageError.

    A socket file of an ended spawner is replaced.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise StorageError(f"another spawner listens at {path}", hint="stop it, or choose another --socket")
        path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        os.chown(path, 0, account.gid)
        path.chmod(0o660)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        hint = "run the spawner as root, and choose a directory of root with --socket"
        raise StorageError(f"the spawner cannot listen at {path}: {error.strerror}", hint=hint) from None
    except StorageError:
        listener.close()
        raise
    return listener


def opened_services(texts: Sequence[str]) -> tuple[Destination, ...]:
    """Return services of this machine that an allow-list may open. Raises InvalidValue.

    Args:
        texts: addresses with ports, for example ``127.0.0.1:5432``.
    """
    found = [(text, destination(text)) for text in texts]
    for text, each in found:
        if not each.is_endpoint:
            raise InvalidValue(f"{text!r} is not an address with a port", hint="for example --open 127.0.0.1:5432")
    return tuple(each for _, each in found)


def serve(
    listener: socket.socket,
    account: AgentAccount,
    environ: Mapping[str, str],
    opened: Sequence[Destination] = (),
    *,
    leave: Callable[[], bool] | None = None,
) -> None:
    """Serve connections until a signal ends the process, or until `leave` returns True.

    `opened` are services of this machine that an allow-list may open. After each `IDLE_S` seconds without a connection,
    the function reaps ended workers. Without workers, it calls `leave`.
    """
    workers: set[int] = set()
    # A Python handler could run in a hook of `os.fork`, which ignores exceptions.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    listener.settimeout(IDLE_S)
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            workers -= set(_ended(workers))
            if not workers and leave is not None and leave():
                return
            continue
        workers -= set(_ended(workers))
        if _peer(connection) not in (0, account.uid) or len(workers) >= WORKERS_MAX:
            connection.close()
            continue
        pid = os.fork()
        if pid == 0:
            listener.close()
            spawner = RootSpawner(environ, account.uid, account.gid, opened)
            _work(connection, Worker(spawner, account.uid, environ))
        workers.add(pid)
        connection.close()


def _ended(workers: set[int]) -> list[int]:
    """Return the pids of ended workers."""
    return [pid for pid in workers if os.waitpid(pid, os.WNOHANG)[0]]


def _peer(connection: socket.socket) -> int:
    """Return the uid of the process that has connected."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


def _work(connection: socket.socket, worker: Worker) -> NoReturn:
    code = 1
    try:
        channel = Channel(connection)
        while (received := channel.receive()) is not None:
            answer, fds = worker.answer(received[0], received[1])
            try:
                channel.send(msgspec.json.encode(answer), fds)
            finally:
                close_all(fds)
        code = 0
    except OSError:
        pass  # The client has ended.
    finally:
        if code and sys.exc_info()[0] is not None:
            sys.excepthook(*sys.exc_info())
        os._exit(code)


class Worker:
    """Checks and executes the requests of one connection."""

    def __init__(self, spawner: RootSpawner, account: int, environ: Mapping[str, str]) -> None:
        self._spawner = spawner
        self._account = account
        self._environ = environ
        self._started: list[object] = []  # An unreferenced Popen object warns while its process runs.

    def answer(self, body: bytes, fds: tuple[int, ...]) -> tuple[messages.Answer, tuple[int, ...]]:
        """Return the answer to a request, with descriptors for the caller to close.

        The method closes the request's descriptors.
        """
        try:
            return self._execute(_REQUEST.decode(body), fds)
        except msgspec.MsgspecError as error:
            hint = "start the spawner and the agent from the same version"
            return messages.Problem(message=f"the spawner does not know this request: {error}", hint=hint), ()
        except (OSError, IsolationUnavailable) as error:
            return messages.Problem.of(error), ()
        except KeyError as error:
            return messages.Problem(message=f"no account has this uid: {error}"), ()
        finally:
            close_all(fds)

    def _execute(self, request: messages.Request, fds: tuple[int, ...]) -> tuple[messages.Answer, tuple[int, ...]]:
        spawner = self._spawner
        match request:
            case messages.AskLevel():
                level, problem = spawner.measure()
                return messages.LevelAnswer(level=level, problem=problem), ()
            case messages.AskPrincipal():
                permissions.check_file(request.home, (self._account,))
                principal = spawner.principal(request.owner, Path(request.home))
                return messages.PrincipalAnswer(principal=principal), ()
            case messages.AskZygote():
                channel, log = _exactly(fds, 2)
                order = self._order(request)
                spawner.close_network(order.owner)  # The account may have applied no policy.
                process = spawner.start_zygote(order, channel_fd=channel, log=log)
                self._started.append(process)
                return messages.ZygoteAnswer(pid=process.pid), ()
            case messages.AskEnvironment():
                self._check_overlays(request.overlays)
                return messages.Done(), (spawner.environment(request.overlays),)
            case messages.AskShow():
                (stem,) = _exactly(fds, 1)
                uid = self._principal_of(stem)
                with contextlib.ExitStack() as opened:
                    shown = [self._checked(file, uid, opened) for file in request.shown]
                    return messages.Done(), (spawner.show(stem, shown),)
            case messages.AskDevices():
                if request.cgroup:
                    permissions.check_file(request.cgroup, (self._account,))
                for path in request.nodes:
                    permissions.check_device(path)
                return messages.NoteAnswer(note=spawner.limit_devices(request.cgroup, request.nodes)), ()
            case messages.AskStack():
                self._check_uid(uid_of(request.pid))
                return messages.Done(), (spawner.open_stack(request.pid, request.number),)
            case messages.AskKernelLog():
                return messages.Done(), (spawner.open_kernel_log(),)
            case messages.AskMemory():
                permissions.check_count(request.pids)
                uids = {pid: uid_of(pid) for pid in request.pids}
                running = [pid for pid, owner in uids.items() if owner is not None]
                for pid in running:
                    self._check_uid(uids[pid])
                return messages.MemoryAnswer(memory_bytes=spawner.memory_of(running)), ()
            case messages.AskEgressState():
                problem, is_loaded = spawner.measure_egress()
                return messages.EgressAnswer(problem=problem, is_loaded=is_loaded), ()
            case messages.AskEnforce():
                permissions.check_file(request.home, (self._account,))
                policy = None if request.policy is None else permissions.checked_policy(request.policy)
                note = spawner.enforce(Path(request.home), policy, refresh=request.refresh)
                return messages.NoteAnswer(note=note), ()
            case messages.AskConfine():
                permissions.check_file(request.home, (self._account,))
                self._check_uid(request.uid)
                spawner.confine(Path(request.home), request.uid, confined=request.confined)
            case messages.AskAdmit():
                self._check_uid(request.uid)
                permissions.check_gang(request.addresses)
                spawner.admit(request.uid, request.addresses)
            case messages.AskSweep():
                os.nice(19)  # Only a sweeper's process uses this connection.
                return messages.SweepAnswer(findings=spawner.sweep()), ()
            case messages.AskFindings():
                permissions.check_note(request.note)
                return messages.FindingsAnswer(found=spawner.findings(request.note)), ()
            case messages.AskHide():
                (namespace,) = _exactly(fds, 1)
                permissions.check_attempt(request.directory)
                spawner.hide(namespace, request.directory)
            case messages.AskGive():
                self._check_uid(request.uid)
                permissions.check_file(request.path, (self._account, request.uid))
                spawner.give(request.uid, request.path, writable=request.writable)
            case messages.AskTake():
                self._check_uid(request.uid)
                permissions.check_file(request.path, (self._account, request.uid))
                spawner.take(request.uid, request.path)
        return messages.Done(), ()

    def _checked(self, file: messages.ShownFile, uid: int, opened: contextlib.ExitStack) -> Graft:
        """Return a mount of a file that the account may show. Raises OSError or IsolationUnavailable.

        The account could replace a path after the check. The mount therefore names an open descriptor.
        """
        graft = Graft(*msgspec.structs.astuple(file))
        if file.device:
            permissions.check_device(file.source)
        elif file.owner is None:
            fd = permissions.open_file(file.source, (self._account, uid))
            opened.callback(os.close, fd)
            return graft._replace(source=f"/proc/self/fd/{fd}")
        elif file.owner != uid:
            raise IsolationUnavailable(f"{file.source} cannot belong to uid {file.owner}", hint="")
        else:
            permissions.check_file(file.source, (self._account,))
        return graft

    def _order(self, request: messages.AskZygote) -> ZygoteOrder:
        known = (os.path.realpath(sys.base_prefix), os.path.realpath(sys.prefix))
        if not request.mounts:  # The interpreter of a mounted environment does not exist yet.
            permissions.check_interpreter(request.python, self._account, known)
        self._check_overlays(request.mounts)
        for path in (*request.trees, *request.cgroups):
            permissions.check_file(path, (self._account,))
        interpreter = CallerInterpreter(
            request.python, request.flags, request.environ, mounts=request.mounts, cgroups=request.cgroups
        )
        return ZygoteOrder(request.owner, request.level, interpreter, request.trees, request.preload)

    def _check_overlays(self, overlays: Sequence[Mapping[str, object]]) -> None:
        for path in permissions.overlay_sources(overlays):
            permissions.check_file(path, (self._account,))

    def _check_uid(self, uid: int | None) -> int:
        """Return a uid of the range, or of an account that a principal may use. Raises IsolationUnavailable."""
        uids = uid_range(self._environ.get(RANGE, ""))
        if uid is None or uid in uids or not accounts.is_same_name(self._environ):
            return permissions.check_uid(uid, uids)
        name = pwd.getpwuid(uid).pw_name
        rules = accounts.AccountRules(*accounts.first_ids(), {0, self._account}, uids)
        return accounts.chosen(name, accounts.look_up(name), rules)[0]

    def _principal_of(self, stem: int) -> int:
        """Return the uid of a stem. Raises IsolationUnavailable unless the stem belongs to a principal."""
        with open(f"/proc/self/fdinfo/{stem}", encoding="ascii") as file:
            pids = [int(line.split()[1]) for line in file if line.startswith("Pid:")]
        return self._check_uid(uid_of(pids[0]) if pids else None)


def _exactly(fds: tuple[int, ...], number: int) -> tuple[int, ...]:
    """Return the descriptors of a request. Raises IsolationUnavailable for another number of descriptors."""
    if len(fds) != number:
        raise IsolationUnavailable(f"the request has {len(fds)} descriptors in place of {number}", hint="")
    return fds
