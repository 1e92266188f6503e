"""Attempts on devices, and on kernel interfaces that administer a machine."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import select
import signal
import socket
import stat
import tempfile
from collections.abc import Mapping

from .base import Attempt, NoTarget, Targets, check, libc, open_for_writing, read_byte, system_call, try_each

_NAMESPACES = {"user": 0x10000000, "mount": 0x20000, "pid": 0x20000000, "net": 0x40000000}
_MS_NODEV_NOSUID_NOEXEC = 0x2 | 0x4 | 0x8
_MNT_DETACH = 2
_FSCONFIG_CMD_CREATE = 6
_NOBODY = 65_534
_SETUID_PROGRAMS = ("su", "passwd", "chsh", "newgrp", "gpasswd", "sudo", "pkexec")
_SETUID_PLACES = ("/usr/bin", "/bin", "/usr/local/bin")
_SETUID_LOOKS, _SETUID_PAUSE_MS = 20, 10
_PERF_ATTRIBUTES_BYTES = 128
_SO_MARK = 36


def _open_device(path: str) -> None:
    os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))


def _raw_disk(targets: Targets) -> None:
    try_each(targets.texts("disks"), read_byte)


def _make_device(_: Targets) -> None:
    """Make a device node and open it. Some kernels allow a node that cannot be opened."""
    with tempfile.TemporaryDirectory() as place:
        path = f"{place}/null"
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        _open_device(path)


def _kernel_log(_: Targets) -> None:
    log = os.open("/dev/kmsg", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.read(log, 8192)
    finally:
        os.close(log)


def _mount(_: Targets) -> None:
    """Mount an empty file system on an empty directory for a moment."""
    place = tempfile.mkdtemp()
    try:
        check(libc.mount(b"tmpfs", place.encode(), b"tmpfs", ctypes.c_ulong(_MS_NODEV_NOSUID_NOEXEC), None))
        check(libc.umount2(place.encode(), _MNT_DETACH))
    finally:
        os.rmdir(place)  # Never delete the content: it would belong to a mount that could not be removed.


def _mount_detached(kind: bytes) -> Attempt:
    """Create a mount without a place, which no other process sees."""

    def attempt(_: Targets) -> None:
        context = check(system_call("fsopen", kind, 0))
        check(system_call("fsconfig", context, _FSCONFIG_CMD_CREATE, None, None, 0))
        os.close(check(system_call("fsmount", context, 0, 0)))

    return attempt


def _new_namespace(kind: str) -> Attempt:
    return lambda _: _check_done(libc.unshare(_NAMESPACES[kind]))


def _check_done(result: int, *accepted: int) -> None:
    check(result, *accepted)


def _clone(_: Targets) -> None:
    """Make a user namespace with clone3, whose flags a filter of system calls cannot read."""
    arguments = (ctypes.c_uint64 * 11)(_NAMESPACES["user"], 0, 0, 0, signal.SIGCHLD)
    pid = system_call("clone3", ctypes.byref(arguments), ctypes.sizeof(arguments))
    if pid == 0:
        os._exit(0)
    check(pid)
    os.waitpid(pid, 0)


def _change_root(_: Targets) -> None:
    check(libc.chroot(b"/"))


def _setuid_program(_: Targets) -> None:
    """Start a setuid program as a user other than root. Return if the program gets root's rights."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    paths = [f"{place}/{name}" for name in _SETUID_PROGRAMS for place in _SETUID_PLACES]
    found = [path for path in paths if _is_setuid(path)]
    if not found:
        raise NoTarget("the machine has no setuid program")
    kept_in, _kept_out = os.pipe()  # The program waits for a password until this process ends.
    pid = os.fork()
    if pid == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(kept_in, 0)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.execv(found[0], [os.path.basename(found[0])])
    try:
        for _look in range(_SETUID_LOOKS):
            with open(f"/proc/{pid}/status", "rb") as status:  # The other uid may not load Python's codecs.
                uids = next(line for line in status if line.startswith(b"Uid:")).split()
            if uids[2] == b"0":  # The second number is the effective uid.
                return
            select.poll().poll(_SETUID_PAUSE_MS)
    finally:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    raise OSError(errno.EPERM, f"{found[0]} gets no rights of root")


def _is_setuid(path: str) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return bool(status.st_mode & stat.S_ISUID) and bool(status.st_mode & stat.S_IXOTH) and os.access(path, os.X_OK)


def _capabilities(_: Targets) -> None:
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        held = [line.split()[1] for line in status if line.startswith(("CapInh", "CapPrm", "CapEff", "CapAmb"))]
    if not any(int(mask, 16) for mask in held):
        raise OSError(errno.EPERM, "the process holds no capability")


