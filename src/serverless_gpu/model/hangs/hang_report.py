"""Reports about a hung run: one sentence, and the file with every rank's stacks.

Text from values; when there is something to say is decided in `hang_detection.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from serverless_gpu.model.hangs.hang_detection import STOPPED, TRACED, RankInspection, RankSeen
from serverless_gpu.model.placement import CrewPlace, numbered
from serverless_gpu.units import format_duration_ms

RANK_CHARACTERS_MAX = 256 << 10
_RANKS_LISTED = 8
_NODES_LISTED = 4
_PLACES_LISTED = 3
STACKS_TOLD = 4
STACK_CHARACTERS_MAX = 4_000
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in an uninterruptible wait of the kernel",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended",
    "X": "ended",
}


class HangFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A run that stands still, as far as it is known."""

    waiting: tuple[int, ...]  # ranks that wait for others
    elsewhere: tuple[int, ...]  # ranks that do not
    looks: dict[int, RankInspection]  # the last look at each rank that has not returned, by rank
    first: dict[int, RankInspection]  # the first look of this silence
    moving: frozenset[int]  # ranks that were seen to move
    silent_ms: int  # how long nothing was heard
    watched_ms: int  # how long the ranks were looked at


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks for people, the first few of many: ``rank 3``, ``ranks 0, 1``."""
    shown = ", ".join(map(str, ranks[:_RANKS_LISTED]))
    more = f" and {len(ranks) - _RANKS_LISTED} more" if len(ranks) > _RANKS_LISTED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def ranks_on(crews: Collection[CrewPlace], *, per_node: bool) -> Callable[[Sequence[int]], str]:
    """Return how ranks of a gang are named: with their nodes, ``ranks 0, 1 on n1, rank 2 on n2``."""
    owned = [(crew.node, numbered(crew, per_node=per_node)) for crew in crews]

    def text(ranks: Sequence[int]) -> str:
        groups = [(node, [rank for rank in ranks if rank in own]) for node, own in owned]
        named = [f"{ranks_text(there)} on {node}" for node, there in groups if there]
        more = [f"ranks on {len(named) - _NODES_LISTED} more nodes"] if len(named) > _NODES_LISTED else []
        return ", ".join([*named[:_NODES_LISTED], *more])

    return text


def sentence(finding: HangFinding) -> str:
    """Return in one line who waits, and for whom."""
    seen = [
        RankSeen(rank=rank, state=look.state, where=look.stack.where(), moving=rank in finding.moving)
        for rank, look in finding.looks.items()
    ]
    return hang_sentence(seen, finding.waiting, finding.elsewhere, finding.silent_ms)


def hang_sentence(
    seen: Iterable[RankSeen],
    waiting: Sequence[int],
    elsewhere: Sequence[int],
    silent_ms: int,
    named: Callable[[Sequence[int]], str] = ranks_text,
) -> str:
    """Return in one line who waits, and for whom."""
    who = _who_waits({one.rank: one for one in seen}, waiting, elsewhere, named)
    return f"no output for {format_duration_ms(silent_ms)}, and {who}"


def stacks(finding: HangFinding) -> dict[int, str]:
    """Return the main stacks of the few ranks that explain it most: those elsewhere, else those that wait."""
    running = [rank for rank in finding.elsewhere if rank in finding.looks] or list(finding.waiting)
    chosen = [finding.looks[rank] for rank in running[:STACKS_TOLD]]
    return {look.rank: _main(look)[:STACK_CHARACTERS_MAX] for look in chosen}


def report(finding: HangFinding, title: str, ranks: Iterable[int], told: str = "") -> str:
    """Return the text of the file with all stacks."""
    rows = [_row(finding, rank) for rank in ranks]
    parts = [
        f"{title}\n{told or sentence(finding)}",
        "rank  pid        now, where in the kernel, CPU used in the last "
        f"{format_duration_ms(finding.watched_ms)}\n" + "\n".join(rows),
        *(_section(finding, look) for _, look in sorted(finding.looks.items())),
    ]
    return "\n\n".join(parts) + "\n"


def _who_waits(
    seen: Mapping[int, RankSeen],
    waiting: Sequence[int],
    elsewhere: Sequence[int],
    named: Callable[[Sequence[int]], str],
) -> str:
    if not waiting:
        return _elsewhere(seen, elsewhere, named)
    there = _grouped(seen[rank] for rank in waiting)
    if not elsewhere:
        places = _joined(f"{named(ranks)} in {place or 'an unknown place'}" for place, ranks in there)
        return f"every rank waits ({places})"
    who = f"{named(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
    place = f" in {there[0][0]}" if len(there) == 1 and there[0][0] else ""
    return f"{who}{place}: {_elsewhere(seen, elsewhere, named)}"


def _elsewhere(seen: Mapping[int, RankSeen], elsewhere: Sequence[int], named: Callable[[Sequence[int]], str]) -> str:
    ranks = [seen[rank] for rank in elsewhere if rank in seen]
    stopped = [one.rank for one in ranks if one.state == STOPPED]
    traced = [one.rank for one in ranks if one.state == TRACED]
    others = [one for one in ranks if one.state not in (STOPPED, TRACED)]
    gone = [rank for rank in elsewhere if rank not in seen]
    parts = [f"{named(stopped)} {_be(stopped)} stopped (SIGSTOP)"] if stopped else []
    parts += [f"{named(traced)} {_be(traced)} stopped by a debugger"] if traced else []
    parts += [
        f"{named(group)} {_be(group)} {'busy' if all(seen[rank].moving for rank in group) else 'elsewhere'}"
        + (f", in {place}" if place else "")
        for place, group in _grouped(others)
    ]
    parts += [f"{named(gone)} {'has' if len(gone) == 1 else 'have'} returned"] if gone else []
    return _joined(parts)


def _grouped(ranks: Iterable[RankSeen]) -> list[tuple[str, list[int]]]:
    """Return ranks by the place where they stand, in order of the first of them."""
    groups: dict[str, list[int]] = {}
    for one in sorted(ranks, key=lambda one: one.rank):
        groups.setdefault(one.where, []).append(one.rank)
    return list(groups.items())


def _joined(parts: Iterable[str]) -> str:
    shown = list(parts)
    return ", ".join([*shown[:_PLACES_LISTED], *(["and more"] if len(shown) > _PLACES_LISTED else [])])


def _be(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _row(finding: HangFinding, rank: int) -> str:
    look = finding.looks.get(rank)
    if look is None:
        return f"{rank:<5} {'':<10} has returned"
    used_ms = look.cpu_ms - finding.first.get(rank, look).cpu_ms
    parts = [_STATES.get(look.state, "unknown"), *([look.channel] if look.channel else [])]
    parts += [format_duration_ms(max(0, used_ms)), *([look.note] if look.note else [])]
    return f"{rank:<5} {look.pid:<10} {', '.join(parts)}"


def _section(finding: HangFinding, look: RankInspection) -> str:
    role = "waits" if look.rank in finding.waiting else "elsewhere"
    lines = [f"---- rank {look.rank} ({role}) ----"]
    if look.note:
        lines.append(look.note)
    lines.append(f"main thread (most recent call first):\n{_main(look)}")
    text = "\n".join(lines)
    if len(text) > RANK_CHARACTERS_MAX:
        text = f"{text[:RANK_CHARACTERS_MAX]}\n... {len(text) - RANK_CHARACTERS_MAX} characters left out"
    return text


def _main(look: RankInspection) -> str:
    return look.stack.main.body() if look.stack.main is not None and look.stack.frames else "  (no stack)"


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
