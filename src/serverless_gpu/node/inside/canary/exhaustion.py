"""Attempts to exhaust resources that runs share.

Only `memory` reaches a limit. The other attempts compare the limits of this process with the limits of the machine, so
that a machine without limits suffers no harm.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
from collections.abc import Mapping

from .base import Attempt, Targets

_CHUNK_BYTES = 16 << 20


def _memory(targets: Targets) -> None:
    """Use more memory than the run may use. The kernel ends this process first if it enforces the limit."""
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    limit = targets.number("memory_bytes")
    held: list[mmap.mmap] = []
    while len(held) * _CHUNK_BYTES < limit + limit // 4:
        part = mmap.mmap(-1, _CHUNK_BYTES)
        part.write(b"\1" * _CHUNK_BYTES)
        held.append(part)


def _same_file_system(place: str, target: str) -> Attempt:
    """Succeed if a directory is writable and belongs to a file system of the machine."""

    def attempt(targets: Targets) -> None:
        if not os.access(place, os.W_OK):
            raise OSError(errno.EACCES, f"{place} is not writable")
        if os.stat(place).st_dev != targets.number(target):
            raise OSError(errno.EXDEV, f"{place} is a file system of its own")

    return attempt


def _disk(targets: Targets) -> None:
    """Succeed if a writable directory is on the node's disk and offers more than half of the free space."""
    node, free = targets.number("disk_device"), targets.number("disk_free_bytes")
    for place in (os.getcwd(), os.path.expanduser("~"), "/tmp"):
        found = os.statvfs(place)
        if os.access(place, os.W_OK) and os.stat(place).st_dev == node and found.f_bavail * found.f_frsize > free // 2:
            return
    raise OSError(errno.EDQUOT, "no writable directory reaches the free space of the node's disk")


def _inodes(targets: Targets) -> None:
    node, free = targets.number("disk_device"), targets.number("disk_free_inodes")
    for place in (os.getcwd(), os.path.expanduser("~"), "/tmp"):
        if os.access(place, os.W_OK) and os.stat(place).st_dev == node and os.statvfs(place).f_favail > free // 2:
            return
    raise OSError(errno.EDQUOT, "no writable directory reaches the free inodes of the node's disk")


def _open_files(_: Targets) -> None:
    """Raise the hard limit on open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard + 1))
    except ValueError as error:  # Python reports EPERM as a ValueError.
        raise PermissionError(errno.EPERM, str(error)) from None


ATTEMPTS: Mapping[str, Attempt] = {
    "fill-tmp": _same_file_system("/tmp", "tmp_device"),
    "fill-shared-memory": _same_file_system("/dev/shm", "segment_device"),
    "fill-disk": _disk,
    "fill-inodes": _inodes,
    "open-files": _open_files,
    "exhaust-memory": _memory,
}
