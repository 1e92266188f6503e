"""Python stacks as faulthandler writes them: read, and asked where a thread stands.

    Stack (most recent call first):
      File "…/torch/distributed/distributed_c10d.py", line 3252 in all_reduce      innermost frame
      File "…/train.py", line 30 in train                                          the user's: where it is, for people
      File "<string>", line 6 in <module>                                          the zygote's: a whole stack ends so

What lives here: text in, values out. A rank that is looked at writes its main thread only. One that crashes writes all
threads, newest first, so the main thread is the last one; of more than a hundred the oldest are left out ("...").

Failure cases: a text that was cut, or written by a newer Python. What is not understood is no frame; nothing here
raises.
"""

from __future__ import annotations

import re
from itertools import pairwise

import msgspec

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^((Current t|T)hread 0x[0-9a-f]+|Stack \(most recent call first\):)")
_ZYGOTE = "<string>"  # what `python -c` calls its program
_OUTERMOST = re.compile(r'^  File "<string>", line \d+ in <module>$')
_CUT = "..."
_PACKAGES = ("/site-packages/", "/dist-packages/")
_STANDARD = ("/lib/python3", "/lib64/python3")

# A frame of one of these files is a wait for other ranks ...
_COLLECTIVE = ("/torch/distributed/", "/deepspeed/comm/", "/horovod/", "/mpi4py/")
# ... but for these, which read and write files.
_NOT_COLLECTIVE = ("/torch/distributed/checkpoint/",)
_REDUCER = "/torch/nn/parallel/distributed.py"  # innermost only: the user's own forward runs inside one of its frames
_BACKWARD = "/torch/autograd/"
# Where a main thread stands while other threads or processes do the work.
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
    """One call."""

    file: str
    line: int
    function: str

    def text(self) -> str:
        """Return where it is for people, for example ``train.py:41 load_batch``."""
        return f"{self.file.rpartition('/')[2]}:{self.line} {self.function}"


class Thread(msgspec.Struct, frozen=True):
    """One thread: its title line and its frames, innermost first."""

    title: str
    frames: tuple[StackFrame, ...]

    @property
    def current(self) -> bool:
        """Return whether it is the one that took the signal, which is the main thread unless that blocks signals."""
        return self.title.startswith("Current")

    def body(self) -> str:
        """Return the frames as faulthandler writes them."""
        return "\n".join(f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in self.frames)


class Stack(msgspec.Struct, frozen=True):
    """All threads of one process at one moment, the main thread apart."""

    main: Thread | None = None
    others: tuple[Thread, ...] = ()

    @property
    def frames(self) -> tuple[StackFrame, ...]:
        """Return the main thread's frames, innermost first."""
        return () if self.main is None else self.main.frames

    def where(self) -> str:
        """Return where the main thread stands, for people: the innermost frame that is no library's, or ""."""
        own = (frame for frame in self.frames if not _library(frame.file))
        frame = next(own, self.frames[0] if self.frames else None)
        return "" if frame is None else frame.text()


def parse(text: str, own: str) -> Stack:
    """Return what faulthandler wrote, without the frames of our runtime.

    A main thread that has only frames of the runtime (`own`) keeps them.
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
    if cut:  # the oldest are not there; the main thread may be the one that took the signal
        place = next((place for place, thread in enumerate(made) if thread.current), -1)
    if place < 0:
        return Stack(None, tuple(made))
    main = made.pop(place)
    if not main.frames:
        main = Thread(main.title, tuple(threads[place][1]))
    return Stack(main, tuple(made))


def readable(text: str, own: str) -> str:
    """Return the text of a crash without frames of our runtime (`own`) and the list of modules."""
    lines = text.partition("\nExtension modules:")[0].rstrip().splitlines()
    made = [*map(_frame, lines), None]
    kept = []
    for line, (frame, outer) in zip(lines, pairwise(made), strict=True):
        ours = frame is not None and (frame.file.startswith(own) or (outer is None and _zygotes(frame)))
        if not ours:
            kept.append(line)
    return "\n".join(kept)


def is_whole(text: str) -> bool:
    """Return whether a text ends as a finished dump of a rank does."""
    last = text.rstrip("\n").rpartition("\n")[2]
    return text.endswith("\n") and (last.strip() == _CUT or bool(_OUTERMOST.match(last)))


def in_collective(frames: tuple[StackFrame, ...]) -> bool:
    """Return whether these frames stand in a call that waits for other ranks.

    Only the frames inside the innermost code that is neither torch's nor the standard library's are asked: a model's
    own forward runs inside frames of `torch/distributed/fsdp`, and does not wait for anybody because of that.
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
    """Return whether these frames stand in a backward pass, whose end waits for gradients of other ranks."""
    return bool(frames) and _BACKWARD in frames[0].file


def at_socket(frames: tuple[StackFrame, ...]) -> bool:
    """Return whether the innermost frame is the standard library's socket code."""
    return bool(frames) and _standard(frames[0].file) and frames[0].file.endswith(_SOCKETS)


def delegates(frames: tuple[StackFrame, ...]) -> bool:
    """Return whether these frames only wait for other threads or processes of the same rank."""
    return bool(frames) and _standard(frames[0].file) and _has(frames[0].file, _DELEGATES)


def uses_torch(frames: tuple[StackFrame, ...]) -> bool:
    """Return whether torch is inside the innermost frame of the user's."""
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
    """Return whether the outermost frame of a thread is the zygote's program; further in, `<string>` is the user's."""
    return outermost.file == _ZYGOTE and outermost.function == "<module>"


def _has(file: str, parts: tuple[str, ...]) -> bool:
    return any(part in file for part in parts)


def _standard(file: str) -> bool:
    return file.startswith("<frozen ") or (_has(file, _STANDARD) and not _has(file, _PACKAGES))


def _library(file: str) -> bool:
    return _standard(file) or _has(file, _PACKAGES)
