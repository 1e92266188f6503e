"""Recorded descriptions of macOS and Windows, which stand in for machines that the tests do not have.

A description lists what CPython 3.11 to 3.13 lacks on the system, compared with Linux: modules, and names of modules
that are there. `pretend` turns this process into such a one, as far as code of ours can see. What the kernel of the
other system does differently stays untested.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple


class System(NamedTuple):
    """An operating system as Python shows it.

    Attributes:
        platform: `sys.platform`.
        lacks_modules: modules that cannot be imported.
        lacks_names: by module, beginnings of names that it does not have, with spaces between them.
        lacks_files: beginnings of paths that do not exist.
    """

    platform: str
    lacks_modules: frozenset[str]
    lacks_names: dict[str, str]
    lacks_files: tuple[str, ...]


_OF_LINUX = {
    "os": "pidfd_open memfd_create MFD_ sched_ SCHED_ O_PATH O_TMPFILE O_DIRECT O_NOATIME posix_fadvise "
    "posix_fallocate POSIX_FADV getxattr setxattr listxattr removexattr copy_file_range splice SPLICE_ eventfd EFD_ "
    "setns unshare CLONE_ getrandom GRND_ P_PIDFD getresuid getresgid setresuid setresgid RWF_",
    "signal": "pidfd_send_signal sigtimedwait sigwaitinfo SIGRTM SIGPWR SIGSTKFLT SIGPOLL",
    "socket": "AF_NETLINK AF_PACKET AF_VSOCK AF_ALG AF_CAN SOCK_CLOEXEC SOCK_NONBLOCK SO_PASS SO_PEERCRED SO_PEERSEC "
    "SO_MARK SO_BINDTODEVICE SO_DOMAIN SO_PROTOCOL MSG_CMSG_CLOEXEC SCM_CREDENTIALS TCP_USER_TIMEOUT TCP_QUICKACK "
    "TCP_DEFER TCP_CORK TCP_INFO",
    "select": "epoll EPOLL",
    "time": "CLOCK_BOOTTIME CLOCK_TAI",
    "errno": "EBADFD EREMOTEIO ENOKEY EHWPOISON ERFKILL EUCLEAN ENOMEDIUM",
    "fcntl": "F_SETPIPE F_GETPIPE F_ADD_SEALS F_GET_SEALS F_SEAL F_NOTIFY F_SETSIG DN_",
    "resource": "prlimit RLIMIT_RT RLIMIT_NICE RLIMIT_SIGPENDING RLIMIT_MSGQUEUE RLIMIT_OFILE",
}
_OF_UNIX = {
    "os": "fork register_at_fork getuid geteuid getgid getpgid killpg setsid statvfs uname chown mkfifo openpty "
    "posix_spawn sendfile sysconf wait O_CLOEXEC O_DIRECTORY",
    "signal": "SIGKILL SIGHUP SIGUSR SIGCHLD SIGALRM pthread_ setitimer",
    "socket": "AF_UNIX SOCK_SEQPACKET SCM_RIGHTS send_fds recv_fds socketpair",
    "select": "poll POLL",
    "time": "CLOCK_ clock_gettime tzset",
}
_LINUX_FILES = ("/proc/", "/sys/", "/dev/shm", "/etc/machine-id")

MACOS = System(
    platform="darwin",
    lacks_modules=frozenset({"psutil", "pynvml", "spwd"}),  # pyproject.toml asks for the first two on Linux only
    lacks_names=_OF_LINUX,
    lacks_files=_LINUX_FILES,
)
WINDOWS = System(
    platform="win32",
    lacks_modules=MACOS.lacks_modules
    | {"fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty", "uvloop"},
    lacks_names={name: f"{_OF_LINUX.get(name, '')} {_OF_UNIX[name]}" for name in _OF_UNIX},
    lacks_files=_LINUX_FILES,
)
SYSTEMS = {"macOS": MACOS, "Windows": WINDOWS}

# Loaded before the change: they decide by `sys.platform` what to load, and what that is exists on the other system.
_OF_OTHERS = "asyncio click httpx2 multiprocessing platform subprocess sysconfig tempfile urllib.request uuid zoneinfo"


class _Missing:
    """A finder of modules that finds none of those that a system lacks."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Refuse what is not there."""
        if name.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def pretend(name: str) -> None:
    """Have this process look like one of another system, for modules that are imported from now on.

    Args:
        name: of `SYSTEMS`.
    """
    system = SYSTEMS[name]
    for module in _OF_OTHERS.split():
        importlib.import_module(module)
    for module, beginnings in system.lacks_names.items():
        there = importlib.import_module(module)
        for each in [each for each in vars(there) if each.startswith(tuple(beginnings.split()))]:
            delattr(there, each)
    for module in [module for module in sys.modules if module.partition(".")[0] in system.lacks_modules - {"posix"}]:
        del sys.modules[module]
    sys.meta_path.insert(0, _Missing(system.lacks_modules))
    vars(sys)["platform"] = system.platform  # a type checker takes an assignment to `sys.platform` for a mistake

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir") and arguments and _is_below(arguments[0], system.lacks_files):
            raise FileNotFoundError(2, "No such file or directory", arguments[0])

    sys.addaudithook(refuse)
    for function in ("stat", "lstat", "readlink"):
        setattr(os, function, _without(getattr(os, function), system.lacks_files))


def _without(function: Callable[..., Any], beginnings: tuple[str, ...]) -> Callable[..., Any]:
    def call(path: object, *arguments: Any, **named: Any) -> Any:
        if _is_below(path, beginnings):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *arguments, **named)

    return call


def _is_below(path: object, beginnings: tuple[str, ...]) -> bool:
    return isinstance(path, builtins.str | bytes | os.PathLike) and os.fsdecode(path).startswith(beginnings)
