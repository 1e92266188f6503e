"""The operating system and its limits: Linux or not, no more threads, no more inodes.

Linux runs everything, macOS is a client of a server, Windows is refused. A part that needs Linux calls `require_linux`
first. `lazy_import.load` refuses Windows, where the standard library lacks modules that the client needs (fcntl,
resource, termios).

Failure cases: a container or user is at its limit of threads (`start_thread` raises HardwareError); a disk without
space has bytes but no inodes (`lacks_inodes`), so freeing bytes does not help.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from serverless_gpu.errors import HardwareError

NAMES = {"darwin": "macOS", "win32": "Windows", "cygwin": "Cygwin"}
_ON_MACOS = (
    "run it on a Linux machine, for example by ssh; on macOS commands that ask a server work: sgpu login, sgpu runs"
)
_WINDOWS = "serverless-gpu does not run on Windows, neither the client nor the ranks"
_ON_WINDOWS = "install it in WSL 2, which is Linux: `wsl --install`, and there `pip install serverless-gpu`"
_THREAD_LIMIT = "can't start new thread"  # Python's own message
_BYTES_MIN = 1 << 20
_INODES_MIN = 8


def require_linux(what: str, why: str = "") -> None:
    """Raise HardwareError where the kernel is not Linux; `what` is a plural subject: "ranks"."""
    if sys.platform != "linux":
        name = NAMES.get(sys.platform, sys.platform)
        raise HardwareError(f"{what} need Linux, and this is {name}{f': {why}' if why else ''}", hint=_ON_MACOS)


def windows_refusal() -> HardwareError:
    """Return the exception for any use of this package on Windows."""
    return HardwareError(_WINDOWS, hint=_ON_WINDOWS)


def start_thread(work: Callable[[], object], name: str) -> None:
    """Start a daemon thread; raise HardwareError at the limit of threads."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        if not is_thread_limit(error):
            raise
        raise thread_limit() from None


def is_thread_limit(error: BaseException) -> bool:
    """Return whether an error says that no thread can be started."""
    return isinstance(error, RuntimeError) and _THREAD_LIMIT in str(error)


def thread_limit() -> HardwareError:
    """Return the error a person gets where no thread can be started."""
    return HardwareError(
        "no thread can be started: the limit of processes and threads is reached",
        hint="raise it: `ulimit -u`, in a container `docker run --pids-limit=…` (Kubernetes: podPidsLimit of the node)",
    )


def lacks_inodes(path: Path) -> bool:
    """Return whether the disk of a path, which need not exist, has bytes but no inodes for a file.

    File systems that make inodes as they go (btrfs) count none and never lack them.
    """
    for directory in (path, *path.parents):
        try:
            disk = os.statvfs(directory)
        except OSError:
            continue
        return disk.f_files > 0 and disk.f_favail < _INODES_MIN and disk.f_bavail * disk.f_frsize >= _BYTES_MIN
    return False
