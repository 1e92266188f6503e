"""Targets of attempts, and checked system calls."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable, Mapping

libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_long


class NoTarget(Exception):
    """The node has no target for an attempt."""


class Targets:
    """Targets that the node prepared, by name."""

    def __init__(self, found: Mapping[str, object]) -> None:
        self._found = found

    def text(self, name: str) -> str:
        """Return a target, such as a path. Raises NoTarget."""
        found = self._found.get(name)
        if not isinstance(found, str) or not found:
            raise NoTarget(f"the node has no target {name!r}")
        return found

    def number(self, name: str) -> int:
        """Return a target that is a number, such as a pid. Raises NoTarget."""
        found = self._found.get(name)
        if not isinstance(found, int) or found <= 0:
            raise NoTarget(f"the node has no target {name!r}")
        return found

    def optional_number(self, name: str) -> int:
        """Return a target that is a number, or 0 without the target."""
        found = self._found.get(name)
        return found if isinstance(found, int) else 0

    def texts(self, name: str) -> list[str]:
        """Return a list of targets. Raises NoTarget for an empty list."""
        found = self._found.get(name)
        if not isinstance(found, list) or not found:
            raise NoTarget(f"the node has no target {name!r}")
        return [str(each) for each in found]


Attempt = Callable[[Targets], None]
"""Returns if the attempt succeeds. Raises OSError if the machine refuses it, or NoTarget without a target."""

# Numbers of system calls on x86_64 and aarch64.
_NUMBERS = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clone3": (435, 435),
    "finit_module": (313, 273),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "io_uring_setup": (425, 425),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mq_open": (240, 180),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "reboot": (169, 142),
    "userfaultfd": (323, 282),
}
_MACHINES = ("x86_64", "aarch64")


def system_call(name: str, *arguments: object) -> int:
    """Call the kernel. Return the result, which is negative after a failure. Raises NoTarget."""
    machine = platform.machine()
    if machine not in _MACHINES:
        raise NoTarget(f"the system calls of the processor {machine} are not known")
    return int(libc.syscall(_NUMBERS[name][_MACHINES.index(machine)], *arguments))


def check(result: int, *accepted: int) -> int:
    """Return the result of a call. Raises OSError for a failure whose error number is not in `accepted`.

    The kernel reports an accepted error only after it has checked the caller's rights.
    """
    if result < 0:
        code = ctypes.get_errno()
        if code not in accepted:
            raise OSError(code, os.strerror(code))
    return result


def read_byte(path: str) -> None:
    """Read the first byte of a file. Raises OSError, also for an empty file."""
    with open(path, "rb", buffering=0) as file:
        if not file.read(1):
            raise OSError(errno.ENODATA, f"{path} is empty")


def open_for_writing(path: str) -> None:
    """Open a file for writing, and write nothing."""
    os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK))


def try_each(paths: list[str], use: Callable[[str], None]) -> None:
    """Return if one of several paths can be used. Raises the last OSError."""
    last = OSError(errno.ENOENT, "no path")
    for path in paths:
        try:
            use(path)
        except OSError as error:
            last = error
        else:
            return
    raise last
