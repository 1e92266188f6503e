"""The filter of devices, run by a small interpreter of its instructions."""

from __future__ import annotations

import struct

import pytest

from serverless_gpu.node.isolation.device_filter import Numbers, device_program, limit_devices
from tests.support.golden import golden

BLOCK, CHARACTER = 1, 2
MAKE, READ, WRITE = 1, 2, 4
ALLOWED: list[Numbers] = [(1, 3), (195, 0), (195, 255), (136, None)]


def judged(program: bytes, kind: int, access: int, major: int, minor: int) -> int:
    """Return the result of a program for an access, as the kernel would."""
    context = struct.pack("=III", access << 16 | kind, major, minor)
    steps = list(struct.iter_unpack("=BBhi", program))
    registers = [0] * 11
    at = 0
    while True:
        code, both, offset, value = steps[at]
        at += 1
        target, source = both & 15, both >> 4
        match code:
            case 0x61:
                (registers[target],) = struct.unpack_from("=I", context, offset)
            case 0xBF:
                registers[target] = registers[source]
            case 0x57:
                registers[target] &= value
            case 0x77:
                registers[target] >>= value
            case 0xB7:
                registers[target] = value
            case 0x15:
                at += offset if registers[target] == value else 0
            case 0x55:
                at += offset if registers[target] != value else 0
            case 0x95:
                return registers[0]
            case _:
                raise AssertionError(code)


@pytest.mark.parametrize("access", [READ, WRITE, READ | WRITE])
def test_27_given_devices_can_be_opened_and_no_other(access: int) -> None:
    program = device_program(ALLOWED)
    for major in (0, 1, 10, 135, 136, 137, 195, 196):
        for minor in (0, 1, 3, 229, 255, 1 << 19):
            expected = (major, minor) in ALLOWED or (major, None) in ALLOWED
            assert judged(program, CHARACTER, access, major, minor) == expected
            assert judged(program, BLOCK, access, major, minor) == 0


def test_27_no_device_can_be_made() -> None:
    for access in (MAKE, MAKE | READ, MAKE | WRITE, MAKE | READ | WRITE):
        assert judged(device_program(ALLOWED), CHARACTER, access, 1, 3) == 0


def test_without_devices_nothing_can_be_opened() -> None:
    assert judged(device_program([]), CHARACTER, READ, 1, 3) == 0


def test_an_attempt_without_a_cgroup_has_a_note() -> None:
    assert limit_devices(None, [], 0) == golden("node.isolation.no-filter")
