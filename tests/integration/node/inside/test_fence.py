"""A fenced process signals what it has started, and nothing else; what comes from outside still arrives."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.base import home
from serverless_gpu.node.base.lock_files import hold
from serverless_gpu.node.inside import linux

pytestmark = pytest.mark.skipif(bool(linux.landlock_refusal()), reason=f"no fence here: {linux.landlock_refusal()}")


@contextlib.contextmanager
def sleeping() -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    yield pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def in_fenced(work: Callable[[int], str]) -> str:
    """Return what a fenced process says after some work, which is told of a process outside."""
    reading, writing = os.pipe()
    with sleeping() as outside:
        pid = os.fork()
        if pid == 0:
            said = "raised"
            try:
                said = linux.keep_signals_in() or work(outside)
            except OSError as error:
                said = type(error).__name__
            finally:
                os.write(writing, said.encode())
                os._exit(0)
        os.close(writing)
        os.waitpid(pid, 0)
        assert os.waitpid(outside, os.WNOHANG) == (0, 0), "what is outside was ended"
    with os.fdopen(reading) as answer:
        return answer.read()


def kill(pid: int) -> str:
    os.kill(pid, signal.SIGKILL)
    return "killed"


def kill_by_descriptor(pid: int) -> str:
    signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL)
    return "killed"


def kill_own(_outside: int) -> str:
    with sleeping() as pid:
        os.kill(pid, signal.SIGTERM)
    return "its own"


@pytest.mark.parametrize("work", [kill, kill_by_descriptor])
def test_it_cannot_end_what_it_has_not_started(work: Callable[[int], str]) -> None:
    assert in_fenced(work) == "PermissionError"


def test_it_ends_what_it_has_started() -> None:
    assert in_fenced(kill_own) == "its own"


def test_it_can_be_ended_from_outside() -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        linux.keep_signals_in()
        os.write(writing, b"x")
        signal.pause()
    os.read(reading, 1)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    os.close(reading)
    os.close(writing)


def test_ranks_are_fenced_where_a_pool_of_ours_is_kept_and_nowhere_else(tmp_path: Path) -> None:
    attempt = tmp_path / "runs" / "run" / "1"
    assert not home.in_pool(attempt)
    (tmp_path / "ray").mkdir()
    lock = hold(tmp_path / "ray" / home.RAY_LOCK, "1 0.1.0")
    assert lock is not None
    assert home.in_pool(attempt)
    os.close(lock)
    assert not home.in_pool(attempt)
