"""Shared memory that an ended attempt left: found by who had it, and removed only where nobody has it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.processes.process_tree import AttemptSegments

HOLD = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
held = mmap.mmap(fd, 1) if sys.argv[2] == "mapped" else fd
if sys.argv[2] == "mapped":
    os.close(fd)
print(flush=True)
sys.stdin.read()
"""


class Holder:
    """A process that has a segment open, or mapped, until it is ended."""

    def __init__(self, path: Path, how: str) -> None:
        command = [sys.executable, "-I", "-S", "-c", HOLD, str(path), how]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"\n"

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    path = tmp_path / "psm_0123abcd"
    path.write_bytes(b"x")
    return path


@pytest.fixture(params=["mapped", "open"])
def holder(segment: Path, request: pytest.FixtureRequest) -> Iterator[Holder]:
    made = Holder(segment, request.param)
    yield made
    made.end()


def test_23A9_what_a_process_of_the_attempt_had_is_removed_after_its_end_and_not_before(
    segment: Path, holder: Holder
) -> None:
    segments = AttemptSegments(segment.parent)
    segments.look(0, lambda: {holder.process.pid})
    assert segments.remove(0) == () and segment.exists()
    holder.end()
    assert segments.remove(0) == (segment.name,) and not segment.exists()


def test_23A9_what_another_process_has_stays(segment: Path, holder: Holder) -> None:
    first = Holder(segment, "mapped")
    segments = AttemptSegments(segment.parent)
    segments.look(0, lambda: {first.process.pid})
    first.end()
    assert segments.remove(0) == () and segment.exists()


def test_23A9_what_no_process_of_the_attempt_was_seen_with_stays(segment: Path, holder: Holder) -> None:
    segments = AttemptSegments(segment.parent)
    asked: list[int] = []

    def pids() -> set[int]:
        asked.append(1)
        return {os.getpid()}

    for _ in range(9):
        segments.look(0, pids)
    holder.end()
    assert segments.remove(0) == () and segment.exists()
    assert len(asked) == 3, "somebody else's segment does not cost a scan every second"


@pytest.mark.parametrize("name", ["mine", "psm_mydata", "data.npy", "torch_x", "sgpu-secrets-01234567"])
def test_23A9_a_name_that_no_library_makes_is_never_removed(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"x")
    holder = Holder(path, "mapped")
    segments = AttemptSegments(tmp_path)
    segments.look(0, lambda: {holder.process.pid})
    holder.end()
    assert segments.remove(0) == () and path.exists()


def test_23A9_what_was_there_before_the_attempt_and_what_is_no_file_stays(segment: Path, holder: Holder) -> None:
    since_ns = segment.stat().st_mtime_ns + 10**9
    (segment.parent / "nccl-abcdef").symlink_to(segment)
    segments = AttemptSegments(segment.parent)
    segments.look(since_ns, lambda: {holder.process.pid})
    holder.end()
    assert segments.remove(since_ns) == () and segment.exists()


@pytest.mark.parametrize("name", ["torch_{}_12_0", "__KMP_REGISTERED_LIB_{}_0", "sem.loky-{}-ab12"])
def test_23A9_a_segment_with_the_pid_of_a_process_of_the_attempt_is_its_own_once_that_is_gone(
    name: str, tmp_path: Path
) -> None:
    anything = tmp_path / "other"
    anything.touch()
    anything.write_bytes(b"x")
    maker = Holder(anything, "open")
    path = tmp_path / name.format(maker.process.pid)
    path.write_bytes(b"x")
    segments = AttemptSegments(tmp_path)
    segments.look(0, lambda: {maker.process.pid})
    assert segments.remove(0) == ()
    maker.end()
    assert segments.remove(0) == (path.name,)


def test_23A9_a_look_is_due_once_a_second(tmp_path: Path) -> None:
    segments = AttemptSegments(tmp_path)
    assert [segments.is_due(now) for now in (1, 2, 10**9, 10**9 + 1, 10**9 + 2)] == [True, False, False, True, False]
