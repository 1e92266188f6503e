"""Attempts on processes of the node and of other principals."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
from collections.abc import Callable, Mapping

from .base import Attempt, NoTarget, Targets, check, libc, read_byte, system_call

_PTRACE_DETACH, _PTRACE_SEIZE = 17, 0x4206
_CLONE_NEWNS = 0x20000
_STEM = "sgpu-stem"


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _find(targets: Targets, name: str) -> int:
    """Return the pid of a target, unless the pid belongs to a process of the caller's own pid namespace.

    A pid namespace may use the same number for another process. /proc may hide a process that the kernel still finds.
    """
    pid, found = targets.number(f"{name}_pid"), ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        found = file.read().strip()
    if found and found != targets.text(f"{name}_name"):
        raise OSError(errno.ESRCH, f"process {pid} is {found}, a process of this run")
    return pid


def _on(name: str, use: Callable[[int], None]) -> Attempt:
    return lambda targets: use(_find(targets, name))


def _read_file(file: str) -> Callable[[int], None]:
    return lambda pid: read_byte(f"/proc/{pid}/{file}")


def _list_descriptors(pid: int) -> None:
    for name in os.listdir(f"/proc/{pid}/fd"):
        os.readlink(f"/proc/{pid}/fd/{name}")


def _writable_part(pid: int) -> int:
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            if " rw-p " in line:
                return int(line.partition("-")[0], 16)
    raise OSError(errno.ESRCH, "the process has no writable memory")


def _patch(pid: int) -> None:
    """Write a byte of another process's memory back to its place."""
    place = _writable_part(pid)
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(place)
        byte = memory.read(1)
        memory.seek(place)
        memory.write(byte)


def _trace(pid: int) -> None:
    check(libc.ptrace(_PTRACE_SEIZE, pid, None, None))
    libc.ptrace(_PTRACE_DETACH, pid, None, None)


def _read_memory(pid: int) -> None:
    buffer = ctypes.create_string_buffer(1)
    own = _Span(ctypes.cast(buffer, ctypes.c_void_p), 1)
    their = _Span(ctypes.c_void_p(_writable_part(pid)), 1)
    check(libc.process_vm_readv(pid, ctypes.byref(own), 1, ctypes.byref(their), 1, 0))


def _take_descriptor(pid: int) -> None:
    process = os.pidfd_open(pid)
    try:
        os.close(check(system_call("pidfd_getfd", process, 0, 0)))
    finally:
        os.close(process)


def _signal(pid: int) -> None:
    os.kill(pid, 0)


def _slow_down(pid: int) -> None:
    os.sched_setaffinity(pid, os.sched_getaffinity(pid))


def _limit(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_NOFILE, resource.prlimit(pid, resource.RLIMIT_NOFILE))


def _enter(pid: int) -> None:
    """Enter the mount namespace of another process."""
    namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    check(libc.setns(namespace, _CLONE_NEWNS))


def _trace_stem(targets: Targets) -> None:
    """Trace the nearest stem above this process, or the process that the node prepared instead."""
    pid = targets.optional_number("stem_pid") or os.getppid()
    while pid > 0 and not targets.optional_number("stem_pid"):
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
            fields = dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)
        if fields["Name"] == _STEM:
            break
        pid = int(fields["PPid"])
    if pid == 0:
        raise NoTarget("no process above this process is a stem")
    _trace(pid)


def _become(uid: int) -> None:
    os.setresuid(uid, uid, uid)


ATTEMPTS: Mapping[str, Attempt] = {
    "agent-variables": _on("agent", _read_file("environ")),
    "supervisor-variables": _on("supervisor", _read_file("environ")),
    "rank-variables": _on("victim", _read_file("environ")),
    "rank-arguments": _on("victim", _read_file("cmdline")),
    "rank-memory": _on("victim", _patch),
    "rank-memory-call": _on("victim", _read_memory),
    "rank-descriptors": _on("victim", _list_descriptors),
    "rank-files": _on("victim", _read_file("root/etc/passwd")),
    "take-descriptor": _on("victim", _take_descriptor),
    "trace-rank": _on("victim", _trace),
    "signal-rank": _on("victim", _signal),
    "slow-rank": _on("victim", _slow_down),
    "limit-rank": _on("victim", _limit),
    "enter-rank": _on("victim", _enter),
    "end-supervisor": _on("supervisor", _signal),
    "patch-supervisor": _on("supervisor", _patch),
    "end-agent": _on("agent", _signal),
    "end-ray": _on("ray", _signal),
    "patch-zygote": _on("zygote", _patch),
    "end-zygote": _on("zygote", _signal),
    "trace-stem": _trace_stem,
    "become-root": lambda _: _become(0),
    "become-other": lambda targets: _become(targets.number("victim_uid")),
}
