"""The private directory below which the Ray of one run has its files: what it is called, and removing it.

    supervisor ── makes it, holds its flock ──▶ stem, which holds it, too ──▶ rank, which has its cluster there
        │                                        └─ removes it when the supervisor has died
        ├─ keeps logs and removes it when no process of the attempt is left
        └─ the agent removes what nobody holds any more (`node/supervisor/ray_cluster.py`)

Ray spills objects below `<directory>/spill`. That is a directory, or leads to one of the same name as this one on a
disk with more room, which goes first: as long as it is there, what leads to it is.

Its path is short, since Ray makes sockets of 62 more bytes below it. Ray gives its own directory to everybody, so that
one lies within this one, which only its owner can enter.

Failure cases: something of that name that is no directory of ours (left alone); a directory in it that its owner may
not write to (its mode is changed); somebody writes there still (tried again a few times, then left to the next who
looks).
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

    Args:
        path: as the supervisor has named it; anything else is left alone.
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
    """Remove what lies elsewhere; return whether nothing of it is left. Anything of another name is not ours."""
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
