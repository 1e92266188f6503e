"""Inspection of ranks: the kernel's view of each, and its Python stacks.

    supervisor ──{"op": "signal", "ranks": …}──▶ stem ──PASS──▶ rank: a handler in Python writes to its memfd
        │                        no answer, and it is in a call ──STACK──▶ faulthandler, in C, does
        └── /proc/<pid>/fd/<n> ◀──────────────────────────────────────────────┘

A rank that runs Python answers the first signal. One that is blocked in a collective cannot, and answers the second,
which needs neither the interpreter nor its lock. Only such a rank gets it, because C reads frames that change as
garbage: it has taken the first signal, did not answer, and sleeps, or has run for a while since, so it is inside of a
call. An answer to the first at the next look shows that the main thread came back from that call. The signals go by way
of the stem, which knows which ranks it has not reaped yet, so that they never reach another process. A rank that does
not catch them (it has become another program, or user code took them back), or whose memfd is gone, is not asked: the
signal would end it, or the stack would land in a file of the user's.

Nothing here waits: the supervisor's loop polls an inspection, and goes on passing output. Failure cases: a rank that
does not answer in time (frozen, uninterruptible, without a core all the while) has no stack. A stopped rank is only
asked where `wake` allows it: it runs until its stack is written, and is stopped again.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable

import msgspec

from serverless_gpu.model.hangs.hang_detection import STOPPED, TRACED, RankInspection
from serverless_gpu.model.hangs.stacks import delegates, is_whole, parse
from serverless_gpu.node.inside import protocol as inside
from serverless_gpu.node.inside.linux import descendants
from serverless_gpu.node.processes.spawn import INSIDE
from serverless_gpu.node.supervisor.gang import LocalGang

POLL_NS = 2_000_000
_ANSWER_NS = 3_000_000_000
_IN_PYTHON_NS = 50_000_000  # who runs Python, and has a core, answers sooner
_IN_CALL_US = 20_000  # of CPU without an answer: no Python in between
_STEADY_NS = 100_000_000  # an unfinished stack that has not grown for so long will not
_STACK_BYTES_MAX = 1 << 20
_TICK_MS = 1000 // os.sysconf("SC_CLK_TCK")
_ENDED = ("Z", "X", "")
_OWN = f"{INSIDE}/"


class RankInspector:
    """One inspection of some ranks; `wake` lets stopped ranks run for a moment."""

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
        """Return the looks once all are there, or the time for an answer has passed; None until then."""
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
        """Leave it; ranks that were let run are stopped again."""
        self._gang.signal(signal.SIGSTOP, [rank for rank in self._woken if rank in self._asked])
        for asked in self._asked.values():
            asked.close()
        self._asked.clear()

    def _prepare(self, rank: int) -> None:
        look = self._looks[rank]
        asked = _ask(look, self._gang.stacks.get(rank, -1))
        if asked is None:
            self._note(
                rank, "no stack: it runs another program by now, or has taken the signal or the file for it away"
            )
        else:
            self._asked[rank] = asked
            self._looks[rank] = msgspec.structs.replace(look, passed=asked.passed)

    def _take(self, rank: int, text: str) -> None:
        if not text:
            self._note(rank, "no stack: it did not answer within 3 s")
            return
        self._looks[rank] = msgspec.structs.replace(self._looks[rank], stack=parse(text, _OWN))
        if rank in self._woken:
            self._note(rank, "it was let run for a moment to write its stack")

    def _note(self, rank: int, note: str) -> None:
        look = self._looks[rank]
        self._looks[rank] = msgspec.structs.replace(look, note="; ".join(part for part in (look.note, note) if part))

    def _completed(self, look: RankInspection) -> RankInspection:
        """Return a look with what others do for the rank, where its own stack does not say whether it gets on."""
        if look.stack.frames and not delegates(look.stack.frames):
            return look
        used = (_stat(pid)[1] for pid in descendants(look.pid)) if look.pid else ()
        return msgspec.structs.replace(look, children_ms=sum(used))


class _Asked:
    """A rank that is about to write its stack to `fd`."""

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
        """Return whether this look is the first to show that the main thread was signalled inside a call."""
        pid = self._before.pid
        if self._in_call or os.fstat(self._fd).st_size or _is_in_set(pid, "SigPnd", inside.PASS_SIGNAL):
            return False
        self._in_call = _stat(pid)[0] == "S" or _main_us(pid) - self._before.main_us > _IN_CALL_US
        return self._in_call

    def answer(self, now_ns: int) -> str | None:
        """Return what it wrote once that is complete."""
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
    """Return the file a rank writes its stack to, None where it must not be asked."""
    path = f"/proc/{look.pid}/fd/{number}"
    with contextlib.suppress(OSError, ValueError):
        catches = all(_is_in_set(look.pid, "SigCgt", number) for number in inside.LOOK_SIGNALS)
        if catches and os.readlink(path).startswith(f"/memfd:{inside.STACK_FILE}"):
            return _Asked(os.open(path, os.O_RDWR | os.O_CLOEXEC), look)
    return None


def _is_in_set(pid: int, signals: str, number: int) -> bool:
    """Return whether a signal is in a set of a process's main thread: `SigCgt`, `SigPnd`."""
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
    note = f"kill -CONT {pid} lets it go on" if state == STOPPED else ""
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
    """Return the CPU microseconds of a process's main thread; `otherwise` where unknown."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
        return int(file.read().split()[0]) // 1_000
    return otherwise


def _stat(pid: int) -> tuple[str, int]:
    """Return the kernel's letter for a process's main thread, and the process's CPU milliseconds."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
        return fields[0].decode(), (int(fields[11]) + int(fields[12])) * _TICK_MS
    return "", 0
