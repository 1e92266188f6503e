"""The last bytes a rank wrote, kept as they came and decoded on demand.

    stdout  [chunk 1]      [chunk 4][chunk 5]     each stream has its own bound, so that a flood on one does not push
    stderr        [chunk 2][chunk 3]              the other's last words out; the numbers are the order of arrival

Chunks are kept by reference: keeping them costs no copy, and memory is bounded by bytes and by pieces.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

KEPT_BYTES = 256 << 10
_PIECES_MAX = 512
_SMALL_BYTES = 4096  # a piece below this grows instead of getting neighbours


class Tail:
    """The last output of some streams."""

    def __init__(self, streams: Sequence[str]) -> None:
        self._pieces = {stream: _Pieces() for stream in streams}
        self._number = 0

    def add(self, stream: str, data: bytes) -> None:
        """Take what a stream wrote."""
        pieces = self._pieces[stream]
        if pieces.newest == self._number and len(data) < _SMALL_BYTES:
            pieces.grow(data)
            return
        self._number += 1
        pieces.add(self._number, data)

    def last(self, stream: str, size: int) -> bytes:
        """Return the last bytes of one stream, fewer where fewer are kept."""
        return b"".join(data for _, data in self._pieces[stream].kept)[-size:] if size > 0 else b""

    def text(self, lines: int, characters: int) -> str:
        """Return the last lines of all streams in order of completion, then unfinished ones.

        One unfinished line per stream comes on top of `lines`; a longer line is cut to its last `characters`.
        """
        whole: deque[str] = deque(maxlen=lines)
        unfinished = dict.fromkeys(self._pieces, "")
        decoders = {stream: codecs.getincrementaldecoder("utf-8")("replace") for stream in self._pieces}
        numbered = ((number, stream, data) for stream, pieces in self._pieces.items() for number, data in pieces.kept)
        for _, stream, data in sorted(numbered, key=lambda piece: piece[0]):
            *ended, unfinished[stream] = (unfinished[stream] + decoders[stream].decode(data)).split("\n")
            whole.extend(ended[-lines:])
        found = [*whole, *(line for line in unfinished.values() if line)]
        # What is left to see of a line that was rewritten with carriage returns, as progress bars do.
        return "\n".join(line.rstrip("\r").rpartition("\r")[2][-characters:] for line in found)


class _Pieces:
    """One stream's chunks, oldest first, each with its place in the order of arrival."""

    def __init__(self) -> None:
        self.kept: deque[tuple[int, bytes]] = deque()
        self._size = 0

    @property
    def newest(self) -> int:
        """Return the number of a last piece that may grow, or -1."""
        return self.kept[-1][0] if self.kept and len(self.kept[-1][1]) < _SMALL_BYTES else -1

    def grow(self, data: bytes) -> None:
        number, before = self.kept.pop()
        self._size -= len(before)
        self.add(number, before + data)

    def add(self, number: int, data: bytes) -> None:
        self.kept.append((number, data))
        self._size += len(data)
        # The last one stays, whatever its size; its reader bounds that.
        while len(self.kept) > 1 and (len(self.kept) > _PIECES_MAX or self._size - len(self.kept[0][1]) >= KEPT_BYTES):
            self._size -= len(self.kept.popleft()[1])
