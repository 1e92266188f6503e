"""Python stacks in the format of faulthandler: a parser, and checks of where a thread waits.

    Stack (most recent call first):
      File "…/torch/distributed/distributed_c10d.py", line 3252 in all_reduce   innermost frame
      File "…/train.py", line 30 in train                                       user code: the place in messages
      File "<string>", line 6 in <module>                                       the zygote's frame, always the last

The functions take text and return values. In an inspection, a rank writes only its main thread. In a crash, a rank
writes all threads, the newest first, so the main thread is the last. Beyond a hundred threads faulthandler writes "..."
instead of the oldest threads.

Failure cases: The text may be truncated or come from a newer Python. The parser ignores lines that it does not
understand, and never raises.
"""

from __future__ import annotations

import re
from itertools import pairwise

import msgspec

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^((Current t|T)hread 0x[0-9a-f]+|Stack \(most recent call first\):)")
_ZYGOTE = "<string>"  # File name of the program of `python -c`.
_OUTERMOST = re.compile(r'^  File "<string>", line \d+ in <module>$')
_CUT = "..."
_PACKAGES = ("/site-packages/", "/dist-packages/")
_STANDARD = ("/lib/python3", "/lib64/python3")

# A frame in one of these files means a wait for other ranks.
_COLLECTIVE = ("/torch/distributed/", "/deepspeed/comm/", "/horovod/", "/mpi4py/")
# Exceptions: these modules read and write files.
_NOT_COLLECTIVE = ("/torch/distributed/checkpoint/",)
# This file counts only as the innermost frame, because a forward pass runs user code inside a frame of this file.
_REDUCER = "/torch/nn/parallel/distributed.py"
_BACKWARD = "/torch/autograd/"
# Files in which a main thread waits while other threads or processes do the work.
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
        """Return the place as text for users, for example ``train.py:41 load_batch``."""
        return f"{self.file.rpartition('/')[2]}:{self.line} {self.function}"


class Thread(msgspec.Struct, frozen=True):
    """A thread with its title line and its frames, innermost first."""

    title: str
    frames: tuple[StackFrame, ...]

    @property
    def current(self) -> bool:
        """Return True for the thread that received the signal: the main thread, unless it blocks signals."""
        return self.title.startswith("Current")

    def body(self) -> str:
        """Return the frames in the format of faulthandler."""
        return "\n".join(f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in self.frames)


class Stack(msgspec.Struct, frozen=True):
    """All threads of one process at one moment, with the main thread separate."""

    main: Thread | None = None
    others: tuple[Thread, ...] = ()

    @property
    def frames(self) -> tuple[StackFrame, ...]:
        """Return the main thread's frames, innermost first."""
        return () if self.main is None else self.main.frames

    def where(self) -> str:
        """Return the place of the main thread as text: its innermost frame outside of libraries, or ""."""
        own = (frame for frame in self.frames if not _library(frame.file))
        frame = next(own, self.frames[0] if self.frames else None)
        return "" if frame is None else frame.text()


def parse(text: str, own: str) -> Stack:
    """Return the stack from faulthandler's text, without the frames of the runtime.

    The main thread keeps its frames of the runtime (`own`) if it has no other frames.
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
    if cut:  # The oldest threads are missing. The main thread may be the one that received the signal.
        place = next((place for place, thread in enumerate(made) if thread.current), -1)
    if place < 0:
        return Stack(None, tuple(made))
    main = made.pop(place)
    if not main.frames:
        main = Thread(main.title, tuple(threads[place][1]))
    return Stack(main, tuple(made))


def readable(text: str, own: str) -> str:
    """Return a crash text without frames of the runtime (`own`) and without the list of modules."""
    lines = text.partition("\nExtension modules:")[0].rstrip().splitlines()
    made = [*map(_frame, lines), None]
    kept = []
    for line, (frame, outer) in zip(lines, pairwise(made), strict=True):
        ours = frame is not None and (frame.file.startswith(own) or (outer is None and _zygotes(frame)))
        if not ours:
            kept.append(line)
    return "\n".join(kept)


def is_whole(text: str) -> bool:
    """Return True when a text ends like a complete stack dump of a rank."""
    last = text.rstrip("\n").rpartition("\n")[2]
    return text.endswith("\n") and (last.strip() == _CUT or bool(_OUTERMOST.match(last)))


def in_collective(frames: tuple[StackFrame, ...]) -> bool:
    """Return True when these frames are in a call that waits for other ranks.

    Only frames inside the innermost user code count. A model's own forward pass runs inside frames of
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
    """Return True in a backward pass, whose end waits for gradients of other ranks."""
    return bool(frames) and _BACKWARD in frames[0].file


def at_socket(frames: tuple[StackFrame, ...]) -> bool:
    """Return True when the innermost frame is in the standard library's socket code."""
    return bool(frames) and _standard(frames[0].file) and frames[0].file.endswith(_SOCKETS)


def delegates(frames: tuple[StackFrame, ...]) -> bool:
    """Return True when these frames only wait for other threads or processes of the same rank."""
    return bool(frames) and _standard(frames[0].file) and _has(frames[0].file, _DELEGATES)


def uses_torch(frames: tuple[StackFrame, ...]) -> bool:
    """Return True when user code has called torch."""
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
    """Return True for the zygote's program as outermost frame. Inner `<string>` frames are user code."""
    return outermost.file == _ZYGOTE and outermost.function == "<module>"


def _has(file: str, parts: tuple[str, ...]) -> bool:
    return any(part in file for part in parts)


def _standard(file: str) -> bool:
    return file.startswith("<frozen ") or (_has(file, _STANDARD) and not _has(file, _PACKAGES))


def _library(file: str) -> bool:
    return _standard(file) or _has(file, _PACKAGES)
