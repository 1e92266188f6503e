"""Checks the operating system, the limit of threads, the limit of inodes and the kind of files.

On Linux, all features work. On macOS, only the client of a server works. Windows is not supported. Code that needs
Linux calls `require_linux` first. `lazy_import.load` refuses Windows, whose standard library lacks modules that the
client needs (fcntl, resource, termios).

Failure cases: If a container or user has reached its thread limit, `start_thread` raises HardwareError. A disk can have
free bytes but no free inodes (`lacks_inodes`). More free bytes do not help a disk without free inodes.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from serverless_gpu.errors import HardwareError

NAMES = {"darwin": "macOS", "win32": "Windows", "cygwin": "Cygwin"}
_ON_MACOS = (
    "use a Linux machine, for example over ssh. On macOS, only commands that use a server work: sgpu login, sgpu runs"
)
_WINDOWS = "serverless-gpu does not run on Windows, neither the client nor the ranks"
_ON_WINDOWS = "install serverless-gpu in WSL 2: run `wsl --install`, then `pip install serverless-gpu` in WSL"
_THREAD_LIMIT = "can't start new thread"  # Python's message for a failed thread start.
_BYTES_MIN = 1 << 20
_INODES_MIN = 8


def require_linux(what: str, why: str = "") -> None:
    """Raise HardwareError if the kernel is not Linux. `what` is a plural subject, for example "ranks"."""
    if sys.platform != "linux":
        name = NAMES.get(sys.platform, sys.platform)
        raise HardwareError(
            f"{what} need Linux, but this machine runs {name}{f': {why}' if why else ''}", hint=_ON_MACOS
        )


def open_regular(path: Path) -> BinaryIO:
    """Open a file that a run may have written. Raises OSError for a link, a device or a pipe.

    Without this check, a link in place of a result would make the node send one of its own files.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(fd, "rb")


def windows_refusal() -> HardwareError:
    """Return the exception for any use of this package on Windows."""
    return HardwareError(_WINDOWS, hint=_ON_WINDOWS)


def start_thread(work: Callable[[], object], name: str) -> None:
    """Start a daemon thread. Raise HardwareError at the thread limit."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        if not is_thread_limit(error):
            raise
        raise thread_limit() from None


def is_thread_limit(error: BaseException) -> bool:
    """Return True if an error means that Python cannot start another thread."""
    return isinstance(error, RuntimeError) and _THREAD_LIMIT in str(error)


def thread_limit() -> HardwareError:
    """Return the error for a process that cannot start another thread."""
    return HardwareError(
        "no thread can be started: the limit of processes and threads is reached",
        hint="raise the limit: `ulimit -u`, or in a container `docker run --pids-limit=…` (Kubernetes: "
        "podPidsLimit of the node)",
    )


def lacks_inodes(path: Path) -> bool:
    """Return True if a path's disk has free bytes but no inode for another file.

    The path need not exist. File systems that create inodes on demand (btrfs) report a count of zero and never lack
    inodes.
    """
    for directory in (path, *path.parents):
        try:
            disk = os.statvfs(directory)
        except OSError:
            continue
        return disk.f_files > 0 and disk.f_favail < _INODES_MIN and disk.f_bavail * disk.f_frsize >= _BYTES_MIN
    return False
