"""One node's share of the run's Ray cluster, with the cluster's file names and directory.

    supervisor ── makes the directory, holds its flock ──▶ stem, also holds the flock ──▶ rank: uses it for the cluster
        │                                                  └─ removes the directory after the supervisor has died
        ├─ keeps the logs and removes the directory after the attempt's last process has ended
        └─ the agent removes abandoned directories (`node/supervisor/ray_cluster.py`)

Ray spills objects below `<directory>/spill`. `spill` is a directory, or a link to a directory of the same name on a
larger disk. `remove_directory` removes the link's target before the link, because only the link contains the target's
path. The directory's path is short, because the paths of Ray's sockets below it are 62 bytes longer. Ray makes its
session directory accessible to all users. The session directory is therefore inside a directory that only its owner can
enter.

Failure cases: `remove_directory` ignores a path that is not a directory of this user. If the owner cannot write to an
inner directory, `remove_directory` changes the inner directory's mode. If a process still writes to the directory,
`remove_directory` retries several times. A later call of `remove_directory` removes the remaining files.
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
"""Subdirectory of an attempt for the Ray cluster's logs, metrics and directory path."""


class ClusterShare(NamedTuple):
    """One node's share of the cluster, sent as the field ``"ray"`` of the supervisor's "go" message."""

    # Short private path for Ray's temporary files, sockets and token. The supervisor creates and removes this
    # directory.
    directory: str
    devices: int  # Number of the run's devices on this node, which Ray offers as GPUs.
    accelerator: str  # Accelerator type in ``accelerator_type:H100``, or "" for CPU slots.
    cpus: int
    object_store_bytes: int
    dashboard: bool  # True if the head runs its dashboard.
    node_rank: int  # Number of the node in the cluster. Node 0 runs the head and the driver.
    num_nodes: int
    host: str  # Name of this node in messages to users.
    address: str  # Address of this node for other nodes; 127.0.0.1 in a cluster of one node.
    head: tuple[str, int]  # Address at which node 0 accepts the other nodes; unused in a cluster of one node.
    secret: str  # Shared secret of the run's nodes, 64 hexadecimal digits.


def files_of(attempt: str) -> str:
    """Return the directory for the Ray cluster's files in an attempt directory."""
    return os.path.join(attempt, FILES)


def logs_of(attempt: str, node_rank: int) -> str:
    """Return the directory for a node's Ray logs."""
    return os.path.join(files_of(attempt), str(node_rank))


def metrics_file(attempt: str, node_rank: int) -> str:
    """Return the path of a node's latest Ray metrics."""
    return os.path.join(files_of(attempt), f"{node_rank}.metrics.json")


def read_share(message: protocol.Message) -> ClusterShare:
    """Return the cluster share from a message. Raises ValueError if the message is not valid."""
    head = message.get("head")
    if not isinstance(head, list) or len(head) != 2:
        raise ValueError(f'field "head" must be a list of host and port, not {head!r}')
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
    """Return whether a name is a valid cluster directory name."""
    return _DIRECTORY_NAME.fullmatch(name) is not None


def remove_directory(path: str) -> bool:
    """Remove a cluster's directory with all its contents. Return True if the directory no longer exists.

    The function ignores a path whose name does not match the supervisor's pattern.
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
    """Remove objects that Ray spilled to another disk.

    Return True if no spilled object remains on the other disk. The function ignores a link target whose name differs
    from the directory name.
    """
    try:
        elsewhere = os.readlink(os.path.join(path, SPILL))
    except OSError:  # If `spill` is a directory or does not exist, no link target must be removed.
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
    """Make all inner directories writable.

    A Ray task may have created a directory that its owner cannot modify.
    """
    for directory, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            os.chmod(directory, 0o700)
