"""The private directory below which the Ray of one run has its files: its name, and its removal.

    supervisor ── makes it, holds its flock ──▶ stem, which holds it, too ──▶ rank, which has its cluster there
        │                                        └─ removes it when the supervisor has died
        ├─ keeps logs and removes it when no process of the attempt is left
        └─ the agent removes abandoned ones (`node/supervisor/ray_cluster.py`)

Ray spills objects below `<directory>/spill`: a directory, or a link to one of the same name on a disk with more room.
The target goes first, because the link is the only way to it. The path is short, since Ray makes sockets of 62 more
bytes below it. Ray opens its own directory to all users, so that one lies within this one, which only its owner can
enter.

Failure cases: something of that name that is no directory of ours (left alone); a directory in it that its owner may
not write to (its mode is changed); a process still writes there (a few more tries, then the next look).
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import stat

PARENT = "/tmp"
PREFIX = "sgpu-ray-"
SPILL = "spill"
_NAME = re.compile(rf"{PREFIX}[0-9a-f]{{8}}")
_TRIES = 20
PAUSE_MS = 25


def is_name(name: str) -> bool:
    """Return whether the directory of a cluster may be called so."""
    return _NAME.fullmatch(name) is not None


def remove(path: str) -> bool:
    """Remove the directory of a cluster with everything in it; return whether it is gone.

    A path that is not named as the supervisor names them is left alone.
    """
    parent, name = os.path.split(path)
    if parent != PARENT or not is_name(name):
        return False
    pause = select.poll()
    for attempt in range(_TRIES):
        if not _is_ours(path):
            return not os.path.lexists(path)
        if attempt:
            pause.poll(PAUSE_MS)
            _open_all(path)
        if _remove_spilled(path):
            shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)


def _remove_spilled(path: str) -> bool:
    """Remove spilled objects elsewhere; return whether none is left. Other names are not ours."""
    try:
        elsewhere = os.readlink(os.path.join(path, SPILL))
    except OSError:  # a directory, or nothing
        return True
    if os.path.basename(elsewhere) != os.path.basename(path) or not _is_ours(elsewhere):
        return True
    shutil.rmtree(elsewhere, ignore_errors=True)
    if os.path.lexists(elsewhere):
        _open_all(elsewhere)
    return not os.path.lexists(elsewhere)


def _is_ours(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _open_all(path: str) -> None:
    """Let us write to every directory in it: a task may have made one that its owner cannot change."""
    for directory, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            os.chmod(directory, 0o700)
