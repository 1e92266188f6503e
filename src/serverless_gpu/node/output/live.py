"""Live output of one rank for its watchers: all of it, unless it is a flood.

    chunk ─▶ no watcher? done ──▶ bucket ──┬─ passes: decoded, in small pieces ──▶ viewer.output
                                           └─ too much: counted, not decoded ────▶ viewer.skipped, once the bucket
                                                                                   opens again, then the last lines

A notice always stands where output is missing, also when the rank falls silent in the middle of it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from serverless_gpu.node.base.token_bucket import Bucket

SHOWN_BYTES_PER_S = 1_000_000
SHOWN_BURST_BYTES = 2_000_000
_LINE_COST_BYTES = 64  # what a line takes beside its bytes: a tag, a row of the screen, the time to print it
_PIECE_BYTES = 8 << 10  # whatever it is, as JSON it fits into one packet
_LAST_LINES_BYTES = 4 << 10


class Viewer(Protocol):
    """Receiver of live output."""

    @property
    def watching(self) -> bool:
        """Return whether anybody does."""
        ...

    def output(self, rank: int, stream: str, text: str, *, size: int, lost: bool) -> None:
        """Take text; `size` in bytes, `lost`: it is not in the rank's file."""
        ...

    def skipped(self, rank: int, stream: str, size: int, *, lost: bool) -> None:
        """Take that so many bytes are missing here."""
        ...


class Live:
    """The live view of one rank; `last` returns the last bytes of a stream, up to a number."""

    def __init__(
        self, rank: int, streams: Sequence[str], viewer: Viewer, last: Callable[[str, int], bytes], now_ns: int
    ) -> None:
        self.skipped_bytes = 0  # what was left out so far
        self._rank = rank
        self._viewer = viewer
        self._last = last
        self._views = {stream: _View() for stream in streams}
        self._bucket = Bucket(per_s=SHOWN_BYTES_PER_S, burst=SHOWN_BURST_BYTES, resume=SHOWN_BYTES_PER_S, now_ns=now_ns)

    @property
    def behind(self) -> bool:
        """Return whether something was left out and not said yet."""
        return any(view.size for view in self._views.values())

    def take(self, stream: str, data: bytes, kept: int, now_ns: int) -> None:
        """Show a chunk, or a part of it; the rank's file has the first `kept` bytes."""
        view = self._views[stream]
        if not self._viewer.watching:
            view.forget()
            return
        given = self._given(data, now_ns)
        start = 0
        if given and view.size:
            before = self._last(stream, len(data) + _LAST_LINES_BYTES)[: -len(data)]
            if b"\n" in before:
                self._resume(stream, view, before, now_ns)
            else:
                start = data.find(b"\n", 0, given) + 1  # from the beginning of a line
                view.miss(start, min(kept, start))
                self._own_up(stream, view)
        self._show(stream, view, data[start:given], lost=kept < given)
        view.miss(len(data) - given, max(0, kept - given))

    def tend(self, now_ns: int, *, closing: bool = False) -> None:
        """Report what was left out if the flood is over or the stream is `closing`, and show how it ended."""
        for stream, view in self._views.items():
            if not view.size or not (closing or self._bucket.is_open(now_ns)):
                continue
            self._resume(stream, view, self._last(stream, _LAST_LINES_BYTES), now_ns)

    def _resume(self, stream: str, view: _View, last: bytes, now_ns: int) -> None:
        """Say what was left out, and show the last lines of it."""
        lost = view.lost > 0
        end = last[-min(view.size, _LAST_LINES_BYTES) :]
        end = end[end.find(b"\n") + 1 :] if len(end) < view.size else end
        view.found(len(end))
        self._own_up(stream, view)
        self._given(end, now_ns)
        self._show(stream, view, end, lost=lost)

    def _given(self, data: bytes, now_ns: int) -> int:
        """Return how much of a chunk may be shown now; a flood's is not even looked at."""
        if not self._bucket.is_open(now_ns):
            return 0
        cost = len(data) + _LINE_COST_BYTES * data.count(b"\n")
        return len(data) * self._bucket.take(cost, now_ns) // max(1, cost)

    def _own_up(self, stream: str, view: _View) -> None:
        for size, lost in ((view.size - view.lost, False), (view.lost, True)):
            if size:
                self._viewer.skipped(self._rank, stream, size, lost=lost)
        self.skipped_bytes += view.size
        view.forget()

    def _show(self, stream: str, view: _View, data: bytes, *, lost: bool) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            text = view.decoder.decode(piece)
            if text:
                self._viewer.output(self._rank, stream, text, size=len(piece), lost=lost)


class _View:
    """One stream's view: its decoder, and what was left out since it last was said."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.size = 0
        self.lost = 0

    def miss(self, size: int, kept: int) -> None:
        """Leave bytes out; the file has `kept` of them."""
        if size:
            self.size += size
            self.lost += size - kept
            self.decoder.reset()

    def found(self, size: int) -> None:
        """Count so many of the bytes left out as shown after all."""
        self.lost = max(0, self.lost - size)
        self.size -= size
        self.lost = min(self.lost, self.size)

    def forget(self) -> None:
        self.size = self.lost = 0
        self.decoder.reset()
