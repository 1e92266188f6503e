"""Gives up every right that a process does not need, before user code of a run starts.

    drop capabilities ─▶ no_new_privs ─▶ Landlock scopes ─▶ seccomp filter ─▶ not traceable by its children

The stem seals itself before it forks the ranks. All ranks of an attempt therefore share one Landlock domain. Within the
Landlock domain, ranks may signal each other, use `pidfd_getfd` and read each other's memory. CUDA IPC and NCCL need
access to the memory of other ranks. The Landlock domain refuses abstract sockets and signals outside of the attempt.

The seccomp filter refuses system calls that only administer a machine, and calls with a history of kernel bugs. The
filter does not refuse `ptrace`, because debuggers and profilers of the attempt's own processes need it. Sockets of
families other than Unix, IP and netlink, and the protocols SMC and MPTCP are refused. The kernel sends some of their
packets without the uid of the process, and the network rules select packets by uid. `clone3` takes its flags from
memory, which a filter cannot read. The filter therefore reports `clone3` as missing, so that libc uses `clone`.

Failure cases: `seal` raises OSError if the kernel refuses a step. After an error of `seal`, the stem ends without
starting a rank. `problem` checks in advance whether the kernel and the processor support each step.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

from . import linux

CAPABILITIES = {"SETPCAP": 8, "SYS_ADMIN": 21}
_CAPABILITY_VERSION_3 = 0x20080522
CAPABILITIES_MAX = 64
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 4, 22, 24, 38, 47
_AMBIENT_RAISE, _AMBIENT_CLEAR = 2, 4
_SECCOMP_MODE_FILTER = 2
_KEYCTL_JOIN_SESSION_KEYRING = 1

_libc = ctypes.CDLL(None, use_errno=True)


def seal() -> None:
    """Give up all capabilities and refuse dangerous system calls, for this process and its descendants.

    Raises OSError if the kernel refuses a step.
    """
    drop_bounding_set(())
    _prctl(_PR_CAP_AMBIENT, _AMBIENT_CLEAR)
    set_capabilities(())
    forbid_new_privileges()
    linux.enter_scopes(linux.SCOPE_SIGNAL | linux.SCOPE_ABSTRACT_SOCKET)
    _filter_calls()
    set_dumpable(value=False)


def problem() -> str:
    """Return "", or the reason why this machine cannot seal a process."""
    if platform.machine() not in _MACHINES:
        return f"no list of system calls for the processor {platform.machine()}"
    if linux.landlock_abi() < linux.SIGNALS_SINCE_ABI:
        return "Landlock with scopes is missing (Linux 6.12 or newer is needed)"
    return ""


def leave_keyring() -> None:
    """Leave the session keyring, because its possessors can read its keys under another uid too."""
    machine = _MACHINES.get(platform.machine())
    if machine is not None:
        _libc.syscall(machine.keyctl, _KEYCTL_JOIN_SESSION_KEYRING, None)  # Fails where the kernel has no keyrings.


def set_capabilities(wanted: tuple[int, ...]) -> None:
    """Set the permitted, effective and inheritable capabilities to `wanted`. Raises OSError."""
    mask = sum(1 << number for number in wanted)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(low, low, low, high, high, high)
    _check(_libc.capset(header, data), "cannot set capabilities")


def drop_bounding_set(kept: tuple[int, ...]) -> None:
    """Remove all capabilities except `kept` from the bounding set. Raises OSError."""
    for number in range(CAPABILITIES_MAX):
        if number not in kept and _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0) != 0:
            code = ctypes.get_errno()
            if code == errno.EINVAL:  # The kernel has no capability with this or a higher number.
                return
            raise OSError(code, f"cannot drop a capability: {os.strerror(code)}")


def keep_over_exec(wanted: tuple[int, ...]) -> None:
    """Let the next program keep capabilities. Raises OSError.

    The kernel grants the kept capabilities regardless of the program's file.
    """
    for number in wanted:
        _check(_libc.prctl(_PR_CAP_AMBIENT, _AMBIENT_RAISE, ctypes.c_ulong(number), 0, 0), "cannot keep a capability")


def forbid_new_privileges() -> None:
    """Make setuid programs and file capabilities ineffective for this process and its descendants."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def set_dumpable(*, value: bool) -> None:
    """Allow or refuse tracing by other processes of this uid. Forked children inherit the setting."""
    _prctl(_PR_SET_DUMPABLE, int(value))


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl({option})")


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


