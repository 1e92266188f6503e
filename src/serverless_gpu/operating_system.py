"""Operating systems: Linux runs everything, macOS is a client of a server, Windows is refused.

A part that needs Linux calls `require_linux` before it does anything. `loading.load` refuses Windows, where the
standard library lacks modules that the client needs (fcntl, resource, termios).

Starting a thread, where a container or a user may be at the limit of processes and threads.

Failure cases: the limit is reached (a HardwareError; Python itself says "can't start new thread").

Whether a disk that answers "no space left" has room, but no inodes: then freeing bytes does not help.

Some file systems make inodes as they go and count none (btrfs); those are never out of them.
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
_PYTHONS_WORDS = "can't start new thread"
_BYTES_MIN = 1 << 20
_FEW = 8


def require_linux(what: str, why: str = "") -> None:
    """Refuse to go on where the kernel is not Linux.

    Args:
        what: what needs Linux, as the subject of a sentence in the plural: "ranks".
        why: the reason, where it is not plain.

    Raises:
        HardwareError: this is another system.
    """
    if sys.platform != "linux":
        name = NAMES.get(sys.platform, sys.platform)
        raise HardwareError(f"{what} need Linux, and this is {name}{f': {why}' if why else ''}", hint=_ON_MACOS)


def windows_refusal() -> HardwareError:
    """Return the exception for any use of this package on Windows."""
    return HardwareError(_WINDOWS, hint=_ON_WINDOWS)


def start_thread(work: Callable[[], object], name: str) -> None:
    """Start a daemon thread.

    Args:
        work: what it does.
        name: of the thread.

    Raises:
        HardwareError: no thread can be started.
    """
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        if not is_thread_limit(error):
            raise
        raise thread_limit() from None


def is_thread_limit(error: BaseException) -> bool:
    """Return whether an error says that no thread can be started."""
    return isinstance(error, RuntimeError) and _PYTHONS_WORDS in str(error)


def thread_limit() -> HardwareError:
    """Return the error a person gets where no thread can be started."""
    return HardwareError(
        "no thread can be started: the limit of processes and threads is reached",
        hint="raise it: `ulimit -u`, in a container `docker run --pids-limit=…` (Kubernetes: podPidsLimit of the node)",
    )


def lacks_inodes(path: Path) -> bool:
    """Return whether no file can be made on the disk of a path, though there is room for one.

    Args:
        path: of the file or directory that could not be made; it need not be there.
    """
    for directory in (path, *path.parents):
        try:
            disk = os.statvfs(directory)
        except OSError:
            continue
        return disk.f_files > 0 and disk.f_favail < _FEW and disk.f_bavail * disk.f_frsize >= _BYTES_MIN
    return False
