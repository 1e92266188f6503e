"""A user namespace of one process's own: from inside, no outside process can be traced or written to.

    child: unshare ──▶ parent: uid_map, gid_map ──▶ child: goes on, with the same ids

The kernel lets a process of the same uid write another one's memory. It refuses when the other one is in a user
namespace above, or beside. Files, signals and mounts stay as they are.

    root            maps every id it has, and stays root within the namespace
    anyone else     maps its own uid and gid; other owners of files look like `nobody`, setuid programs do nothing

Failure cases, each an OSError or a sentence: user namespaces are switched off or used up (EPERM, ENOSPC), the process
has more than one thread (EINVAL).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket

_CLONE_NEWUSER = 0x10000000
_CAPABILITY_VERSION_3 = 0x20080522
_DONE = b"\0"
_REASON_BYTES_MAX = 4096


def become_member(parent: socket.socket) -> None:
    """Move this process into a user namespace of its own, together with a parent that calls `admit`.

    Raises OSError when the kernel refuses, or the parent, which knows why, is gone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(3, 0, 0, 0, 0) == 0:  # PR_GET_DUMPABLE: a process that came by setuid() has no /proc files of its own
        libc.prctl(4, 1, 0, 0, 0)
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


def enter() -> None:
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


def probe() -> str:
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
    if libc.capset(header, none) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"capabilities cannot be given up: {os.strerror(code)}")


def _write_maps(pid: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        uids, gids = _own_ids("uid_map"), _own_ids("gid_map")
    else:
        uids, gids = f"{uid} {uid} 1\n", f"{gid} {gid} 1\n"
        with contextlib.suppress(FileNotFoundError):  # kernels before 3.19
            _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/uid_map", uids)
    _write(f"/proc/{pid}/gid_map", gids)


def _own_ids(name: str) -> str:
    """Return a map that gives each id of this process's namespace the same number in one below it."""
    with open(f"/proc/self/{name}", encoding="ascii") as file:
        extents = [line.split() for line in file]
    return "".join(f"{first} {first} {count}\n" for first, _, count in extents)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)  # one write, or the kernel refuses
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
