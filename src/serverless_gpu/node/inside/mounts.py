"""Entering a mounted environment: read-only overlays in a mount namespace of this process.

    unshare ─ root: mount namespace · others, also root without CAP_SYS_ADMIN: user namespace too: there they may mount
      └ / becomes a slave: what is mounted here stays here
         └ overlays, in order, outer ones first
            └ capabilities of the user namespace are given up

Only processes that are forked or executed after `enter` see the mounts, which end with the last one. A later `enter`
can mount over the same place, in a child too.

A mount is a mapping, as it comes out of JSON: ``at`` (where), ``layers`` (names, the top one first), ``directory``
(where the names are). The kernel takes all names of an overlay on one page of 4 KB, so names are short, mostly links.
Failure cases, each an OSError that names step and place: user namespaces are switched off (EPERM, ENOSPC), more than
one thread (EINVAL), a layer that is gone (ENOENT), too many layers (ENAMETOOLONG, before the kernel is asked). After a
failure the process may be half way in: it must end, or use nothing of the environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence

from . import user_namespace

_CLONE_NEWNS = 0x20000
_CLONE_NEWUSER = 0x10000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_OPTION_BYTES_MAX = 4000
_LAYERS_MIN = 2  # the kernel refuses an overlay of one

Mount = Mapping[str, object]


def enter(mounts: Sequence[Mount]) -> None:
    """Mount overlays, outer ones first, for this process and its descendants only. Raises OSError.

    Root needs no user namespace and keeps its rights. Root of a container, without CAP_SYS_ADMIN, gets one in which
    every id is what it was. Other users keep their ids, and gain no rights. The current directory stays.
    """
    wanted = [_request(mount) for mount in mounts]  # refused before anything is changed
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
        user_namespace.drop_capabilities()


def unshare(flags: int) -> None:
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
        user_namespace.drop_capabilities()


def probe(directory: str = "") -> str:
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
        return _in_a_child(place)
    except OSError as error:
        return f"{error.strerror}"
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _in_a_child(place: str) -> str:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, _attempt(place).encode()[:1024])
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        text = answer.read(1024).decode()
    os.waitpid(pid, 0)
    return "" if text == "ok" else text or "the process that tried to mount was ended"


def _attempt(place: str) -> str:
    view = os.path.join(place, "view")
    try:
        enter([{"at": view, "layers": ["0", "1"], "directory": place}])
        return "ok" if os.listdir(view) == ["seen"] else "an overlay was mounted and does not show its layers"
    except OSError as error:
        return error.strerror or str(error)


def _request(mount: Mount) -> tuple[bytes, bytes, str]:
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
        user_namespace.enter()
    except OSError as error:
        refused = f"{what}: {os.strerror(code)}; with a user namespace: {error.strerror or error}"
        raise OSError(code, refused) from None
    _check(libc.unshare(flags), what)


def _unshare_as_user(libc: ctypes.CDLL, flags: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    if libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 0:
        # A process that came from another user by setuid() may not write its own /proc files.
        libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
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


def _check(result: int, what: str, path: str = "") -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}", path or None)
