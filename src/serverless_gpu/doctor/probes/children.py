"""Looking in a process of its own: it may crash, hang or write what it likes, and only this look is lost."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Callable

import msgspec

from serverless_gpu.ambient import SystemClock

_READ_BYTES = 1 << 16
_ANSWER_BYTES_MAX = 16 << 20
_WRITTEN_BYTES = 4_000
_GONE_S = 1.0


class ChildEnded(msgspec.Struct, frozen=True):
    """How a look ended."""

    answer: bytes
    written: str
    code: int | None  # its exit code, negative for a signal; None when it was ended for taking too long

    @property
    def why(self) -> str:
        """Return in words how the process ended."""
        if self.code is None:
            return "it took too long"
        if self.code < 0:
            return f"the process was ended by {_signal_name(-self.code)}"
        return f"the process ended with code {self.code}"


def look(start: Callable[[int, int], subprocess.Popen[bytes]], limit_s: float) -> ChildEnded:
    """Start a process, take what it sends, and end it after a limit.

    Args:
        start: given the descriptor to send on and the one to write to; starts the process in a session of its own.
        limit_s: seconds it may take.

    Raises:
        OSError: it cannot be started.
    """
    deadline_ns = SystemClock().boottime_ns() + int(limit_s * 1e9)
    reading, sending = os.pipe()
    log = os.memfd_create("sgpu-doctor")  # a file, so that the process itself can look at what it wrote
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
    """Return the exit code; a process that does not end of itself is ended, and left alone if not even that helps."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        if in_time:
            return process.wait(_GONE_S)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)  # a session of its own: what it started goes, too
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GONE_S)
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
