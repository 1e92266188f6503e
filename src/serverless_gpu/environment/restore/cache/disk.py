"""The disk under a directory: its free space, its name for people, and the error that says it is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from serverless_gpu.errors import StorageError
from serverless_gpu.units import format_bytes

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_BLOCK_BYTES = 4096
_FILES_MIN = 1000


class DiskFull(StorageError):
    """A disk has no room for an environment."""


def free_bytes(directory: Path) -> int:
    """Return how much an ordinary user can still write there."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def total_bytes(directory: Path) -> int:
    """Return how large the disk is."""
    status = os.statvfs(directory)
    return status.f_blocks * status.f_frsize


def disk_of(directory: Path) -> Path:
    """Return where the disk of a directory is mounted."""
    place = Path(os.path.realpath(directory))
    device = os.stat(place).st_dev
    while place != place.parent and os.stat(place.parent).st_dev == device:
        place = place.parent
    return place


def occupied_bytes(size: int, files: int) -> int:
    """Return about how much files take on a disk: half a block more each than they hold, and their entries."""
    return size + files * (_BLOCK_BYTES // 2 + 256)


def is_full(error: OSError) -> bool:
    """Return whether this error means that the disk, or the user's share of it, is full."""
    return error.errno in _FULL


def full(directory: Path, needed: int, floor: int) -> DiskFull:
    """Return the error that says a disk is full.

    Args:
        directory: on it.
        needed: bytes that were to be written.
        floor: bytes that have to stay free.
    """
    status = os.statvfs(directory)
    if status.f_files and status.f_favail < _FILES_MIN:
        return DiskFull(
            f"The disk at {disk_of(directory)} is full: no more files can be made in {directory}, "
            f"though {format_bytes(free_bytes(directory))} are free.",
            hint="delete files there, or let SERVERLESS_GPU_HOME name a directory on a disk with more inodes",
        )
    kept = f", and {format_bytes(floor)} of it stay free" if floor else ""
    return DiskFull(
        f"The disk at {disk_of(directory)} is full: {format_bytes(free_bytes(directory))} are free{kept}; "
        f"the environment needs {format_bytes(needed)} more in {directory}.",
        hint="make space there, or let SERVERLESS_GPU_HOME name a directory on a larger disk",
    )
