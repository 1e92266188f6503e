"""User and mount namespaces of this process: containment of a principal's processes, and restored environments.

    enter_user_namespace · become_member + admit      unshare ─▶ the parent writes uid_map, gid_map ─▶ the same ids
    enter_mounts
      unshare ─ root: mount namespace · others, also root without CAP_SYS_ADMIN: user namespace too
        └ / becomes a slave: what is mounted here stays here
           └ overlays, in order, outer ones first
              └ capabilities of the user namespace are given up

User namespace: the kernel lets a process of the same uid write another one's memory, but not when the other one is in a
user namespace above, or beside. Files, signals and mounts stay as they are. Root maps every id it has, and stays root
within. Others map their own uid and gid: other owners of files look like `nobody`, setuid programs do nothing.

Mounts: only processes that are forked or executed after `enter_mounts` see them, and they end with the last one. A
later `enter_mounts` can mount over the same place, in a child too. A mount is a mapping, as it comes out of JSON:
``at`` (where), ``layers`` (names, the top one first), ``directory`` (where the names are). The kernel takes all names
of an overlay on one page of 4 KB, so names are short, mostly links.

Failure cases, each an OSError that names step and place, or a sentence: user namespaces are switched off or used up
(EPERM, ENOSPC), more than one thread (EINVAL), a layer that is gone (ENOENT), too many layers (ENAMETOOLONG, before the
kernel is asked). After a failure the process may be half way in: it must end, or use nothing of the environment.
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

_CAPABILITY_VERSION_3 = 0x20080522
_DONE = b"\0"
_REASON_BYTES_MAX = 4096


def become_member(parent: socket.socket) -> None:
    """Move this process into a user namespace of its own, together with a parent that calls `admit`.

    Raises OSError when the kernel refuses, or the parent, which knows why, is gone.
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
        raise OSError(answer.decode("utf-8", "replace") or "the ids of a user namespace were not mapped")
    if os.geteuid() != 0:
        drop_capabilities()


def admit(child: socket.socket, pid: int) -> str:
    """Wait for a child that calls `become_member`, write its maps; return "", or why without namespace."""
    asked = child.recv(_REASON_BYTES_MAX)
    if asked != _DONE:
        return asked.decode("utf-8", "replace") or "the process ended while it made a user namespace"
    try:
        _write_maps(pid)
        child.sendall(_DONE)
    except OSError as error:
        return f"the ids of a user namespace cannot be mapped: {error.strerror}"
    return ""


def enter_user_namespace() -> None:
    """Move this process into a user namespace of its own; a short-lived child writes the maps. OSError."""
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
    """Return why this process cannot have a user namespace of its own, or ""; nothing of it remains."""
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
    """Give up every capability of this process in its user namespace; raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    _check(libc.capset(header, none), "capabilities cannot be given up")


def _write_maps(pid: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        uids, gids = _own_ids("uid_map"), _own_ids("gid_map")
    else:
        uids, gids = f"{uid} {uid} 1\n", f"{gid} {gid} 1\n"
        with contextlib.suppress(FileNotFoundError):  # kernels before 3.19
            _write_map(f"/proc/{pid}/setgroups", "deny")
    _write_map(f"/proc/{pid}/uid_map", uids)
    _write_map(f"/proc/{pid}/gid_map", gids)


def _own_ids(name: str) -> str:
    """Return a map that gives each id of this process's namespace the same number in one below it."""
    with open(f"/proc/self/{name}", encoding="ascii") as file:
        extents = [line.split() for line in file]
    return "".join(f"{first} {first} {count}\n" for first, _, count in extents)


def _write_map(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)  # one write, or the kernel refuses
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
_LAYERS_MIN = 2  # the kernel refuses an overlay of one

Mount = Mapping[str, object]


def enter_mounts(mounts: Sequence[Mount]) -> None:
    """Mount overlays, outer ones first, for this process and its descendants only. Raises OSError.

    Root needs no user namespace and keeps its rights. Root of a container, without CAP_SYS_ADMIN, gets one in which
    every id is what it was. Other users keep their ids, and gain no rights. The current directory stays.
    """
    wanted = [_mount_options(mount) for mount in mounts]  # refused before anything is changed
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
            _check(libc.mount(b"sgpu", at, b"overlay", flags, options), "cannot be mounted", os.fsdecode(at))
    finally:
        os.fchdir(here)
        os.close(here)
    if os.geteuid() != 0:
        drop_capabilities()


def unshare_namespaces(flags: int) -> None:
    """Make namespaces (CLONE_NEW… flags), within a user namespace if mounting needs it. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0:
        _unshare_as_user(libc, flags)
    else:
        _unshare_as_root(libc, flags, "a namespace cannot be made")


def mount_proc() -> None:
    """Mount the /proc of this pid namespace for this process and its descendants; give up capabilities.

    Raises OSError where the kernel refuses, as it does where parts of the present /proc are hidden (most containers).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS), "a mount namespace cannot be made")
    _keep_mounts(libc)
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _check(libc.mount(b"proc", b"/proc", b"proc", flags, None), "cannot be mounted", "/proc")
    if os.geteuid() != 0:
        drop_capabilities()


def probe_mounts(directory: str = "") -> str:
    """Return why this process could not `enter` anything, or ""; leaves nothing behind.

    `directory` is on the file system to try; "" means that of temporary files.
    """
    if sys.platform != "linux":
        return "only Linux can mount overlays"
    try:
        place = tempfile.mkdtemp(prefix=".probe-", dir=directory or None)
    except OSError as error:
        return f"no directory can be made in {directory or 'a temporary directory'}: {error.strerror}"
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
    return "" if text == "ok" else text or "the process that tried to mount was ended"


def _try_mount(place: str) -> str:
    view = os.path.join(place, "view")
    try:
        enter_mounts([{"at": view, "layers": ["0", "1"], "directory": place}])
        return "ok" if os.listdir(view) == ["seen"] else "an overlay was mounted and does not show its layers"
    except OSError as error:
        return error.strerror or str(error)


def _mount_options(mount: Mount) -> tuple[bytes, bytes, str]:
    at, layers, directory = mount["at"], mount["layers"], mount["directory"]
    if not (isinstance(at, str) and isinstance(directory, str) and isinstance(layers, (list, tuple))):
        raise OSError(errno.EINVAL, f"no mount: {mount}")
    names = [str(layer) for layer in layers]
    if len(names) < _LAYERS_MIN or any(not name or set(name) & set(":,\\") for name in names):
        raise OSError(errno.EINVAL, f"no layers of an overlay: {names[:4]}", at)
    options = b"lowerdir=" + b":".join(os.fsencode(name) for name in names)
    if len(options) > _OPTION_BYTES_MAX:
        raise OSError(errno.ENAMETOOLONG, f"the names of {len(names)} layers are too long", at)
    return os.fsencode(at), options, directory


def _keep_mounts(libc: ctypes.CDLL) -> None:
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), "mounts cannot be kept to this process")


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
    with contextlib.suppress(FileNotFoundError):  # kernels before 3.19
        _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)  # one write, or the kernel refuses
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be written: {error.strerror}", path) from None
    finally:
        os.close(fd)


def _make_dumpable(libc: ctypes.CDLL) -> None:
    """Let a process that came from another user by setuid() write its own /proc files."""
    if libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 0:
        libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def _check(result: int, what: str, path: str = "") -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}", path or None)