class _Machine:
    """Numbers of the refused system calls on one processor architecture."""

    def __init__(self, audit: int, calls: tuple[int, ...], clone: int, keyctl: int, socket: int) -> None:
        self.audit = audit  # Architecture in the data of a filter (linux/audit.h).
        self.calls = calls
        self.clone = clone
        self.keyctl = keyctl
        self.socket = socket


# System calls added since 2019 have the same number on every architecture.
_EVERYWHERE = (
    *(425, 426, 427),  # io_uring
    *(428, 429, 430, 431, 432, 433, 442, 443, 467),  # open_tree, move_mount, the fs… calls, mount_setattr, quotactl_fd
)
# The first numbers belong to acct, add_key, bpf, delete_module, finit_module, init_module, kexec_file_load, kexec_load,
# keyctl. The next numbers belong to mount, open_by_handle_at, perf_event_open, pivot_root, quotactl, reboot,
# request_key, setns, swapoff, swapon. The last numbers belong to umount2, unshare, userfaultfd and, on x86, iopl and
# ioperm.
_MACHINES = {
    "x86_64": _Machine(
        0xC000003E,
        (
            *(163, 248, 321, 176, 313, 175, 320, 246, 250, 165, 304, 298, 155, 179, 169, 249, 308, 168, 167, 166, 272),
            *(323, 172, 173),
        ),
        56,
        250,
        41,
    ),
    "aarch64": _Machine(
        0xC00000B7,
        (89, 217, 280, 106, 273, 105, 294, 104, 219, 40, 265, 241, 41, 60, 142, 218, 268, 225, 224, 39, 97, 282),
        220,
        219,
        198,
    ),
}
_SOCKET_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
_PROTOCOLS_END = 256  # The numbers of SMC (256) and MPTCP (262) do not fit into a packet's header.
_CLONE3 = 435
_CLONE_NEWUSER = 0x10000000
_X32_BIT = 0x40000000
_LOAD_WORD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_AT_NUMBER, _AT_AUDIT, _AT_FIRST_ARGUMENT, _AT_THIRD_ARGUMENT = 0, 4, 16, 32
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def call_filter(machine: str) -> bytes:
    """Return the classic BPF program for seccomp(2) on a processor architecture."""
    there = _MACHINES[machine]
    refused = _ERRNO | errno.EPERM
    steps: list[tuple[int, int, int, int]] = [
        (_LOAD_WORD, 0, 0, _AT_AUDIT),
        (_JUMP_EQUAL, 1, 0, there.audit),  # System calls of another architecture have other numbers.
        (_RETURN, 0, 0, _KILL),
        (_LOAD_WORD, 0, 0, _AT_NUMBER),
        (_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_JUMP_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for number in (*there.calls, *_EVERYWHERE):
        steps += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, refused)]
    steps += [
        (_JUMP_EQUAL, 0, 3, there.clone),
        (_LOAD_WORD, 0, 0, _AT_FIRST_ARGUMENT),
        (_JUMP_ANY_BIT, 0, 1, _CLONE_NEWUSER),
        (_RETURN, 0, 0, refused),
    ]
    families = [step for each in _SOCKET_FAMILIES for step in ((_JUMP_EQUAL, 0, 1, each), (_RETURN, 0, 0, _ALLOW))]
    socket = [
        (_LOAD_WORD, 0, 0, _AT_THIRD_ARGUMENT),
        (_JUMP_GREATER_EQUAL, 0, 1, _PROTOCOLS_END),
        (_RETURN, 0, 0, _ERRNO | errno.EPROTONOSUPPORT),
        (_LOAD_WORD, 0, 0, _AT_FIRST_ARGUMENT),
        *families,
        (_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT),
    ]
    steps += [
        (_LOAD_WORD, 0, 0, _AT_NUMBER),
        (_JUMP_EQUAL, 0, len(socket), there.socket),
        *socket,
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


_FILTERS = {machine: call_filter(machine) for machine in _MACHINES}


def _filter_calls() -> None:
    text = _FILTERS[platform.machine()]
    buffer = ctypes.create_string_buffer(text, len(text))
    program = _Program(len(text) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    made = _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(program), 0, 0)
    _check(made, "cannot install the filter of system calls")
