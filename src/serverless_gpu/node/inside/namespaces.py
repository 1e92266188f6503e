"""Isolates principals and restored environments in user and mount namespaces.

    enter_user_namespace · become_member + admit      unshare ─▶ the parent writes uid_map, gid_map ─▶ the same ids
    enter_mounts
      unshare ─ root: mount namespace · other users and root without CAP_SYS_ADMIN: user namespace too
        └ / becomes a slave mount: new mounts stay in this namespace
           └ overlays, in order, outer overlays first
              └ the process drops its capabilities in the user namespace

User namespaces: The kernel allows a process to write the memory of other processes with the same uid. A process in a
user namespace cannot write the memory of processes in parent or sibling namespaces. User namespaces do not change
access to files, signals or mounts. Root maps all of its ids and stays root inside the namespace. Other users map only
their own uid and gid. For users other than root, files of other owners show the overflow uid 65534. Setuid programs
have no effect for users other than root.

Mounts: Only this process and its later descendants can see the mounts of `enter_mounts`. The kernel removes the mounts
when the last process that can see them ends. A later call of `enter_mounts` can mount over the same directory. A mount
is a mapping decoded from JSON: ``at`` (mount point), ``layers`` (names, top layer first) and ``directory`` (location of
the names). The kernel accepts at most 4 KB of layer names per overlay. Layer names are therefore short, and most layers
are symbolic links.

Failure cases: Functions raise an OSError that names the failed step and the path, or return the reason for the failure.

* User namespaces are disabled (EPERM), or the number of user namespaces is at its limit (ENOSPC).
* The process has more than one thread (EINVAL).
* A layer of an overlay does not exist (ENOENT).
* An overlay has too many layers (ENAMETOOLONG, raised before the system call).

After a failure, the process may be in only some of its namespaces. After a failure, the process must exit or use no
file of the environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence

from . import seal

_DONE = b"\0"
_REASON_BYTES_MAX = 4096


def become_member(parent: socket.socket) -> None:
    """Move this process into a new user namespace. The parent process must call `admit`.

    Raises OSError if the kernel or the parent process refuses, or if the parent process ends.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _make_dumpable(libc)
    if libc.unshare(_CLONE_NEWUSER) != 0:
        code = ctypes.get_errno()
        problem = f"a user namespace cannot be made: {os.strerror(code)}"
        parent.sendall(problem.encode())
        raise OSError(code, problem)
    parent.sendall(_DONE)
    answer = parent.recv(_REASON_BYTES_MAX)
    if answer != _DONE:
        raise OSError(answer.decode("utf-8", "replace") or "the parent did not map the ids of the user namespace")
    if os.geteuid() != 0:
        drop_capabilities()


def admit(child: socket.socket, pid: int) -> str:
    """Wait for a child in `become_member` and write its id maps. Return "" or the reason for a failure."""
    asked = child.recv(_REASON_BYTES_MAX)
    if asked != _DONE:
        return asked.decode("utf-8", "replace") or "the process ended while it created a user namespace"
    try:
        _write_maps(pid)
        child.sendall(_DONE)
    except OSError as error:
        return f"cannot map the ids of a user namespace: {error.strerror}"
    return ""


def enter_user_namespace() -> None:
    """Move this process into a new user namespace. Raises OSError on failure.

    A short-lived child process writes the id maps.
    """
    ours, theirs = socket.socketpair()
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        with contextlib.suppress(OSError):
            problem = admit(theirs, me)
            if problem:
                theirs.sendall(problem.encode())
        os._exit(0)
    theirs.close()
    try:
        become_member(ours)
    finally:
        ours.close()
        os.waitpid(pid, 0)


def probe_user_namespace() -> str:
    """Return "", or the reason why this process cannot create a user namespace.

    The calling process stays in its namespace, because only a short-lived child process tries to create a user
    namespace.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        with contextlib.suppress(OSError):
            become_member(theirs)
        os._exit(0)
    theirs.close()
    with ours:
        problem = admit(ours, pid)
    os.waitpid(pid, 0)
    return problem


def drop_capabilities() -> None:
    """Drop every capability of this process in its user namespace. Raises OSError on failure."""
    seal.set_capabilities(())


def _write_maps(pid: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        uids, gids = _own_ids("uid_map"), _own_ids("gid_map")
    else:
        uids, gids = f"{uid} {uid} 1\n", f"{gid} {gid} 1\n"
        with contextlib.suppress(FileNotFoundError):  # Kernels before 3.19 have no setgroups file.
            _write_map(f"/proc/{pid}/setgroups", "deny")
    _write_map(f"/proc/{pid}/uid_map", uids)
    _write_map(f"/proc/{pid}/gid_map", gids)


def _own_ids(name: str) -> str:
    """Return an id map that keeps every id of this process's namespace in a child namespace."""
    with open(f"/proc/self/{name}", encoding="ascii") as file:
        extents = [line.split() for line in file]
    return "".join(f"{first} {first} {count}\n" for first, _, count in extents)


def _write_map(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)  # The kernel accepts an id map only as a single write.
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


_CLONE_NEWNS = 0x20000
_CLONE_NEWUSER = 0x10000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_OPTION_BYTES_MAX = 4000
_LAYERS_MIN = 2  # The kernel refuses an overlay with a single layer.

