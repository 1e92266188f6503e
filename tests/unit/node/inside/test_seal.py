"""The filter of system calls, run by a small interpreter of its instructions."""

from __future__ import annotations

import errno
import struct

import pytest

from serverless_gpu.node.inside import seal

ALLOW, ENOSYS, EPERM = 0x7FFF0000, 0x00050000 | errno.ENOSYS, 0x00050000 | errno.EPERM
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
MOUNT = {"x86_64": 165, "aarch64": 40}
UNSHARE = {"x86_64": 272, "aarch64": 97}
PTRACE = {"x86_64": 101, "aarch64": 117}
OPENAT = {"x86_64": 257, "aarch64": 56}
SOCKET = {"x86_64": 41, "aarch64": 198}
NEWUSER, IO_URING_SETUP, CLONE3, MOVE_MOUNT = 0x10000000, 425, 435, 429


def judged(machine: str, number: int, argument: int = 0, audit: int | None = None, third: int = 0) -> int:
    """Return the value with which the filter answers a call."""
    data = struct.pack("IIQQQQ", number, MACHINES[machine] if audit is None else audit, 0, argument, 0, third)
    steps = list(struct.iter_unpack("HBBI", seal.call_filter(machine)))
    at, word = 0, 0
    while True:
        code, yes, no, value = steps[at]
        at += 1
        match code:
            case 0x20:
                (word,) = struct.unpack_from("I", data, value)
            case 0x06:
                return int(value)
            case 0x15:
                at += yes if word == value else no
            case 0x35:
                at += yes if word >= value else no
            case 0x45:
                at += yes if word & value else no
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_that_administer_a_machine_are_refused_and_others_pass(machine: str) -> None:
    for number in (MOUNT[machine], UNSHARE[machine], IO_URING_SETUP, MOVE_MOUNT):
        assert judged(machine, number) == EPERM
    assert judged(machine, CLONE3) == ENOSYS, "libc then uses clone, whose flags the filter can read"
    for number in (OPENAT[machine], PTRACE[machine], 1_000):
        assert judged(machine, number) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_a_clone_makes_processes_but_no_user_namespace(machine: str) -> None:
    assert judged(machine, CLONE[machine], 17) == ALLOW
    assert judged(machine, CLONE[machine], 17 | NEWUSER) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_sockets_whose_packets_have_no_uid_are_refused(machine: str) -> None:
    unknown_family, unknown_protocol = 0x00050000 | errno.EAFNOSUPPORT, 0x00050000 | errno.EPROTONOSUPPORT
    passed = {family for family in range(64) if judged(machine, SOCKET[machine], family) == ALLOW}
    assert passed == {1, 2, 10, 16}, "Unix, IPv4, IPv6, netlink"
    assert judged(machine, SOCKET[machine], 43) == unknown_family, "AF_SMC"
    for protocol in (256, 262):
        assert judged(machine, SOCKET[machine], 2, third=protocol) == unknown_protocol, "SMC and MPTCP"
    assert judged(machine, SOCKET[machine], 2, third=6) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_another_architecture_end_the_process(machine: str) -> None:
    assert judged(machine, OPENAT[machine], audit=0x40000003) == 0x80000000


def test_calls_of_the_x32_interface_are_missing() -> None:
    assert judged("x86_64", 0x40000000 | MOUNT["x86_64"]) == ENOSYS
