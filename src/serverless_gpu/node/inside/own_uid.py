"""Becomes a principal's uid, with the files of the node as that uid sees them.

    launcher (root) ── own mount namespace: shows the environment ── becomes the uid, without rights ──▶ zygote

The principal's processes see all files of the node that every user may read. Directories on the way to the interpreter
or to the environment can be closed to other users, for example a home directory with mode 0700. The launcher covers
such a directory in the principal's mount namespace. The cover contains only the interpreter, the environment and the
principal's home.

Each attempt has a directory below `sandbox.ATTEMPT`, into which the supervisor mounts the attempt's files
(`node/isolation/grafts.py`). All attempts of a zygote share the zygote's mount namespace, because a process without
rights cannot create a mount namespace.

Failure cases: Each function raises OSError with the failed step. The launcher then ends with a traceback in its log,
before any code of the principal has run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NoReturn

from . import mounts, sandbox, seal
from .namespaces import Mount, enter_mounts

_NO_SUID_DEV = mounts.NO_SETUID | mounts.NO_DEVICES


def enter(view: sandbox.View, environment: Sequence[Mount]) -> None:
    """Make this process (root, one thread) a process of a principal. Raises OSError.

    `environment` contains overlays, as in `namespaces.enter_mounts`.
    """
    os.setgroups(list(view.groups))
    seal.leave_keyring()
    if environment:
        enter_mounts(environment)
    mounts.unshare(mounts.CLONE_NEWNS)
    mounts.keep_mounts_in(private=True)
    _show(view)
    os.makedirs(sandbox.ATTEMPT, mode=0o711, exist_ok=True)
    mounts.mount("tmpfs", sandbox.ATTEMPT, _NO_SUID_DEV, "size=1M,nr_inodes=4k,mode=0711")
    os.umask(0o077)
    seal.drop_bounding_set(())
    gid = view.gid or view.uid
    os.setresgid(gid, gid, gid)
    os.setresuid(view.uid, view.uid, view.uid)
    seal.forbid_new_privileges()


def rehearse(view: sandbox.View) -> NoReturn:
    """Become a principal, then exit with 0 if each step succeeded."""
    enter(view, ())
    os._exit(0)


def closed_directories(paths: Iterable[str], uid: int) -> list[str]:
    """Return the outermost directories above `paths` that a uid without groups may not enter."""
    found: list[str] = []
    for path in paths:
        place = "/"
        for part in os.path.dirname(path).split("/")[1:]:
            place = os.path.join(place, part)
            status = os.stat(place)
            if not status.st_mode & (0o100 if status.st_uid == uid else 0o001):
                found.append(place)
                break
    return list(dict.fromkeys(found))


def _show(view: sandbox.View) -> None:
    """Cover each closed directory on the way to the environment or to the principal's home.

    A cover shows only the environment and the home.
    """
    mounts.mount("tmpfs", view.at, _NO_SUID_DEV, "size=4M,nr_inodes=16k,mode=0755")
    root = sandbox.PrivateRoot(view.at)
    for path in (*view.shown, *sandbox.interpreter_parts(view.python)):
        root.show(path)
    root.directory(view.home)
    covers = [
        (mounts.clone_tree(view.at + path, mounts.READ_ONLY | _NO_SUID_DEV), path)
        for path in closed_directories((*root.shown, view.home), view.uid)
    ]
    if closed_directories((view.home,), view.uid):
        covers.append((mounts.clone_tree(view.home, _NO_SUID_DEV), view.home))
    mounts.unmount(view.at)  # A cover can hide this path.
    for fd, path in covers:
        mounts.attach(fd, path)
        os.close(fd)
