"""Parser for Python stacks in faulthandler format, with checks that show for what a thread waits.

    Stack (most recent call first):
      File "…/torch/distributed/distributed_c10d.py", line 3252 in all_reduce   innermost frame
      File "…/train.py", line 30 in train                                       user code: the place in messages
      File "<string>", line 6 in <module>                                       the zygote's frame, always the last

In an inspection, a rank dumps only its main thread. In a crash, a rank dumps all threads with the newest first and the
main thread last. If a process has more than 100 threads, faulthandler writes "..." instead of the oldest threads.

Failure cases: A stack dump may be truncated or come from a newer Python version. The parser ignores unknown lines and
never raises.
"""

from __future__ import annotations

import re
from itertools import pairwise

import msgspec

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^((Current t|T)hread 0x[0-9a-f]+|Stack \(most recent call first\):)")
_ZYGOTE = "<string>"  # File name of `python -c` code in stacks.
_OUTERMOST = re.compile(r'^  File "<string>", line \d+ in <module>$')
_CUT = "..."
_PACKAGES = ("/site-packages/", "/dist-packages/")
_STANDARD = ("/lib/python3", "/lib64/python3")

# Source files whose frames show that a rank waits for other ranks.
_COLLECTIVE = ("/torch/distributed/", "/deepspeed/comm/", "/horovod/", "/mpi4py/")
# Exceptions to `_COLLECTIVE`: distributed modules that read and write files.
_NOT_COLLECTIVE = ("/torch/distributed/checkpoint/",)
# `_REDUCER` shows a wait only as the innermost frame, because a forward pass runs user code inside its frames.
_REDUCER = "/torch/nn/parallel/distributed.py"
_BACKWARD = "/torch/autograd/"
# Source files in which a main thread waits for other threads or processes of its rank.
_DELEGATES = (
    "/threading.py",
    "/queue.py",
    "/subprocess.py",
    "/selectors.py",
    "/concurrent/futures/",
    "/multiprocessing/",
    "/asyncio/",
)
_SOCKETS = ("/socket.py", "/ssl.py", "/selectors.py")


class StackFrame(msgspec.Struct, frozen=True):
    """One frame of a Python stack."""

    file: str
    line: int
    function: str

    def text(self) -> str:
        """Return the code location as text for users, for example ``train.py:41 load_batch``."""
        return f"{self.file.rpartition('/')[2]}:{self.line} {self.function}"


class Thread(msgspec.Struct, frozen=True):
    """One thread of a stack dump, with its title line and its frames, innermost first."""

    title: str
    frames: tuple[StackFrame, ...]

    @property
    def current(self) -> bool:
        """Return True if the thread received the signal, as the main thread usually does."""
        return self.title.startswith("Current")

    def body(self) -> str:
        """Return the thread's frames in the format of faulthandler."""
        return "\n".join(f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in self.frames)


class Stack(msgspec.Struct, frozen=True):
    """Stacks of all threads of one process, with the main thread separate."""

    main: Thread | None = None
    others: tuple[Thread, ...] = ()

    @property
    def frames(self) -> tuple[StackFrame, ...]:
        """Return the main thread's frames, innermost first."""
        return () if self.main is None else self.main.frames

    def where(self) -> str:
        """Return the main thread's innermost frame outside of libraries as text, or ""."""
        own = (frame for frame in self.frames if not _library(frame.file))
        frame = next(own, self.frames[0] if self.frames else None)
        return "" if frame is None else frame.text()


def parse(text: str, own: str) -> Stack:
    """Parse a faulthandler dump and remove the frames of the serverless-gpu runtime.

    If the main thread has only runtime frames (`own`), the function keeps the runtime frames.
    """
    threads: list[tuple[str, list[StackFrame]]] = []
    cut = False
    for line in text.splitlines():
        frame = _frame(line)
        if _THREAD.match(line):
            threads.append((line, []))
        elif frame and threads:
            threads[-1][1].append(frame)
        elif line == _CUT:
            cut = True
    for _, frames in threads:
        if frames and _zygotes(frames[-1]):
            frames.pop()
    made = [
        Thread(title, tuple(frame for frame in frames if not frame.file.startswith(own))) for title, frames in threads
    ]
    place = len(made) - 1
    # The thread that received the signal may be the main thread, because a truncated dump lacks the oldest threads.
    if cut:
        place = next((place for place, thread in enumerate(made) if thread.current), -1)
    if place < 0:
        return Stack(None, tuple(made))
    main = made.pop(place)
    if not main.frames:
        main = Thread(main.title, tuple(threads[place][1]))
    return Stack(main, tuple(made))


def readable(text: str, own: str) -> str:
    """Return a crash dump without frames of the runtime (`own`) and without the list of modules."""
    lines = text.partition("\nExtension modules:")[0].rstrip().splitlines()
    made = [*map(_frame, lines), None]
    kept = []
    for line, (frame, outer) in zip(lines, pairwise(made), strict=True):
        ours = frame is not None and (frame.file.startswith(own) or (outer is None and _zygotes(frame)))
        if not ours:
            kept.append(line)
    return "\n".join(kept)


def is_whole(text: str) -> bool:
    """Return True if a text ends like a complete stack dump."""
    last = text.rstrip("\n").rpartition("\n")[2]
    return text.endswith("\n") and (last.strip() == _CUT or bool(_OUTERMOST.match(last)))


def in_collective(frames: tuple[StackFrame, ...]) -> bool:
    """Return True if the frames of a thread are in a call that waits for other ranks.

    The function checks only frames inside the innermost user code. A model's own forward pass runs inside frames of
    `torch/distributed/fsdp`, but does not wait for other ranks.
    """
    for place, frame in enumerate(frames):
        if _has(frame.file, _NOT_COLLECTIVE):
            return False
        if _has(frame.file, _COLLECTIVE) or (place == 0 and _REDUCER in frame.file):
            return True
        if "/torch/" not in frame.file and not _standard(frame.file):
            return False
    return False


def in_backward(frames: tuple[StackFrame, ...]) -> bool:
    """Return True if the frames are in a backward pass, which finally waits for gradients of other ranks."""
    return bool(frames) and _BACKWARD in frames[0].file


def at_socket(frames: tuple[StackFrame, ...]) -> bool:
    """Return True if the innermost frame is in the standard library's socket code."""
    return bool(frames) and _standard(frames[0].file) and frames[0].file.endswith(_SOCKETS)


def delegates(frames: tuple[StackFrame, ...]) -> bool:
    """Return True if the frames wait for other threads or processes of the same rank."""
    return bool(frames) and _standard(frames[0].file) and _has(frames[0].file, _DELEGATES)


def uses_torch(frames: tuple[StackFrame, ...]) -> bool:
    """Return True if the frames show a call of torch by user code."""
    for frame in frames:
        if "/torch/" in frame.file:
            return True
        if not _library(frame.file):
            return False
    return False


def _frame(line: str) -> StackFrame | None:
    found = _FRAME.match(line)
    return StackFrame(found["file"], int(found["line"]), found["function"]) if found else None


def _zygotes(outermost: StackFrame) -> bool:
    """Return True if the zygote owns the outermost frame. Inner `<string>` frames are user code."""
    return outermost.file == _ZYGOTE and outermost.function == "<module>"


def _has(file: str, parts: tuple[str, ...]) -> bool:
    return any(part in file for part in parts)


def _standard(file: str) -> bool:
    return file.startswith("<frozen ") or (_has(file, _STANDARD) and not _has(file, _PACKAGES))


def _library(file: str) -> bool:
    return _standard(file) or _has(file, _PACKAGES)
