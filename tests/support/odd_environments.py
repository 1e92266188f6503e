"""Environments that people run in and that this machine is not: system calls and capabilities that are refused, places
that cannot be written to. Each is a command to put before another one.

    refusing("no-flock")            a seccomp filter answers the call with an error, in the command and its children
    without("sys_admin")            root without a capability, as in a container
    read_only_root(home)            every file system is read-only, but for some directories   (bubblewrap)

As a program, this module installs a filter and executes what follows: it needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import shutil
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_CLONE_THREAD = 0x10000
_OFD_SETLK, _OFD_SETLKW = 37, 38


class Refusal(NamedTuple):
    """A system call that fails.

    Attributes:
        call: its name.
        error: what it fails with.
        argument: the number of the argument that decides, or -1: the call always fails.
        values: with which the call fails.
        bit: with which it fails, as an alternative.
    """

    call: str
    error: int
    argument: int = -1
    values: tuple[int, ...] = ()
    bit: int = 0


_RECORD_LOCKS = (fcntl.F_SETLK, fcntl.F_SETLKW, _OFD_SETLK, _OFD_SETLKW)

FILTERS: Mapping[str, tuple[Refusal, ...]] = {
    # Lustre without `-o flock`, some FUSE file systems.
    "no-flock": (Refusal("flock", errno.ENOSYS),),
    # NFS without lockd: flock is a record lock there.
    "no-lock-server": (
        Refusal("flock", errno.ENOLCK),
        Refusal("fcntl", errno.ENOLCK, argument=1, values=_RECORD_LOCKS),
    ),
    "no-record-locks": (Refusal("fcntl", errno.ENOLCK, argument=1, values=_RECORD_LOCKS),),
    # Linux before 5.3, and Docker before 20.10.
    "no-pidfd": (Refusal("pidfd_open", errno.ENOSYS),),
    "no-pidfd-allowed": (Refusal("pidfd_open", errno.EPERM),),
    # exFAT, some FUSE and object-storage mounts.
    "no-hard-links": (Refusal("link", errno.EPERM), Refusal("linkat", errno.EPERM)),
    "no-symlinks": (Refusal("symlink", errno.EPERM), Refusal("symlinkat", errno.EPERM)),
    # A container at its limit of tasks: processes still start, threads do not.
    "no-threads": (
        Refusal("clone3", errno.ENOSYS),  # its flags lie in memory, which a filter cannot read: libc calls clone then
        Refusal("clone", errno.EAGAIN, argument=0, bit=_CLONE_THREAD),
    ),
    # Docker's own profile for who has no CAP_SYS_ADMIN.
    "no-namespaces": (Refusal("unshare", errno.EPERM), Refusal("mount", errno.EPERM)),
}

_X86_64, _AARCH64 = 0xC000003E, 0xC00000B7
_NUMBERS: Mapping[str, tuple[int, Mapping[str, int]]] = {
    "x86_64": (
        _X86_64,
        {
            "flock": 73,
            "fcntl": 72,
            "pidfd_open": 434,
            "link": 86,
            "linkat": 265,
            "symlink": 88,
            "symlinkat": 266,
            "clone": 56,
            "clone3": 435,
            "unshare": 272,
            "mount": 165,
        },
    ),
    "aarch64": (
        _AARCH64,
        {
            "flock": 32,
            "fcntl": 25,
            "pidfd_open": 434,
            "linkat": 37,
            "symlinkat": 36,
            "clone": 220,
            "clone3": 435,
            "unshare": 97,
            "mount": 40,
        },
    ),
}


def refusing(*names: str) -> tuple[str, ...]:
    """Return what to put before a command whose system calls are refused, by names of `FILTERS`."""
    assert set(names) <= set(FILTERS), f"no such filter: {names}"
    return (sys.executable, "-I", __file__, *names, "--")


def without(*capabilities: str) -> tuple[str, ...]:
    """Return what to put before a command that root runs without capabilities: ``"sys_admin"``, ``"all"``."""
    assert os.geteuid() == 0, "only root has capabilities to lose"
    lost = ",".join(f"-{name}" for name in capabilities)
    return ("setpriv", f"--bounding-set={lost}", f"--inh-caps={lost}")


def read_only_root(*writable: Path) -> tuple[str, ...]:
    """Return what to put before a command that can write to some directories only, and stands in the root."""
    assert shutil.which("bwrap") is not None, "these tests need `bwrap` of bubblewrap"
    command = ["bwrap", "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--bind", "/proc", "/proc"]
    for path in writable:
        command += ["--bind", str(path), str(path)]
    return (*command, "--cap-add", "ALL", "--chdir", "/", "--")


def install(names: list[str]) -> None:
    """Have the kernel refuse system calls of this process and all that it starts, for good.

    Raises:
        OSError: the kernel takes no filter.
    """
    program = _program([refusal for name in names for refusal in FILTERS[name]])
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(program, len(program))
    filters = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(set_seccomp, mode_filter, filters, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"no seccomp filter can be installed: {os.strerror(code)}")


def _program(refusals: list[Refusal]) -> bytes:
    """Return a filter of the kernel's classic BPF, which looks at the number of a call and at one argument."""
    architecture, numbers = _NUMBERS[platform.machine()]
    load, equal, any_bit, end = 0x20, 0x15, 0x45, 0x06
    allow, fail = 0x7FFF0000, 0x00050000
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, allow), (load, 0, 0, 0)]
    for refusal in refusals:
        if refusal.call not in numbers:  # this architecture has no such call
            continue
        refused = (end, 0, 0, fail | refusal.error)
        if refusal.argument < 0:
            steps += [(equal, 0, 1, numbers[refusal.call]), refused]
            continue
        tests = [(equal, value) for value in refusal.values] or [(any_bit, refusal.bit)]
        body = [(load, 0, 0, 16 + 8 * refusal.argument)]
        for code, value in tests:
            body += [(code, 0, 1, value), refused]
        body.append((load, 0, 0, 0))
        steps += [(equal, 0, len(body), numbers[refusal.call]), *body]
    steps.append((end, 0, 0, allow))
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def main(arguments: list[str]) -> None:
    """Install filters and execute a command: NAME… -- COMMAND…."""
    split = arguments.index("--")
    install(arguments[:split])
    os.execvp(arguments[split + 1], arguments[split + 1 :])


if __name__ == "__main__":
    main(sys.argv[1:])
