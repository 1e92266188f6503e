"""A node's share of the run's Ray cluster: the message, the names of its files, and its private directory.

    supervisor ── makes the directory, holds its flock ──▶ stem, which holds it, too ──▶ rank: its cluster lies there
        │                                                  └─ removes it when the supervisor has died
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
from typing import NamedTuple

from .. import protocol

FILES = "ray"
"""Directory of an attempt for what is kept of its cluster: logs, metrics, and `directory`, where it lies."""


class ClusterShare(NamedTuple):
    """One node's share of the cluster; travels as the dictionary ``"ray"`` of the supervisor's "go"."""

    # short, private, ours alone, made and removed by the supervisor: Ray's temporary files, sockets and token
    directory: str
    devices: int  # of the run on this node, offered as Ray's GPUs
    accelerator: str  # as in ``accelerator_type:H100``; "" for CPU slots
    cpus: int
    object_store_bytes: int
    dashboard: bool  # whether the head starts its web page
    node_rank: int  # 0 has the head and the driver
    num_nodes: int
    host: str  # this node's name, for sentences
    address: str  # where other nodes reach this one; 127.0.0.1 on one node
    head: tuple[str, int]  # where node 0 tells the others where to join; unused on one node
    secret: str  # of the nodes of one run, 64 hexadecimal digits


def files_of(attempt: str) -> str:
    """Return the directory of an attempt for what is kept of its cluster."""
    return os.path.join(attempt, FILES)


def logs_of(attempt: str, node_rank: int) -> str:
    """Return where the logs of a node's Ray are kept."""
    return os.path.join(files_of(attempt), str(node_rank))


def metrics_file(attempt: str, node_rank: int) -> str:
    """Return where the latest figures of a node's Ray are left."""
    return os.path.join(files_of(attempt), f"{node_rank}.metrics.json")


def read_share(message: protocol.Message) -> ClusterShare:
    """Return the share a message holds; raises ValueError."""
    head = message.get("head")
    if not isinstance(head, list) or len(head) != 2:
        raise ValueError(f"no address of a head: {head!r}")
    return ClusterShare(
        directory=protocol.text(message, "directory"),
        devices=protocol.integer(message, "devices"),
        accelerator=protocol.text(message, "accelerator"),
        cpus=protocol.integer(message, "cpus"),
        object_store_bytes=protocol.integer(message, "object_store_bytes"),
        dashboard=message.get("dashboard") is True,
        node_rank=protocol.integer(message, "node_rank"),
        num_nodes=protocol.integer(message, "num_nodes"),
        host=protocol.text(message, "host"),
        address=protocol.text(message, "address"),
        head=(str(head[0]), int(head[1])),
        secret=protocol.text(message, "secret"),
    )


DIRECTORY_PARENT = "/tmp"
DIRECTORY_PREFIX = "sgpu-ray-"
SPILL = "spill"
_DIRECTORY_NAME = re.compile(rf"{DIRECTORY_PREFIX}[0-9a-f]{{8}}")
_REMOVE_TRIES = 20
REMOVE_PAUSE_MS = 25


def is_directory_name(name: str) -> bool:
    """Return whether the directory of a cluster may be called so."""
    return _DIRECTORY_NAME.fullmatch(name) is not None


def remove_directory(path: str) -> bool:
    """Remove the directory of a cluster with everything in it; return whether it is gone.

    A path that is not named as the supervisor names them is left alone.
    """
    parent, name = os.path.split(path)
    if parent != DIRECTORY_PARENT or not is_directory_name(name):
        return False
    pause = select.poll()
    for attempt in range(_REMOVE_TRIES):
        if not _is_ours(path):
            return not os.path.lexists(path)
        if attempt:
            pause.poll(REMOVE_PAUSE_MS)
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