def _load_program(_: Targets) -> None:
    """Create a map of the kernel's virtual machine (BPF_MAP_CREATE of an array)."""
    attributes = (ctypes.c_uint32 * 32)(2, 4, 4, 1)
    os.close(check(system_call("bpf", 0, ctypes.byref(attributes), ctypes.sizeof(attributes))))


def _count_events(_: Targets) -> None:
    """Count the page faults of the whole machine's first processor."""
    attributes = (ctypes.c_uint8 * _PERF_ATTRIBUTES_BYTES)()
    ctypes.cast(attributes, ctypes.POINTER(ctypes.c_uint32))[0] = 1  # PERF_TYPE_SOFTWARE
    ctypes.cast(attributes, ctypes.POINTER(ctypes.c_uint32))[1] = _PERF_ATTRIBUTES_BYTES
    ctypes.cast(attributes, ctypes.POINTER(ctypes.c_uint64))[1] = 2  # PERF_COUNT_SW_PAGE_FAULTS
    os.close(check(system_call("perf_event_open", ctypes.byref(attributes), -1, 0, -1, 0)))


def _handle_faults(_: Targets) -> None:
    os.close(check(system_call("userfaultfd", os.O_CLOEXEC)))


def _ring(_: Targets) -> None:
    os.close(check(system_call("io_uring_setup", 1, ctypes.create_string_buffer(256))))


def _keyring(_: Targets) -> None:
    check(system_call("keyctl", 0, -3, 1))  # KEYCTL_GET_KEYRING_ID of the session, and create it.


def _set_host_name(_: Targets) -> None:
    name = os.uname().nodename.encode()
    check(libc.sethostname(name, len(name)))


def _raise_priority(_: Targets) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, -1)


def _real_time(_: Targets) -> None:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def _escape_memory_killer(_: Targets) -> None:
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("-1000")


def _raw_socket(_: Targets) -> None:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()


def _mark_packets(_: Targets) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.setsockopt(socket.SOL_SOCKET, _SO_MARK, 1)


def _leave_cgroup(targets: Targets) -> None:
    try_each([f"{place}/cgroup.procs" for place in targets.texts("cgroups")], open_for_writing)


def _read_cgroup(targets: Targets) -> None:
    try_each([f"{place}/cgroup.procs" for place in targets.texts("cgroups")], read_byte)


def _port_rights(_: Targets) -> None:
    """Reach the processor's I/O ports (x86 only)."""
    if platform.machine() != "x86_64":
        raise NoTarget("only x86 has I/O ports")
    check(libc.ioperm(0x80, 1, 1))


ATTEMPTS: Mapping[str, Attempt] = {
    "other-device": lambda targets: try_each(targets.texts("devices"), _open_device),
    "raw-disk": _raw_disk,
    "make-device": _make_device,
    "kernel-log": _kernel_log,
    "mount-files": _mount,
    "mount-devices": _mount_detached(b"devtmpfs"),
    "mount-cgroups": _mount_detached(b"cgroup2"),
    "mount-by-descriptor": _mount_detached(b"tmpfs"),
    "user-namespace": _new_namespace("user"),
    "user-namespace-clone3": _clone,
    "mount-namespace": _new_namespace("mount"),
    "network-namespace": _new_namespace("net"),
    "change-root": _change_root,
    "setuid-program": _setuid_program,
    "capabilities": _capabilities,
    "kernel-program": _load_program,
    "performance-events": _count_events,
    "page-fault-handler": _handle_faults,
    "io-uring": _ring,
    "key-ring": _keyring,
    "replace-kernel": lambda _: _check_done(system_call("kexec_load", 0, 99, None, 0), errno.EINVAL),
    "kernel-module": lambda _: _check_done(system_call("finit_module", -1, b"", 0), errno.EBADF),
    "restart-machine": lambda _: _check_done(system_call("reboot", 0, 0, 0, None), errno.EINVAL),
    "swap": lambda _: _check_done(libc.swapon(b"/sgpu-canary-does-not-exist", 0), errno.ENOENT),
    "host-name": _set_host_name,
    "io-ports": _port_rights,
    "core-pattern": lambda _: open_for_writing("/proc/sys/kernel/core_pattern"),
    "kernel-setting": lambda _: open_for_writing("/proc/sys/vm/overcommit_memory"),
    "system-request": lambda _: open_for_writing("/proc/sysrq-trigger"),
    "machine-setting": lambda _: try_each(
        ["/sys/kernel/mm/transparent_hugepage/enabled", "/sys/kernel/mm/ksm/run", "/sys/power/state"], open_for_writing
    ),
    "leave-cgroup": _leave_cgroup,
    "read-cgroup": _read_cgroup,
    "release-agent": lambda targets: try_each(targets.texts("release_agents"), open_for_writing),
    "raise-priority": _raise_priority,
    "real-time": _real_time,
    "memory-killer": _escape_memory_killer,
    "raw-socket": _raw_socket,
    "mark-packets": _mark_packets,
}
