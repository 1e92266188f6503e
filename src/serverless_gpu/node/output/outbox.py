"""The queue of one watcher that reads more slowly than ranks write. Pure.

    say  ──────────────────────────▶ ┌───────────────────────────────┐
    show ──▶ the rank has room? yes ▶ │ Started · rank 0 · rank 1 · … │ ──▶ first, sent
                        │             └───────────────────────────────┘
                        └─ no: counted, and its last lines kept ──▶ queued once half of the rank's share was read, or
                                                                   before the next thing that is no output

Every rank has the same share, so that one rank's flood costs only its own lines. Neighbouring pieces of one stream
become one message; between ranks they may change places by as much, within a rank never.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from serverless_gpu.node.base import protocol

QUEUED_CHARACTERS_MAX = 16 << 20
RANK_CHARACTERS_MAX = 4 << 20  # a pager, a stopped terminal, a slow line: minutes of an ordinary program
WAITING_MAX = 8_192  # messages, before the reasons for waiting are left out
_MERGED_CHARACTERS_MAX = 8 << 10  # as JSON it still fits into one packet
_MESSAGE_CHARACTERS = 512  # what a message takes beside its text
_END_CHARACTERS = 4 << 10


@dataclass
class _Piece:
    """Output in the queue, which may grow until it is sent."""

    rank: int
    stream: str
    text: str


@dataclass
class _Gap:
    """Missing output of one stream at this point, and how that ended."""

    size: int = 0
    lost: int = 0
    end: str = ""

    def leave_out(self, text: str, size: int, lost: bool) -> None:
        self.size += size
        self.lost += size if lost else 0
        self.end = (self.end + text)[-_END_CHARACTERS:]

    def found(self) -> str:
        """Return the last whole lines of what was left out, which is that much less now."""
        whole = self.end if len(self.end) < _END_CHARACTERS else self.end[self.end.find("\n") + 1 :]
        self.end = ""
        size = min(self.size, len(whole.encode(errors="replace")))
        self.size -= size
        self.lost = min(max(0, self.lost - size), self.size)
        return whole


class Outbox:
    """The queue of one watcher."""

    def __init__(self) -> None:
        self.dropped_bytes = 0  # output that was left out for good
        self._queue: deque[protocol.Sendable | _Piece] = deque()
        self._growing: dict[int, _Piece] = {}  # the last piece of each rank, if more may be added to it
        self._used: Counter[int] = Counter()  # characters, by rank
        self._full: set[int] = set()
        self._gaps: dict[tuple[int, str], _Gap] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def clear(self) -> None:
        """Forget everything that was to be said."""
        self._queue.clear()
        self._growing.clear()
        self._used.clear()
        self._full.clear()
        self._gaps.clear()

    def say(self, message: protocol.Sendable) -> None:
        """Queue a message that is no output, after every notice about output before it."""
        if isinstance(message, protocol.Waiting) and len(self._queue) >= WAITING_MAX:
            return
        for rank in dict.fromkeys(rank for rank, _ in self._gaps):
            self._own_up(rank)
        self._growing.clear()
        self._queue.append(message)

    def show(self, message: protocol.Output, size: int, lost: bool) -> None:
        """Queue output of `size` bytes, or leave it out; `lost` means that it is not in the rank's file."""
        if self._has_room(message.rank):
            self._add(message.rank, message.stream, message.text)
        else:
            self._gap(message.rank, message.stream).leave_out(message.text, size, lost)
            self.dropped_bytes += size

    def skip(self, rank: int, stream: str, size: int, lost: bool) -> None:
        """Say that output is missing here, now or later."""
        gap = self._gap(rank, stream)
        gap.leave_out("", size, lost)
        gap.end = ""  # what was kept is not how it ended
        if self._has_room(rank):
            self._own_up(rank)

    def first(self) -> protocol.Sendable | None:
        """Return what is to be sent next, or None."""
        if not self._queue:
            return None
        head = self._queue[0]
        return protocol.Output(rank=head.rank, stream=head.stream, text=head.text) if isinstance(head, _Piece) else head

    def sent(self) -> None:
        """Take what was first out of the queue."""
        head = self._queue.popleft()
        if not isinstance(head, (_Piece, protocol.Skipped)):
            return
        rank = head.rank
        self._used[rank] -= _MESSAGE_CHARACTERS + (len(head.text) if isinstance(head, _Piece) else 0)
        if self._growing.get(rank) is head:
            del self._growing[rank]
        if rank in self._full and self._used[rank] <= self._share() // 2:
            self._full.discard(rank)
            self._own_up(rank)

    def _share(self) -> int:
        return min(RANK_CHARACTERS_MAX, QUEUED_CHARACTERS_MAX // max(1, len(self._used)))

    def _has_room(self, rank: int) -> bool:
        self._used[rank] += 0  # a rank that is known counts among those that share
        if self._used[rank] >= self._share():
            self._full.add(rank)
        return rank not in self._full

    def _add(self, rank: int, stream: str, text: str) -> None:
        piece = self._growing.get(rank)
        if piece is None or piece.stream != stream or len(piece.text) + len(text) > _MERGED_CHARACTERS_MAX:
            piece = self._growing[rank] = _Piece(rank, stream, "")
            self._queue.append(piece)
            self._used[rank] += _MESSAGE_CHARACTERS
        piece.text += text
        self._used[rank] += len(text)

    def _gap(self, rank: int, stream: str) -> _Gap:
        return self._gaps.setdefault((rank, stream), _Gap())

    def _own_up(self, rank: int) -> None:
        """Queue what is missing of a rank, and how that ended."""
        for key in [key for key in self._gaps if key[0] == rank]:
            gap = self._gaps.pop(key)
            before = gap.size
            end = gap.found()
            self.dropped_bytes -= before - gap.size
            for size, lost in ((gap.size - gap.lost, False), (gap.lost, True)):
                if size:
                    self._growing.pop(rank, None)
                    self._queue.append(protocol.Skipped(rank=rank, stream=key[1], bytes=size, lost=lost))
                    self._used[rank] += _MESSAGE_CHARACTERS
            if end:
                self._add(rank, key[1], end)
