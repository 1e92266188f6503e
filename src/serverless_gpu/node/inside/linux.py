"""System calls that Python lacks (`prctl`, `tgkill`, Landlock), and process-tree searches.

This module works on Linux only.

`keep_signals_in` uses Landlock to prevent a rank from signalling processes other than its descendants. Without
`keep_signals_in`, `ray stop` in a rank would end every Ray process of the same user, including the processes of a Ray
pool. From Linux 6.12 on, Landlock can confine a process's signals to a domain. A rank in a domain still receives
SIGTERM from the supervisor. `keep_signals_in` does not restrict access to files, sockets or mounts.

    root                        enters the domain
    in a user namespace         enters the domain and gives up setuid programs, which have no effect there
    any other user              does not enter, because it would lose setuid programs such as the one that makes
                                NVIDIA's devices; `sgpu doctor` reports this

Failure cases: On an older kernel, or with Landlock disabled, `keep_signals_in` returns the reason. Without Landlock,
the rank runs without the signal restriction.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
from collections.abc import Callable, Iterable

_PR_SET_PDEATHSIG = 1
_PR_SET_KEEPCAPS = 8
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_FALLOC_FL_KEEP_SIZE = 1
_DESCRIPTORS_MAX = 1 << 20
_OOM_SCORE = 500  # OOM score of ranks, with which the OOM killer ends ranks before their supervisor.
# Only root may lower the OOM score. Other users rely on the higher score of the ranks.
_OOM_SCORE_PROTECTED = -900
_OOM_SCORE_FILE = "/proc/self/oom_score_adj"


# The zygote loads libc once. Loading libc again in each rank would take a millisecond.
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent dies. Exit if the parent has already died."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent dies. Exit if the parent has already died.

    The parent process may be in another pid namespace, because `parent` is a pidfd.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if readable([parent], 0):
        os._exit(1)


def readable(fds: Iterable[int], timeout_s: float | None = None) -> set[int]:
    """Wait until descriptors are readable or their peers have closed. Return the ready descriptors.

    The function uses `poll`, because `select` does not support descriptors above 1023. A pidfd becomes readable when
    its process ends. If `timeout_s` is None, the function waits without a limit.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}


def become_subreaper() -> None:
    """Make this process the parent of all its orphaned descendants, even after a double fork or `setsid`."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process. Raises OSError on failure.

    The kernel could deliver a signal for the whole process to any of its threads.
    """
    if not hasattr(_libc, "tgkill"):  # glibc before 2.30 and musl have no tgkill.
        os.kill(pid, number)
    elif _libc.tgkill(pid, pid, number) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def leave_descriptors() -> None:
    """Close all descriptors, so that this process keeps no output or channel open.

    Redirect descriptors 0 to 2 to /dev/null.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(3, limit if 0 < limit < _DESCRIPTORS_MAX else _DESCRIPTORS_MAX)


def allocate_behind(fd: int, offset: int, size: int) -> None:
    """Allocate disk space for a file from `offset`, without changing the file's size.

    Raises OSError if the disk is full or the file system does not support fallocate.
    """
    if _libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE, ctypes.c_long(offset), ctypes.c_long(size)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def set_name(name: str) -> None:
    """Set the process name that `ps` and `top` show (at most 15 bytes)."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _libc.prctl(_PR_SET_NAME, buffer, 0, 0, 0)


def limit_harm() -> None:
    """Disable core dumps and make this process a preferred OOM victim, with its child processes."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    _change_oom_score(lambda score: min(1000, max(0, score) + _OOM_SCORE))


def keep_capabilities() -> None:
    """Keep the permitted capabilities over the next change of the uid. Raises OSError."""
    _prctl(_PR_SET_KEEPCAPS, 1)


def outlive_ranks() -> None:
    """Protect this process from the OOM killer, if permitted. Child processes inherit the OOM score."""
    _change_oom_score(lambda score: min(score, _OOM_SCORE_PROTECTED))


def be_ordinary() -> None:
    """Reset this process's OOM protection, because the process can restart or runs user code."""
    _change_oom_score(lambda score: max(0, score))


def _change_oom_score(change: Callable[[int], int]) -> None:
    with contextlib.suppress(OSError), open(_OOM_SCORE_FILE, "r+", encoding="ascii") as file:
        score = change(int(file.read()))
        file.seek(0)
        file.write(str(score))


def descendants(pid: int) -> list[int]:
    """Return the pids of all descendants of a process, parents first."""
    found: list[int] = []
    queue = [pid]
    while queue:
        current = queue.pop()
        below = children(current)
        found += below
        queue += below
    return found


def kill_descendants(pid: int) -> int:
    """Send SIGKILL to every descendant of a process. Return the number of descendants.

    The caller repeats the call until it returns 0, because the processes may fork meanwhile.
    """
    pids = descendants(pid)
    for child in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    return len(pids)


def children(pid: int) -> list[int]:
    """Return the pids of a process's children, including unreaped children."""
    # The kernel lists child processes per thread, in the file of the thread that forked them.
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                found += [int(word) for word in file.read().split()]
    return found


SIGNALS_SINCE_ABI = 6
_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # Landlock system call numbers, which are equal on every architecture.
_LANDLOCK_VERSION = 1
SCOPE_ABSTRACT_SOCKET, SCOPE_SIGNAL = 1, 2
_PR_SET_NO_NEW_PRIVS = 38
_WHOLE_ID_MAP = ["0", "0", "4294967295"]


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_fs", ctypes.c_uint64), ("handled_net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


def keep_signals_in() -> str:
    """Confine the signals of this process and its descendants. Return "" or the reason for a failure."""
    why = landlock_refusal()
    if why:
        return why
    if os.geteuid() != 0 or _in_user_namespace():
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    try:
        enter_scopes(SCOPE_SIGNAL)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def enter_scopes(scopes: int) -> None:
    """Enter a Landlock domain that confines signals or abstract sockets. Raises OSError."""
    ruleset = _Ruleset(0, 0, scopes)
    fd = _libc.syscall(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.sizeof(ruleset), 0)
    if fd >= 0:
        entered = _libc.syscall(_RESTRICT_SELF, fd, 0)
        code = ctypes.get_errno()
        os.close(fd)
        if entered == 0:
            return
    else:
        code = ctypes.get_errno()
    raise OSError(code, os.strerror(code))


def landlock_abi() -> int:
    """Return the version of Landlock that this kernel supports, or a negative number without Landlock."""
    return int(_libc.syscall(_CREATE_RULESET, None, 0, _LANDLOCK_VERSION))


def landlock_refusal() -> str:
    """Return "", or the reason why this process cannot enter a Landlock signal domain."""
    if landlock_abi() < SIGNALS_SINCE_ABI:
        return "Linux 6.12 or newer is needed, with Landlock"
    if os.geteuid() != 0 and not _in_user_namespace():
        return "a user other than root would lose setuid programs"
    return ""


def _in_user_namespace() -> bool:
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return file.read().split() != _WHOLE_ID_MAP
    except OSError:
        return False