Mount = Mapping[str, object]


def enter_mounts(mounts: Sequence[Mount]) -> None:
    """Mount overlays, outer overlays first, for this process and its descendants. Raises OSError.

    Root needs no user namespace and keeps its capabilities. In a container without CAP_SYS_ADMIN, root gets a user
    namespace that keeps every id. Other users keep their ids and gain no capabilities. The current directory does not
    change.
    """
    wanted = [_mount_options(mount) for mount in mounts]  # Invalid mounts raise an error before anything changes.
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0:
        _unshare_as_user(libc, _CLONE_NEWNS)
    else:
        _unshare_as_root(libc, _CLONE_NEWNS, "a mount namespace cannot be made")
    _keep_mounts(libc)
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for at, options, directory in wanted:
            os.chdir(directory)
            flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV
            _check(libc.mount(b"sgpu", at, b"overlay", flags, options), "cannot mount an overlay", os.fsdecode(at))
    finally:
        os.fchdir(here)
        os.close(here)
    if os.geteuid() != 0:
        drop_capabilities()


def unshare_namespaces(flags: int) -> None:
    """Create namespaces (CLONE_NEW… flags), within a new user namespace if necessary.

    Raises OSError when the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0:
        _unshare_as_user(libc, flags)
    else:
        _unshare_as_root(libc, flags, "a namespace cannot be made")


def mount_proc() -> None:
    """Mount the /proc of this pid namespace for this process and its descendants. Drop capabilities.

    Raises OSError when the kernel refuses. In most containers, the kernel refuses the mount, because parts of the
    existing /proc are hidden.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS), "a mount namespace cannot be made")
    _keep_mounts(libc)
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _check(libc.mount(b"proc", b"/proc", b"proc", flags, None), "cannot mount a file system", "/proc")
    if os.geteuid() != 0:
        drop_capabilities()


def probe_mounts(directory: str = "") -> str:
    """Return "", or the reason why this process cannot mount overlays.

    The function deletes its test files. `directory` selects the file system to test. "" selects the file system of
    temporary files.
    """
    if sys.platform != "linux":
        return "only Linux can mount overlays"
    try:
        place = tempfile.mkdtemp(prefix=".probe-", dir=directory or None)
    except OSError as error:
        return f"cannot create a directory in {directory or 'a temporary directory'}: {error.strerror}"
    try:
        for name in ("0", "1", "view"):
            os.mkdir(os.path.join(place, name))
        with open(os.path.join(place, "0", "seen"), "wb"):
            pass
        return _try_in_child(place)
    except OSError as error:
        return f"{error.strerror}"
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _try_in_child(place: str) -> str:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, _try_mount(place).encode()[:1024])
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        text = answer.read(1024).decode()
    os.waitpid(pid, 0)
    return "" if text == "ok" else text or "the process that tried to mount ended without an answer"


def _try_mount(place: str) -> str:
    view = os.path.join(place, "view")
    try:
        enter_mounts([{"at": view, "layers": ["0", "1"], "directory": place}])
        return "ok" if os.listdir(view) == ["seen"] else "a mounted overlay does not show its layers"
    except OSError as error:
        return error.strerror or str(error)


def _mount_options(mount: Mount) -> tuple[bytes, bytes, str]:
    at, layers, directory = mount["at"], mount["layers"], mount["directory"]
    if not (isinstance(at, str) and isinstance(directory, str) and isinstance(layers, (list, tuple))):
        raise OSError(errno.EINVAL, f"no mount: {mount}")
    names = [str(layer) for layer in layers]
    if len(names) < _LAYERS_MIN or any(not name or set(name) & set(":,\\") for name in names):
        raise OSError(errno.EINVAL, f"overlay layers are not valid: {names[:4]}", at)
    options = b"lowerdir=" + b":".join(os.fsencode(name) for name in names)
    if len(options) > _OPTION_BYTES_MAX:
        raise OSError(errno.ENAMETOOLONG, f"the names of {len(names)} overlay layers are too long", at)
    return os.fsencode(at), options, directory


def _keep_mounts(libc: ctypes.CDLL) -> None:
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), "cannot make mounts private to this process")


def _unshare_as_root(libc: ctypes.CDLL, flags: int, what: str) -> None:
    if libc.unshare(flags) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EPERM:
        raise OSError(code, f"{what}: {os.strerror(code)}")
    try:
        enter_user_namespace()
    except OSError as error:
        refused = f"{what}: {os.strerror(code)}; with a user namespace: {error.strerror or error}"
        raise OSError(code, refused) from None
    _check(libc.unshare(flags), what)


def _unshare_as_user(libc: ctypes.CDLL, flags: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    _make_dumpable(libc)
    _check(libc.unshare(_CLONE_NEWUSER | flags), "a user namespace cannot be made")
    with contextlib.suppress(FileNotFoundError):  # Kernels before 3.19 have no setgroups file.
        _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)  # The kernel accepts only a single write to an id map.
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be written: {error.strerror}", path) from None
    finally:
        os.close(fd)


def _make_dumpable(libc: ctypes.CDLL) -> None:
    """Allow a process that changed its user with setuid() to write its /proc files."""
    if libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 0:
        libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def _check(result: int, what: str, path: str = "") -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}", path or None)
