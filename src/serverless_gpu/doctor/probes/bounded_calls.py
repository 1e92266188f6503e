"""Runs several probes in parallel with a time limit, in threads or processes.

A probe that runs in a separate process can crash, hang or print output without affecting other probes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.doctor.facts import UnknownFact
from serverless_gpu.errors import HardwareError
from serverless_gpu.operating_system import start_thread

T = TypeVar("T")
_READ_BYTES = 1 << 16
_ANSWER_BYTES_MAX = 16 << 20
_WRITTEN_BYTES = 4_000
_GONE_S = 1.0


def side_by_side(looks: Mapping[str, Callable[[], T]], limit_s: float) -> dict[str, T | UnknownFact]:
    """Return the result of each probe, or `UnknownFact` for a probe that failed or timed out.

    Each probe runs in its own daemon thread. A single time limit applies to all probes together.
    """
    clock = SystemClock()
    deadline_ns = clock.boottime_ns() + int(limit_s * 1e9)
    answers: dict[str, Future[T]] = {name: Future() for name in looks}
    for name, look in looks.items():
        try:
            start_thread(partial(_settle, answers[name], look), f"sgpu-{name}")
        except HardwareError as error:
            answers[name].set_exception(error)
    seen: dict[str, T | UnknownFact] = {}
    for name, answer in answers.items():
        outcome = _outcome(answer, max(0.0, (deadline_ns - clock.boottime_ns()) / 1e9), limit_s)
        seen[name] = outcome
    return seen


def _outcome(answer: Future[T], left_s: float, limit_s: float) -> T | UnknownFact:
    try:
        return answer.result(timeout=left_s)
    except TimeoutError:
        if answer.done():  # The probe itself raised TimeoutError.
            return UnknownFact(f"{answer.exception()}")
        return UnknownFact(f"no answer within {limit_s:g} s")
    except Exception as error:  # noqa: BLE001 - a failed probe must not hide the other probes' answers
        return UnknownFact(f"{type(error).__name__}: {error}")


def _settle(answer: Future[T], look: Callable[[], T]) -> None:
    try:
        answer.set_result(look())
    except Exception as error:  # noqa: BLE001 - the waiting thread receives the exception
        answer.set_exception(error)


class ChildEnded(msgspec.Struct, frozen=True):
    """Result of a probe process: answer, log output and exit code."""

    answer: bytes
    written: str
    code: int | None  # Exit code of the probe process: negative for a signal, None after a timeout.

    @property
    def why(self) -> str:
        """Explain how the probe process ended."""
        if self.code is None:
            return "the process took too long"
        if self.code < 0:
            return f"{_signal_name(-self.code)} ended the process"
        return f"the process exited with code {self.code}"


def look(start: Callable[[int, int], subprocess.Popen[bytes]], limit_s: float) -> ChildEnded:
    """Start a probe process, read its answer, and kill the process at the time limit.

    The callback `start` receives two file descriptors: one for the answer and one for the log. The callback must start
    the process in a new session. The callback raises OSError if the process cannot start.
    """
    deadline_ns = SystemClock().boottime_ns() + int(limit_s * 1e9)
    reading, sending = os.pipe()
    log = os.memfd_create("sgpu-doctor")  # A log file lets the probe process read back its output.
    try:
        try:
            process = start(sending, log)
        finally:
            os.close(sending)
        answer, in_time = _read_until(reading, deadline_ns)
        code = _end(process, in_time)
        size = os.fstat(log).st_size
        written = os.pread(log, _WRITTEN_BYTES, max(0, size - _WRITTEN_BYTES)).decode("utf-8", "replace")
    finally:
        os.close(reading)
        os.close(log)
    return ChildEnded(answer, written, code)


def _read_until(fd: int, deadline_ns: int) -> tuple[bytes, bool]:
    answer = b""
    while len(answer) < _ANSWER_BYTES_MAX:
        left_s = (deadline_ns - SystemClock().boottime_ns()) / 1e9
        if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
            return answer, False
        data = os.read(fd, _READ_BYTES)
        if not data:
            return answer, True
        answer += data
    return answer, False


def _end(process: subprocess.Popen[bytes], in_time: bool) -> int | None:
    """Return the exit code of a probe process. After the time limit, kill the process and return None."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        if in_time:
            return process.wait(_GONE_S)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)  # The signal also kills the children of the probe process.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GONE_S)
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
