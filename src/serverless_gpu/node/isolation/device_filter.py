"""Limits the device nodes that an attempt's processes can open, in addition to their private /dev.

    attempt's cgroup v2 ◀── BPF_PROG_ATTACH ── program: basic devices and the attempt's devices, nothing else

A sandbox shows only the given device nodes, and its ranks cannot make others. The filter is a second line for the case
that a process of the attempt reaches another device node. On cgroup v2, the kernel takes the list of devices as a
program of the cgroup. The program also works on hybrid hosts, where cgroup v1 has the other controllers. Every process
in the cgroup has the filter. The kernel combines the filter with filters of parent cgroups, such as the filters of
systemd. The kernel removes the filter with the cgroup.

Failure cases: If the kernel refuses the program (for example without CONFIG_CGROUP_BPF, or in a container that forbids
`bpf`), `limit_devices` returns a note for the receipt. The attempt then runs with its private /dev only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from serverless_gpu.node.inside.sandbox import BASIC_DEVICES

_BPF = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD, _PROG_ATTACH = 5, 8
_PROGRAM_TYPE, _ATTACH_TYPE, _ALLOW_MULTI = 15, 6, 2  # BPF_PROG_TYPE_CGROUP_DEVICE, BPF_CGROUP_DEVICE.
_ATTRIBUTES_BYTES = 128
_CHARACTER_DEVICE, _MAKE_NODE = 2, 1
_PTMX, _PTS_MAJORS = (5, 2), range(136, 144)

_LOAD, _MOVE, _AND, _SHIFT_RIGHT, _SET, _JUMP_EQUAL, _JUMP_NOT_EQUAL, _EXIT = (
    *(0x61, 0xBF, 0x57, 0x77, 0xB7, 0x15, 0x55),
    0x95,
)
_RESULT, _CONTEXT, _KIND, _ACCESS, _MAJOR, _MINOR = range(6)  # Registers of the program.

Numbers = tuple[int, int | None]
"""Major and minor number of a character device. A minor number of None stands for all minor numbers."""


def limit_devices(cgroup: Path | None, nodes: Sequence[str], account: int) -> str:
    """Let the processes of a cgroup open only basic devices and `nodes`.

    Return "", or a note for the receipt if the kernel refuses. The cgroup must belong to the uid `account`, because the
    spawner calls this function as root for another account.
    """
    if cgroup is None:
        return "the attempt has no cgroup with a filter of devices. Its private /dev shows only its own devices"
    try:
        basic = (f"/dev/{name}" for name in BASIC_DEVICES)
        pts: list[Numbers] = [(major, None) for major in _PTS_MAJORS]
        allowed = [*numbers_of(basic), _PTMX, *pts, *numbers_of(nodes)]
        _attach(cgroup, device_program(allowed), account)
    except OSError as error:
        why = error.strerror or str(error)
        return f"the kernel refused a filter of devices ({why}). The private /dev shows only the attempt's devices"
    return ""


def numbers_of(nodes: Iterable[str]) -> list[Numbers]:
    """Return the numbers of the character devices among paths. Raises OSError for a missing path."""
    found = [os.stat(path) for path in nodes]
    return [(os.major(each.st_rdev), os.minor(each.st_rdev)) for each in found if stat.S_ISCHR(each.st_mode)]


def device_program(allowed: Iterable[Numbers]) -> bytes:
    """Return a BPF program that lets processes open some character devices, and refuses all others."""
    refuse = (_step(_SET, _RESULT, value=0), _step(_EXIT))
    steps = [
        _step(_LOAD, _KIND, _CONTEXT, offset=0),
        _step(_MOVE, _ACCESS, _KIND),
        _step(_AND, _KIND, value=0xFFFF),
        _step(_SHIFT_RIGHT, _ACCESS, value=16),
        _step(_AND, _ACCESS, value=_MAKE_NODE),
        _step(_LOAD, _MAJOR, _CONTEXT, offset=4),
        _step(_LOAD, _MINOR, _CONTEXT, offset=8),
        _step(_JUMP_EQUAL, _KIND, offset=2, value=_CHARACTER_DEVICE),
        *refuse,
        _step(_JUMP_EQUAL, _ACCESS, offset=2, value=0),
        *refuse,
    ]
    for major, minor in dict.fromkeys(allowed):
        steps.append(_step(_JUMP_NOT_EQUAL, _MAJOR, offset=2 if minor is None else 3, value=major))
        if minor is not None:
            steps.append(_step(_JUMP_NOT_EQUAL, _MINOR, offset=2, value=minor))
        steps += [_step(_SET, _RESULT, value=1), _step(_EXIT)]
    return b"".join([*steps, *refuse])


def _step(code: int, register: int = 0, source: int = 0, *, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("=BBhi", code, source << 4 | register, offset, value)


def _attach(cgroup: Path, program: bytes, account: int) -> None:
    text, license_name = ctypes.create_string_buffer(program, len(program)), ctypes.create_string_buffer(b"GPL")
    load = struct.pack(
        "=IIQQ", _PROGRAM_TYPE, len(program) // 8, ctypes.addressof(text), ctypes.addressof(license_name)
    )
    directory = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(directory).st_uid != account:
            raise PermissionError(errno.EPERM, "the cgroup has another owner", str(cgroup))
        loaded = _bpf(_PROG_LOAD, load)
        try:
            _bpf(_PROG_ATTACH, struct.pack("=IIII", directory, loaded, _ATTACH_TYPE, _ALLOW_MULTI))
        finally:
            os.close(loaded)
    finally:
        os.close(directory)


def _bpf(command: int, attributes: bytes) -> int:
    number = _BPF.get(platform.machine())
    if number is None:
        raise OSError(f"bpf has no known number on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    block = ctypes.create_string_buffer(attributes.ljust(_ATTRIBUTES_BYTES, b"\0"), _ATTRIBUTES_BYTES)
    result = libc.syscall(number, command, block, _ATTRIBUTES_BYTES)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)
