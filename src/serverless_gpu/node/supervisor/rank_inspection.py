"""Inspects ranks: the kernel's view of each rank and its Python stacks.

    supervisor ──{"op": "signal", "ranks": …}──▶ stem ──PASS──▶ rank: a handler in Python writes to its memfd
        │                        no answer, inside a call ──STACK──▶ faulthandler, in C, writes
        └── /proc/<pid>/fd/<n> ◀──────────────────────────────────────────────┘

A rank that runs Python answers the first signal. A rank that is blocked in a collective cannot answer the first signal.
A blocked rank answers the second signal, which needs neither the interpreter nor the GIL. The inspector sends the
second signal only to a rank inside a call, because faulthandler would read changing frames as garbage. A rank is inside
a call if it has not answered the first signal and has slept or used CPU time since then. If a rank answers the first
signal at the next inspection, its main thread has returned from the call.

The stem sends the signals, because only the stem knows which ranks it has not reaped yet. A signal therefore never
reaches another process. The inspector skips a rank that no longer catches the signals or has closed its memfd. A
skipped rank runs another program or user code with its own signal handlers. A signal could end a skipped rank or write
the stack into one of the user's files.

An inspection never blocks. The supervisor's event loop polls the inspection and still forwards output.

Failure cases: The inspection has no stack of a rank that does not answer in time, such as a frozen rank. The inspector
signals a stopped rank only if `wake` is True. After a stopped rank has written its stack, the inspector stops the rank
again.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable

import msgspec

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.model.hangs.hang_detection import STOPPED, TRACED, RankInspection
from serverless_gpu.model.hangs.stacks import delegates, is_whole, parse
from serverless_gpu.node.inside import protocol as inside
from serverless_gpu.node.inside.linux import descendants
from serverless_gpu.node.processes.spawn import INSIDE
from serverless_gpu.node.spawner.client import find_spawner
from serverless_gpu.node.supervisor.gang import LocalGang

POLL_NS = 2_000_000
_ANSWER_NS = 3_000_000_000
_IN_PYTHON_NS = 50_000_000  # Response deadline in nanoseconds for a rank that runs Python on a CPU core.
_IN_CALL_US = 20_000  # CPU time without an answer, in microseconds, that indicates a rank outside of Python code.
_STEADY_NS = 100_000_000  # Nanoseconds without growth after which an unfinished stack counts as final.
_STACK_BYTES_MAX = 1 << 20
_TICK_MS = 1000 // os.sysconf("SC_CLK_TCK")
_ENDED = ("Z", "X", "")
_OWN = f"{INSIDE}/"


class RankInspector:
    """Inspects the given ranks of a gang. With `wake`, the inspector briefly resumes stopped ranks."""

    def __init__(self, gang: LocalGang, ranks: Iterable[int], wake: bool, now_ns: int) -> None:
        self.began_ns = now_ns
        self._gang = gang
        self._looks = {rank: _look(rank, gang.pids.get(rank, 0)) for rank in ranks}
        self._asked: dict[int, _Asked] = {}
        self._woken = [rank for rank, look in self._looks.items() if wake and look.state == STOPPED]
        for rank, look in self._looks.items():
            if look.state not in (*_ENDED, TRACED, "D") and (look.state != STOPPED or rank in self._woken):
                self._prepare(rank)
        self._woken = [rank for rank in self._woken if rank in self._asked]
        gang.signal(inside.PASS_SIGNAL, self._asked)
        gang.signal(signal.SIGCONT, self._woken)

    def poll(self, now_ns: int) -> list[RankInspection] | None:
        """Return the results once all ranks have answered or the time limit has passed. Return None before."""
        took_ns = now_ns - self.began_ns
        late = took_ns > _ANSWER_NS
        if took_ns > _IN_PYTHON_NS:
            in_calls = [rank for rank, asked in self._asked.items() if asked.is_found_in_call()]
            self._gang.signal(inside.STACK_SIGNAL, in_calls)
        for rank, asked in list(self._asked.items()):
            text = asked.answer(now_ns)
            if text is None and not late:
                continue
            del self._asked[rank]
            asked.close()
            if rank in self._woken:
                self._gang.signal(signal.SIGSTOP, [rank])
            self._take(rank, text or "")
        if self._asked:
            return None
        return [self._completed(look) for look in self._looks.values()]

    def close(self) -> None:
        """Abort the inspection. Stop all ranks that the inspection has resumed."""
        self._gang.signal(signal.SIGSTOP, [rank for rank in self._woken if rank in self._asked])
        for asked in self._asked.values():
            asked.close()
        self._asked.clear()

    def _prepare(self, rank: int) -> None:
        look = self._looks[rank]
        asked = _ask(look, self._gang.stacks.get(rank, -1))
        if asked is None:
            self._note(
                rank,
                "no stack: the rank runs another program now, or user code has replaced the signal handler or "
                "closed the file",
            )
        else:
            self._asked[rank] = asked
            self._looks[rank] = msgspec.structs.replace(look, passed=asked.passed)

    def _take(self, rank: int, text: str) -> None:
        if not text:
            self._note(rank, "no stack: the rank did not answer within 3 s")
            return
        self._looks[rank] = msgspec.structs.replace(self._looks[rank], stack=parse(text, _OWN))
        if rank in self._woken:
            self._note(rank, "the inspection briefly resumed the rank to write its stack")

    def _note(self, rank: int, note: str) -> None:
        look = self._looks[rank]
        self._looks[rank] = msgspec.structs.replace(look, note="; ".join(part for part in (look.note, note) if part))

    def _completed(self, look: RankInspection) -> RankInspection:
        """Add the CPU time of a rank's child processes if the rank's own stack does not show progress."""
        if look.stack.frames and not delegates(look.stack.frames):
            return look
        used = (_stat(pid)[1] for pid in descendants(look.pid)) if look.pid else ()
        return msgspec.structs.replace(look, children_ms=sum(used))


class _Asked:
    """A rank that received a signal to write its stack to `fd`."""

    def __init__(self, fd: int, look: RankInspection) -> None:
        left = os.fstat(fd).st_size - len(inside.PASSED)
        self.passed = left >= 0 and os.pread(fd, len(inside.PASSED), left) == inside.PASSED
        self._fd = fd
        self._before = look
        self._in_call = False
        self._size = 0
        self._grown_ns = 0
        os.ftruncate(fd, 0)

    def is_found_in_call(self) -> bool:
        """Return True the first time that the main thread received the signal inside a call."""
        pid = self._before.pid
        if self._in_call or os.fstat(self._fd).st_size or _is_in_set(pid, "SigPnd", inside.PASS_SIGNAL):
            return False
        self._in_call = _stat(pid)[0] == "S" or _main_us(pid) - self._before.main_us > _IN_CALL_US
        return self._in_call

    def answer(self, now_ns: int) -> str | None:
        """Return the rank's stack once it is complete, or None."""
        size = os.fstat(self._fd).st_size
        if size != self._size:
            self._size, self._grown_ns = size, now_ns
        if not size:
            return None
        text = os.pread(self._fd, _STACK_BYTES_MAX, 0).decode("utf-8", "backslashreplace")
        passed = inside.PASSED.decode()
        is_complete = text.endswith(passed) or is_whole(text) or now_ns - self._grown_ns > _STEADY_NS
        return text.removesuffix(passed) if is_complete else None

    def close(self) -> None:
        os.close(self._fd)


