"""NVML, asked by a process of its own, so that a driver that hangs takes only that process with it.

    provider ──Question──▶ sgpu-nvml ── may block in the kernel for ever
             ◀──Answer────             at most 5 s are waited for it, once

Failure cases: no answer in time (`NvmlTimeout`, also at once for every later question until one is answered; after half
a minute of silence the process is killed and another one tries, unless a few could not be killed); the process dies
(another one starts, once for each question); the client is gone (end of file ends the process).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.node.devices.nvml import NvmlAnswer, NvmlReader, NvmlTimeout, Question, Unavailable, unknown_usage
from serverless_gpu.node.inside import linux
from serverless_gpu.node.inside.channel import Channel, pair
from serverless_gpu.node.processes.spawn import clean_process

_ANOTHER_S = 30.0
_STUCK_MAX = 3
_END_S = 0.2
_STUCK_PAUSE_S = 0.05

_decoder = msgspec.json.Decoder(NvmlAnswer)


def main(fd: int, source: str) -> NoReturn:
    """Answer questions until the client is gone; `source` is "" for NVML, else the state file of fakes."""
    linux.set_name("sgpu-nvml")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel.adopt(fd)
    reader = _StuckReader(Path(source)) if source else NvmlReader()
    questions = msgspec.json.Decoder(Question)
    with contextlib.suppress(OSError):
        while (received := channel.receive()) is not None:
            channel.send(msgspec.json.encode(reader.answer(questions.decode(received[0]))))
    os._exit(0)


class _StuckReader:
    """A driver of fakes: it hangs, and that is all it does."""

    def __init__(self, state: Path) -> None:
        self._state = state

    def answer(self, question: Question) -> NvmlAnswer:
        while self._hangs():
            time.sleep(_STUCK_PAUSE_S)
        return NvmlAnswer(question.seq)

    def _hangs(self) -> bool:
        try:
            return b'"hangs":true' in self._state.read_bytes()
        except OSError:
            return False


class _Helper:
    """One process that asks."""

    def __init__(self, source: str, *, forks: bool) -> None:
        self.channel, theirs = pair()
        self.process: subprocess.Popen[bytes] | None = None
        try:
            if forks:
                self.pid = _forked(theirs, source)
            else:
                self.process = _started(theirs, source)
                self.pid = self.process.pid
        except OSError:
            self.channel.close()
            raise
        finally:
            theirs.close()
        self.channel.sock.setblocking(False)

    def kill(self) -> None:
        """End it, whether or not it can be."""
        self.channel.close()
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)  # an unreaped child of ours: its number cannot be reused

    def is_gone(self, wait_s: float = 0.0) -> bool:
        """Return whether it has ended."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(wait_s) is not None
            return False
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return True


class NvmlProcess:
    """Has another process ask NVML; an `nvml.Asker`.

    `forks` says that this process has one thread, so that it may fork the other one, which takes less time.
    """

    def __init__(self, source: str, limit_s: float, *, forks: bool = False, clock: Clock | None = None) -> None:
        self._source = source
        self._limit_s = limit_s
        self._forks = forks
        self._clock = clock or SystemClock()
        self._turn = threading.Lock()
        self._seq = 0
        self._helpers: list[_Helper] = []  # the last is the one that is asked; others were killed, and are still there
        self._silent_ns: int | None = None
        weakref.finalize(self, _end, self._helpers)

    def ask(self, uuids: Sequence[str] | None) -> NvmlAnswer:
        """Return which GPUs there are, for None, or what uses some of them.

        Raises NvmlTimeout when there was no answer in time, and none has come since.
        """
        if not self._turn.acquire(timeout=self._limit_s):
            raise NvmlTimeout(self._limit_s)
        try:
            if self._silent_ns is not None:
                self._look_again(uuids)
            for _ in range(2):
                answer = self._answered(uuids)
                if answer is not None:
                    return answer
            why = "the process that asks NVML ended without an answer"
            if uuids is None:
                return NvmlAnswer(self._seq, unavailable=(Unavailable("NVML", why),))
            return NvmlAnswer(self._seq, usage={uuid: unknown_usage(why) for uuid in uuids})
        finally:
            self._turn.release()

    def _answered(self, uuids: Sequence[str] | None) -> NvmlAnswer | None:
        """Return the answer; None when the process died of the question."""
        if not self._send(uuids):
            return None
        deadline_ns = self._clock.boottime_ns() + int(self._limit_s * 1e9)
        while (left_ns := deadline_ns - self._clock.boottime_ns()) > 0:
            if not self._is_readable(left_ns / 1e9):
                break
            answer = self._received()
            if answer is None or answer.seq == self._seq:
                return answer
        self._silent_ns = self._clock.boottime_ns()
        raise NvmlTimeout(self._limit_s)

    def _look_again(self, uuids: Sequence[str] | None) -> None:
        """Return if there was an answer, or an end, since it was silent; else raise NvmlTimeout."""
        now_ns = self._clock.boottime_ns()
        if self._helpers and self._is_readable(0.0):
            self._silent_ns = None
            return
        if self._silent_ns is not None and now_ns - self._silent_ns > _ANOTHER_S * 1e9:
            self._silent_ns = now_ns
            self._helpers[-1].kill()
            self._helpers[:] = [helper for helper in self._helpers if not helper.is_gone(_END_S)]
            if len(self._helpers) < _STUCK_MAX:
                self._helpers.append(_Helper(self._source, forks=self._forks))
                self._send(uuids)
        raise NvmlTimeout(self._limit_s)

    def _send(self, uuids: Sequence[str] | None) -> bool:
        self._seq += 1
        question = Question(self._seq, None if uuids is None else tuple(uuids))
        try:
            if not self._helpers:
                self._helpers.append(_Helper(self._source, forks=self._forks))
            self._helpers[-1].channel.send(msgspec.json.encode(question))
        except OSError:
            self._lose()
            return False
        return True

    def _is_readable(self, limit_s: float) -> bool:
        sock = self._helpers[-1].channel.sock
        return sock.fileno() >= 0 and bool(select.select([sock], [], [], limit_s)[0])

    def _received(self) -> NvmlAnswer | None:
        try:
            received = self._helpers[-1].channel.receive()
            if received is not None:
                return _decoder.decode(received[0])
        except (OSError, msgspec.MsgspecError):
            pass
        self._lose()
        return None

    def _lose(self) -> None:
        if self._helpers:
            helper = self._helpers.pop()
            helper.kill()
            helper.is_gone(_END_S)


def _end(helpers: list[_Helper]) -> None:
    for helper in helpers:
        helper.kill()
        if not helper.is_gone(_END_S) and helper.process is not None:
            helper.process.returncode = 0  # it hangs: not waited for any more


def _started(theirs: Channel, source: str) -> subprocess.Popen[bytes]:
    log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        fd = theirs.fileno()
        return clean_process(
            "serverless_gpu.node.devices.nvml_process", (fd, source), fds=(fd,), log=log, environ=os.environ
        )
    finally:
        os.close(log)


def _forked(theirs: Channel, source: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    # No descriptor of its parent stays open here: a lock would be held for as long as the driver hangs.
    channel = os.dup2(theirs.fileno(), 3) if theirs.fileno() != 3 else 3
    last = 65_535
    with contextlib.suppress(OSError):
        last = max(int(name) for name in os.listdir("/proc/self/fd"))
    os.closerange(4, last + 1)
    os.setsid()
    main(channel, source)
