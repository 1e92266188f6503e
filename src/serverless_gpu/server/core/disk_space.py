"""Measures free disk space, and reserves a minimum of free space on the server's disk.

Payloads, results and logs can fill the server's disk. The database must still be able to record the end of each run.
Every store of user data therefore leaves a minimum of disk space free.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from serverless_gpu.errors import ServerStorageFull
from serverless_gpu.operating_system import lacks_inodes
from serverless_gpu.units import format_bytes

KEPT_FREE_BYTES = 128 << 20
"""Minimum free bytes that stores of user data must leave on a disk."""
NO_INODES = "the disk has free space but no free inodes for new files"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def free_bytes(place: Path | int) -> int | None:
    """Return the disk's free bytes for the current user, or None if the free space is unknown.

    Args:
        place: a directory, or a descriptor of a file on that disk.
    """
    try:
        disk = os.statvfs(place)
    except OSError:
        return None
    # The free space of some network and FUSE file systems is unknown, because they report zero blocks.
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


def check_room(size: int, free: int | None, *, kept_free_bytes: int) -> None:
    """Raise an error if the disk cannot hold the given number of bytes."""
    if free is not None and size > free - kept_free_bytes:
        kept = f" ({format_bytes(kept_free_bytes)} must stay free)" if kept_free_bytes else ""
        raise storage_full(f"{format_bytes(size)} to write, {format_bytes(free)} free{kept}")


def storage_full(why: str) -> ServerStorageFull:
    """Return the error for a full disk."""
    return ServerStorageFull(
        f"the server has no disk space for this request: {why}",
        hint="ask the server's operator to free disk space, then send the request again",
    )


def full_reason(directory: Path, error: OSError) -> str:
    """Return the cause of a failed write: no free space or no free inodes."""
    return NO_INODES if lacks_inodes(directory) else error.strerror or "the disk is full"


def space_problem(directory: Path) -> str:
    """Return a message if the server's disk lacks space or inodes, or "" for a healthy disk."""
    if lacks_inodes(directory):
        return f"the server's disk: {NO_INODES}"
    free = free_bytes(directory)
    if free is None or free > KEPT_FREE_BYTES:
        return ""
    needed = format_bytes(KEPT_FREE_BYTES)
    return (
        f"the server's disk has {format_bytes(free)} free. Below {needed}, the server refuses payloads, "
        "results and logs"
    )