def _ask(look: RankInspection, number: int) -> _Asked | None:
    """Open the file for a rank's stack. Return None if the inspection must not signal the rank."""
    with contextlib.suppress(OSError, ValueError, IsolationUnavailable):
        catches = all(_is_in_set(look.pid, "SigCgt", number) for number in inside.LOOK_SIGNALS)
        if catches:
            return _Asked(find_spawner(os.environ).open_stack(look.pid, number), look)
    return None


def _is_in_set(pid: int, signals: str, number: int) -> bool:
    """Return True if a signal is in a signal set (`SigCgt`, `SigPnd`) of a process's main thread."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(f"{signals}:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _look(rank: int, pid: int) -> RankInspection:
    state, cpu_ms = _stat(pid)
    channel = ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan", encoding="ascii", errors="replace") as file:
        channel = file.read().strip()
    note = f"kill -CONT {pid} continues the rank" if state == STOPPED else ""
    return RankInspection(
        rank=rank,
        pid=pid,
        state=state,
        channel="" if channel == "0" else channel,
        cpu_ms=cpu_ms,
        main_us=_main_us(pid, cpu_ms * 1_000),
        note=note,
    )


def _main_us(pid: int, otherwise: int = 0) -> int:
    """Return the CPU time of a process's main thread in microseconds, or `otherwise` if unknown."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
        return int(file.read().split()[0]) // 1_000
    return otherwise


def _stat(pid: int) -> tuple[str, int]:
    """Return the kernel's state letter of a main thread and its process's CPU time in milliseconds."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
        return fields[0].decode(), (int(fields[11]) + int(fields[12])) * _TICK_MS
    return "", 0
