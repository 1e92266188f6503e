"""A node's share of the run's Ray cluster: its message, the names of its files, its directory.

    supervisor ── makes the directory, holds its flock ──▶ stem, also holds the flock ──▶ rank: uses it for the cluster
        │                                                  └─ removes the directory after the supervisor has died
        ├─ keeps the logs and removes the directory after the attempt's last process has ended
        └─ the agent removes abandoned directories (`node/supervisor/ray_cluster.py`)

Ray spills objects below `<directory>/spill`. `spill` is a directory, or a link to a directory of the same name on a
disk with more space. `remove_directory` removes the target of the link first, because only the link contains the
target's path. The directory's path is short, because the paths of Ray's sockets below it are 62 bytes longer. Ray makes
its own directory accessible to all users. Ray's directory is therefore inside a directory that only its owner can
enter.

Failure cases: `remove_directory` does not touch a path that is not a directory of this user. If the owner cannot write
to an inner directory, the function changes the mode of the inner directory. If a process still writes to the directory,
the function tries a few more times. A later call removes the remaining files.
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
"""Directory of an attempt for its cluster's logs and metrics, and for the file with the cluster's path."""


class ClusterShare(NamedTuple):
    """A node's share of the cluster: the dictionary ``"ray"`` in the supervisor's "go" message."""

    # Short private path for Ray's temporary files, sockets and token. The supervisor creates and removes the directory.
    directory: str
    devices: int  # Number of the run's devices on this node, which Ray offers as GPUs.
    accelerator: str  # The type in ``accelerator_type:H100``, or "" for CPU slots.
    cpus: int
    object_store_bytes: int
    dashboard: bool  # True if the head serves its web page.
    node_rank: int  # Node number; node 0 has the head and the driver.
    num_nodes: int
    host: str  # Name of this node in messages.
    address: str  # Address of this node for other nodes, 127.0.0.1 on one node.
    head: tuple[str, int]  # Address at which node 0 accepts the other nodes, unused on one node.
    secret: str  # Shared secret of the nodes of one run, 64 hexadecimal digits.


def files_of(attempt: str) -> str:
    """Return the directory of an attempt for the files of its cluster."""
    return os.path.join(attempt, FILES)


def logs_of(attempt: str, node_rank: int) -> str:
    """Return the directory for the logs of a node's Ray."""
    return os.path.join(files_of(attempt), str(node_rank))


def metrics_file(attempt: str, node_rank: int) -> str:
    """Return the path of the latest metrics of a node's Ray."""
    return os.path.join(files_of(attempt), f"{node_rank}.metrics.json")


def read_share(message: protocol.Message) -> ClusterShare:
    """Return the share in a message. Raises ValueError if the message is not valid."""
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
    """Return whether a name is valid for the directory of a cluster."""
    return _DIRECTORY_NAME.fullmatch(name) is not None


def remove_directory(path: str) -> bool:
    """Remove the directory of a cluster with everything in it. Return True if the directory is gone.

    The function ignores a path if its name does not follow the supervisor's pattern.
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
    """Remove objects that Ray spilled to another disk. Return True if no object remains on that disk.

    The function ignores a target with another name.
    """
    try:
        elsewhere = os.readlink(os.path.join(path, SPILL))
    except OSError:  # `spill` is a directory or does not exist.
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

    A task may have created a directory that its owner cannot change.
    """
    for directory, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            os.chmod(directory, 0o700)
