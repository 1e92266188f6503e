"""Disk space: how much more fits on a disk, and how much of it always stays free.

A run must be able to end, and the database to say so, also when payloads, results and logs have filled the disk. So
every store of users' bytes leaves some of it free.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from serverless_gpu.errors import ServerStorageFull
from serverless_gpu.operating_system import lacks_inodes
from serverless_gpu.units import format_bytes

KEPT_FREE_BYTES = 128 << 20
"""What bytes of users leave free."""
NO_INODES = "it has room, but no inodes left, and cannot hold one more file"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def free_bytes(place: Path | int) -> int | None:
    """Return how much this user can still write, or None where that is not known.

    Args:
        place: a directory, or a descriptor of a file on that disk.
    """
    try:
        disk = os.statvfs(place)
    except OSError:
        return None
    # Some network and FUSE file systems say that they have no blocks at all.
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


def check_room(size: int, free: int | None, *, kept_free_bytes: int) -> None:
    """Refuse to store so many bytes where there is no room for them."""
    if free is not None and size > free - kept_free_bytes:
        kept = f", of which {format_bytes(kept_free_bytes)} stay free" if kept_free_bytes else ""
        raise storage_full(f"{format_bytes(size)} to write, {format_bytes(free)} free{kept}")


def storage_full(why: str) -> ServerStorageFull:
    """Return the error for a disk that is full."""
    return ServerStorageFull(
        f"the server has no room to store this: {why}",
        hint="nothing of it was kept; when whoever looks after the server has made room, send it again",
    )


def full_reason(directory: Path, error: OSError) -> str:
    """Return why a file could not be written on a disk that is full: it has no room, or no inodes."""
    return NO_INODES if lacks_inodes(directory) else error.strerror or "the disk is full"


def space_problem(directory: Path) -> str:
    """Return what is wrong with the room and the inodes of a disk, for the server's health; "" when there is enough."""
    if lacks_inodes(directory):
        return f"the server's disk: {NO_INODES}"
    free = free_bytes(directory)
    if free is None or free > KEPT_FREE_BYTES:
        return ""
    needed = format_bytes(KEPT_FREE_BYTES)
    return f"the server's disk has {format_bytes(free)} left: payloads, results and logs are not taken below {needed}"
