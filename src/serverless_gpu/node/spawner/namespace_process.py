"""The spawner of an account without root, in a user namespace with the subordinate ids of the account.

    client (account) ── lock ── connect ──▶ spawner runs: nothing to start
                            └── start ──▶ clean interpreter ── fork ──▶ user namespace, mount namespace ──▶ serves
                                              └── newuidmap, newgidmap ──────▶┘

Inside the namespace, the process is root over the uids of principals (`isolation/subordinates.py`), and serves the same
verbs as the spawner of root. Outside, it has the rights of the account. The namespace has no rights over the network,
the kernel log and devices of the machine.

All agents of the account share one spawner. The spawner has its own session, so Ctrl-C does not reach it. It ends by
itself after `IDLE_S` seconds without a client. The namespace exists as long as a process of a principal.

Failure cases:

* A prerequisite is missing, or the kernel refuses a step: the first verb raises IsolationUnavailable with the reason.
* The spawner is killed: runs continue, and the next verb starts another spawner. It enters the existing user namespace,
  because only a process of this namespace may mount files for the existing sandboxes.
* The range in /etc/subuid changes: runs of the earlier range end as usual, except that files of running attempts stay
  with their principals.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from serverless_gpu.errors import IsolationUnavailable, ServerlessGpuError
from serverless_gpu.node.base.home import account_sockets
from serverless_gpu.node.inside import mounts, sandbox
from serverless_gpu.node.isolation import subordinates
from serverless_gpu.node.isolation.principals import PLACE, RANGE, place_of
from serverless_gpu.node.isolation.subordinates import SubordinateIds
from serverless_gpu.node.processes import daemon
from serverless_gpu.node.spawner import process

_MODULE = "serverless_gpu.node.spawner.namespace_process"
_START_S = 30.0
_MAP_S = 10.0
_ANSWER_BYTES_MAX = 4_096
_RUN = "/run"
_RUN_ENTRIES_MAX = 4_096
_NS_GET_PARENT = 0xB702


def log_path(environ: Mapping[str, str]) -> Path:
    """Return the log file of the spawner."""
    return place_of(environ) / "spawner.log"


def socket_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the spawner's socket. Raises StorageError."""
    digest = hashlib.sha256(os.fsencode(place_of(environ))).hexdigest()[:12]
    return account_sockets() / f"spawner-{digest}.sock"


def connected(path: Path) -> socket.socket:
    """Return a connection to a spawner. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def connect(environ: Mapping[str, str]) -> socket.socket:
    """Return a connection to the spawner of this account, after starting it if necessary.

    Raises OSError or IsolationUnavailable.
    """
    try:
        path = socket_path(environ)
        with _locked(path):  # A spawner ends only under this lock, and only one client starts a spawner.
            try:
                return connected(path)
            except (FileNotFoundError, ConnectionRefusedError):
                _start(path, environ)
                return connected(path)
    except ServerlessGpuError as error:
        raise IsolationUnavailable(error.message, hint=error.hint) from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    fd = _open_lock(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _open_lock(path: Path) -> int:
    return os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _start(path: Path, environ: Mapping[str, str]) -> None:
    """Start a spawner and wait until it listens. Raises OSError or IsolationUnavailable."""
    subordinates.find_ids(environ)
    place = place_of(environ)
    try:
        place.mkdir(mode=0o711, parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{place} cannot be made: {error.strerror}"
        raise IsolationUnavailable(problem, hint=f"set {PLACE} to a directory on a local disk") from None
    answer, theirs = os.pipe()
    with open(answer, "rb") as reader:
        try:
            started = daemon.start(
                _MODULE, (theirs, str(path), str(place)), log=log_path(environ), environ=environ, fds=(theirs,)
            )
        finally:
            os.close(theirs)
        detached = daemon.reap(started, _START_S)
        ready = detached and bool(select.select([reader], [], [], _START_S)[0])
        text = reader.read(_ANSWER_BYTES_MAX) if ready else b""
    if text != _READY:
        problem = text.decode("utf-8", "replace") or "it ended, or did not answer in time"
        raise IsolationUnavailable(
            f"a spawner with subordinate ids cannot start: {problem}", hint=f"read {log_path(environ)}"
        )


_READY = b"\0"


def main(answer: int, path: str, place: str) -> NoReturn:
    """Serve the verbs in a user namespace. The descriptor `answer` gets a zero byte, or a problem."""
    ours, theirs = socket.socketpair()
    ids = subordinates.find_ids(os.environ)
    pid = os.fork()
    if pid:
        theirs.close()
        os.close(answer)
        _write_maps(ours, pid, ids)
        os._exit(0)
    ours.close()
    code = 1
    try:
        try:
            _enter(ids, theirs)
            _show_run(place)
            _try_place(place, ids.uids[-1])
            account = process.AgentAccount(ids.user, 0, 0)  # The ids of the account in the namespace.
            listener = process.listen(Path(path), account)
        except (OSError, ServerlessGpuError) as error:
            os.write(answer, (error.message if isinstance(error, ServerlessGpuError) else str(error)).encode())
            raise
        os.write(answer, _READY)
        os.close(answer)
        environ = {**os.environ, RANGE: f"{ids.uids[0]}-{ids.uids[-1]}", PLACE: place}
        process.serve(listener, account, environ, leave=lambda: _leave(listener, Path(path)))
        code = 0
    finally:
        if code and not isinstance(sys.exc_info()[1], SystemExit):
            sys.excepthook(*sys.exc_info())
        os._exit(code)


def _leave(listener: socket.socket, path: Path) -> bool:
    """Remove the socket and return True if no client needs the spawner.

    The lock stays locked until the process ends.
    """
    fd = _open_lock(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return False
    if select.select([listener], [], [], 0)[0]:  # A client has connected meanwhile.
        os.close(fd)
        return False
    path.unlink(missing_ok=True)
    return True


def _write_maps(child: socket.socket, pid: int, ids: SubordinateIds) -> None:
    """Write the id maps of a child's user namespace, unless the child has entered an existing one."""
    child.settimeout(_MAP_S)
    if child.recv(1) != b"n":
        return
    for name, extents in zip(subordinates.PROGRAMS, (ids.uid_map, ids.gid_map), strict=True):
        command = [name, str(pid), *map(str, extents)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_MAP_S, check=False)
        if done.returncode:
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            child.sendall(f"{name} failed: {lines[-1] if lines else f'exit code {done.returncode}'}".encode())
            return
    child.sendall(_READY)


