"""Mount calls that the standard library lacks: detached copies of directory trees, and a new root.

A *detached tree* is a mount without a place in any mount namespace. `clone_tree` makes a detached tree from a
directory, a file or a device node. A process in another mount namespace can attach a detached tree (`attach`), even if
the other namespace lacks the original path. This module needs Linux 5.12 or newer.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping

# System call numbers, which are equal on every architecture.
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _MOUNT_SETATTR = 428, 429, 430, 431, 432, 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 0x1, os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC = 0x1, 0x1
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
READ_ONLY, NO_SETUID, NO_DEVICES, NO_EXECUTION = 0x1, 0x2, 0x4, 0x8
"""Attributes of a mount, as in mount_setattr(2). The flags of mount(2) have the same values."""
_MS_REC, _MS_PRIVATE, _MS_SLAVE = 0x4000, 0x40000, 0x80000
_MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
"""Kinds of namespaces, as in clone(2)."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def clone_tree(path: str, attributes: int = 0, *, recursive: bool = True) -> int:
    """Return a descriptor of a detached copy of a mounted tree. Raises OSError.

    The caller closes the descriptor. `attributes` apply to every mount of the copy.
    """
    deep = _AT_RECURSIVE if recursive else 0
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | deep
    fd = _check(_libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags), "cannot copy a mounted tree", path)
    if attributes:
        try:
            _restrict(fd, attributes, deep, path)
        except OSError:
            os.close(fd)
            raise
    return fd


def files_in_memory(files: Mapping[str, bytes], owner: int) -> int:
    """Return a descriptor of a detached tree of files that only `owner` can read. Raises OSError.

    The tree is read-only. The tree is a tmpfs with room for the files only. The kernel does not write the files to
    swap, from Linux 6.4 on. The caller closes the descriptor.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    size = max(1, sum(-(-len(data) // page) for data in files.values())) * page
    options = {"size": size, "nr_inodes": len(files) + 1, "mode": "0500", "uid": owner, "gid": owner}
    kind = _check(_libc.syscall(_FSOPEN, b"tmpfs", _FSOPEN_CLOEXEC), "cannot open a tmpfs", "")
    try:
        for name, value in options.items():
            call = _libc.syscall(_FSCONFIG, kind, _FSCONFIG_SET_STRING, name.encode(), str(value).encode(), 0)
            _check(call, f"cannot set {name} of a tmpfs", "")
        _libc.syscall(_FSCONFIG, kind, _FSCONFIG_SET_FLAG, b"noswap", None, 0)  # Older kernels refuse this option.
        _check(_libc.syscall(_FSCONFIG, kind, _FSCONFIG_CMD_CREATE, None, None, 0), "cannot create a tmpfs", "")
        flags = NO_SETUID | NO_DEVICES | NO_EXECUTION
        tree = _check(_libc.syscall(_FSMOUNT, kind, _FSMOUNT_CLOEXEC, flags), "cannot mount a tmpfs", "")
    finally:
        os.close(kind)
    try:
        for name, data in files.items():
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400, dir_fd=tree)
            with open(file, "wb") as open_file:
                open_file.write(data)
                os.fchown(file, owner, owner)
        _restrict(tree, READ_ONLY, 0, "")
    except OSError:
        os.close(tree)
        raise
    return tree


def _restrict(fd: int, attributes: int, deep: int, path: str) -> None:
    wanted = _Attributes(attributes, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    call = _libc.syscall(_MOUNT_SETATTR, fd, b"", _AT_EMPTY_PATH | deep, ctypes.byref(wanted), size)
    _check(call, "cannot restrict a mount", path)


def attach(fd: int, at: str) -> None:
    """Mount a detached tree on an existing directory or file of this mount namespace. Raises OSError."""
    call = _libc.syscall(_MOVE_MOUNT, fd, b"", _AT_FDCWD, os.fsencode(at), _MOVE_MOUNT_F_EMPTY_PATH)
    _check(call, "cannot mount a tree", at)


def mount(kind: str, at: str, flags: int, options: str = "") -> None:
    """Mount a file system of the given kind. Raises OSError."""
    made = _libc.mount(kind.encode(), os.fsencode(at), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(made, f"cannot mount a {kind}", at)


def keep_mounts_in(*, private: bool) -> None:
    """Keep new mounts in this mount namespace. A private namespace also ignores new mounts of its parent."""
    flags = _MS_REC | (_MS_PRIVATE if private else _MS_SLAVE)
    _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(flags), None), "cannot keep mounts in the namespace", "/")


def pivot_root(root: str) -> None:
    """Make a mounted directory the root of this process, and unmount the earlier root. Raises OSError."""
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(f"pivot_root has no known number on {platform.machine()}")
    os.chdir(root)
    _check(_libc.syscall(number, b".", b"."), "cannot change the root", root)
    # The path "." names the old root first, because the old root is stacked on the new root.
    _check(_libc.umount2(b".", _MNT_DETACH), "cannot unmount the earlier root", "/")
    os.chdir("/")


def unmount(at: str) -> None:
    """Remove a mount, also while processes use it. Raises OSError."""
    _check(_libc.umount2(os.fsencode(at), _MNT_DETACH), "cannot unmount a tree", at)


def unshare(flags: int) -> None:
    """Create namespaces (CLONE_NEW… flags) for this process. Raises OSError."""
    _check(_libc.unshare(flags), "cannot create namespaces", "")


def set_namespace(fd: int, kind: int) -> None:
    """Enter the namespace of a descriptor, or the namespaces of a pidfd. Raises OSError."""
    _check(_libc.setns(fd, kind), "cannot enter a namespace", "")


def _check(result: int, what: str, path: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}", path or None)
    return result
