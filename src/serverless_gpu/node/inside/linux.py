"""System calls that the standard library lacks (`prctl`, `tgkill`, Landlock), and walking descendants.

Linux only; elsewhere every call here does nothing, and a caller that needs the effect asks first.

Landlock (`keep_signals_in`) keeps a rank from signalling any process but its own descendants: a Ray that makes a pool
of several machines runs as the same user as ranks do, and `ray stop` ends every Ray it finds. From Linux 6.12 on it
confines signals and debuggers to a domain; the supervisor's SIGTERM still arrives from outside. Files, sockets and
mounts stay as they are.

    root                        enters as it is
    in a user namespace         enters; setuid programs, which do nothing for it any more, are given up for good
    any other user              would have to give up setuid programs, such as the one that makes NVIDIA's devices: it
                                does not enter, and `sgpu doctor` says so

Failure cases: an older kernel, or Landlock switched off (the reason is returned, the rank runs).
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
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_FALLOC_FL_KEEP_SIZE = 1
_DESCRIPTORS_MAX = 1 << 20
_OOM_SCORE = 500  # the rank that grew is the kernel's choice, not the processes that look after it
_OOM_SCORE_PROTECTED = -900  # only root may have that; without it the ranks' 500 must do
_OOM_SCORE_FILE = "/proc/self/oom_score_adj"


# Loaded once, in the zygote: a rank that opened it again would pay a millisecond.
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; end it if that parent is gone already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; end it if that parent is gone already.

    `parent` is a pidfd, so the parent may be in another pid namespace.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if readable([parent], 0):
        os._exit(1)


def readable(fds: Iterable[int], timeout_s: float | None = None) -> set[int]:
    """Wait until descriptors can be read, or are closed at their other end, and return which.

    `select` knows no descriptor above 1023, and a caller's process may have more. A pidfd can be read when its process
    has ended. `timeout_s` of None waits for ever.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}


def become_subreaper() -> None:
    """Become the parent of every orphaned descendant, however it detached itself (double fork, `setsid`)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to a process's main thread; one to the process may go to any of its threads. OSError."""
    if not hasattr(_libc, "tgkill"):  # glibc before 2.30, musl
        os.kill(pid, number)
    elif _libc.tgkill(pid, pid, number) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def leave_descriptors() -> None:
    """Close every descriptor, so that no output or channel is held open; the first three lead nowhere."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(3, limit if 0 < limit < _DESCRIPTORS_MAX else _DESCRIPTORS_MAX)


def allocate_behind(fd: int, offset: int, size: int) -> None:
    """Allocate disk space behind a file from `offset`, without changing its size.

    Raises OSError when the disk is full, or its file system cannot do that.
    """
    if _libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE, ctypes.c_long(offset), ctypes.c_long(size)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def set_name(name: str) -> None:
    """Set the name `ps` and `top` show (15 bytes)."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _libc.prctl(_PR_SET_NAME, buffer, 0, 0, 0)


def limit_harm() -> None:
    """Write no core dumps, and be the kernel's first choice when memory runs out; children inherit both."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    _change_oom_score(lambda score: min(1000, max(0, score) + _OOM_SCORE))


def outlive_ranks() -> None:
    """Make this process the last victim when memory runs out, where permitted; children inherit it."""
    _change_oom_score(lambda score: min(score, _OOM_SCORE_PROTECTED))


def be_ordinary() -> None:
    """Make this process an ordinary victim when memory runs out: restartable, or running user code."""
    _change_oom_score(lambda score: max(0, score))


def _change_oom_score(change: Callable[[int], int]) -> None:
    with contextlib.suppress(OSError), open(_OOM_SCORE_FILE, "r+", encoding="ascii") as file:
        score = change(int(file.read()))
        file.seek(0)
        file.write(str(score))


def descendants(pid: int) -> list[int]:
    """Return the pids of all living descendants of a process, parents first."""
    found: list[int] = []
    queue = [pid]
    while queue:
        current = queue.pop()
        below = children(current)
        found += below
        queue += below
    return found


def kill_descendants(pid: int) -> int:
    """Send SIGKILL to every descendant of a process and return how many there were.

    A process may fork between the look and the kill, so the caller repeats this until it returns 0.
    """
    pids = descendants(pid)
    for child in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    return len(pids)


def children(pid: int) -> list[int]:
    """Return the pids of a process's children, also of those that have ended and were not reaped."""
    # One file per thread: a child belongs to the thread that forked it.
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                found += [int(word) for word in file.read().split()]
    return found


SIGNALS_SINCE_ABI = 6
_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # the same number on every architecture
_LANDLOCK_VERSION = 1
_SCOPE_SIGNAL = 2
_PR_SET_NO_NEW_PRIVS = 38
_WHOLE_ID_MAP = ["0", "0", "4294967295"]


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_fs", ctypes.c_uint64), ("handled_net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


def keep_signals_in() -> str:
    """Keep this process and its descendants from signalling others; return "", or why not."""
    why = landlock_refusal()
    if why:
        return why
    ruleset = _Ruleset(0, 0, _SCOPE_SIGNAL)
    fd = _libc.syscall(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.sizeof(ruleset), 0)
    if fd < 0:
        return os.strerror(ctypes.get_errno())
    try:
        if os.geteuid() != 0 or _in_user_namespace():
            _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return os.strerror(ctypes.get_errno()) if _libc.syscall(_RESTRICT_SELF, fd, 0) else ""
    finally:
        os.close(fd)


def landlock_refusal() -> str:
    """Return why this process cannot keep its signals in, or ""; nothing is changed."""
    abi = _libc.syscall(_CREATE_RULESET, None, 0, _LANDLOCK_VERSION)
    if abi < SIGNALS_SINCE_ABI:
        return "Linux 6.12 or newer is needed, with Landlock"
    if os.geteuid() != 0 and not _in_user_namespace():
        return "who is not root would have to do without setuid programs"
    return ""


def _in_user_namespace() -> bool:
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return file.read().split() != _WHOLE_ID_MAP
    except OSError:
        return False