def _enter(ids: SubordinateIds, parent: socket.socket) -> None:
    """Enter the user namespace of the account, and a mount namespace of this process. Raises OSError."""
    with parent:
        existing = find_namespace(ids)
        if existing is not None:
            mounts.set_namespace(existing, mounts.CLONE_NEWUSER)
            os.close(existing)
            parent.sendall(b"e")
        else:
            mounts.unshare(mounts.CLONE_NEWUSER)
            parent.sendall(b"n")
            answer = parent.recv(_ANSWER_BYTES_MAX)
            if answer != _READY:
                raise OSError(answer.decode("utf-8", "replace") or "the id maps cannot be written")
    mounts.unshare(mounts.CLONE_NEWNS)
    mounts.keep_mounts_in(private=False)


def find_namespace(ids: SubordinateIds) -> int | None:
    """Return a descriptor of the user namespace with these ids, which an earlier spawner made, or None."""
    wanted = {"uid_map": ids.uid_map, "gid_map": ids.gid_map}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if all(_numbers(f"/proc/{pid}/{name}") == list(extents) for name, extents in wanted.items()):
                fd = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
                if _is_child(fd):
                    return fd
                os.close(fd)
    return None


def _numbers(path: str) -> list[int]:
    with open(path, encoding="ascii") as file:
        return [int(word) for word in file.read().split()]


def _is_child(namespace: int) -> bool:
    """Return True if the parent of a user namespace is the namespace of this process. Raises OSError."""
    parent = fcntl.ioctl(namespace, _NS_GET_PARENT)
    try:
        return os.path.samestat(os.fstat(parent), os.stat("/proc/self/ns/user"))
    finally:
        os.close(parent)


def _show_run(place: str) -> None:
    """Make a directory for attempts in /run, which belongs to root, for this mount namespace.

    The other entries of /run stay visible. Raises OSError.
    """
    with tempfile.TemporaryDirectory(dir=place) as at:
        mounts.mount("tmpfs", at, mounts.NO_SETUID | mounts.NO_DEVICES, "size=4M,nr_inodes=16k,mode=0755")
        with os.scandir(_RUN) as entries:
            for entry in sorted(entries, key=lambda each: each.name)[:_RUN_ENTRIES_MAX]:
                with contextlib.suppress(OSError):  # The entry has gone, or the account may not see it.
                    _show_entry(entry, f"{at}/{entry.name}")
        os.makedirs(at + sandbox.ATTEMPT.removeprefix(_RUN), mode=0o711)
        fd = mounts.clone_tree(at)
        mounts.attach(fd, _RUN)
        os.close(fd)
        mounts.unmount(at)


def _show_entry(entry: os.DirEntry[str], at: str) -> None:
    if entry.path == sandbox.ATTEMPT:
        return
    if entry.is_symlink():
        os.symlink(os.readlink(entry.path), at)
        return
    if entry.is_dir():
        os.mkdir(at)
    else:
        os.close(os.open(at, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    fd = mounts.clone_tree(entry.path)
    try:
        mounts.attach(fd, at)
    finally:
        os.close(fd)


def _try_place(place: str, uid: int) -> None:
    """Raise IsolationUnavailable unless the file system of the principals can give files to them."""
    try:
        with tempfile.TemporaryDirectory(dir=place) as found:
            os.chown(found, uid, uid)
            os.chown(found, 0, 0)
    except OSError as error:
        raise IsolationUnavailable(
            f"{place} cannot contain files of principals: {error.strerror}",
            hint=f"set {PLACE} to a directory on a local disk",
        ) from None
