r"""Progress of a capture or a restore: bytes, files, rate and remaining time.

    ProgressPoint ──▶ ProgressMeter ──▶ one line of text   pure: callers pass the time
                        └──▶ Meters on stderr              a terminal: redrawn in place, at most ten times a second
                                                           a file or a pipe: a plain line every five seconds

Several threads report progress, up to a thousand times a second. The displayed rate covers the last five seconds, to
reveal a slow network after a fast disk. The meter shows no rate or remaining time in the first second. If writing to
stderr fails, for example on a full disk, the meter stops drawing. The capture or restore continues without the meter.
"""

from __future__ import annotations

import collections
import os
import sys
import threading
from typing import TextIO

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.client.display.terminal_screen import fit, safe
from serverless_gpu.environment.documents import Phase, ProgressPoint
from serverless_gpu.units import format_bytes, format_duration_ms

_WORDS: dict[Phase, str] = {
    "scan": "looking",
    "capture": "capturing",
    "fetch": "fetching",
    "restore": "restoring",
    "compile": "compiling",
    "collect": "collecting",
}
_WINDOW_NS = 5_000_000_000
_SURE_NS = 1_000_000_000
_REDRAW_NS = 100_000_000
_PLAIN_NS = 5_000_000_000
_COLUMNS = 80


class ProgressMeter:
    """Measures and formats the progress of one phase."""

    def __init__(self, phase: Phase, now_ns: int) -> None:
        self.phase = phase
        self._began_ns = now_ns
        self._seen: collections.deque[tuple[int, int]] = collections.deque([(now_ns, 0)])
        self._latest = ProgressPoint(phase=phase)

    def note(self, progress: ProgressPoint, now_ns: int) -> None:
        """Record a report. Ignore an outdated report from a slower thread."""
        if progress.bytes_done < self._latest.bytes_done:
            return
        self._latest = progress
        self._seen.append((now_ns, progress.bytes_done))
        while len(self._seen) > 2 and self._seen[1][0] <= now_ns - _WINDOW_NS:
            self._seen.popleft()

    def line(self, now_ns: int) -> str:
        """Return the current progress as one line of text."""
        seen = self._latest
        parts = []
        if seen.bytes_done or seen.bytes_total:  # A file-system scan reports files but no bytes.
            parts.append(
                _of_total(format_bytes(seen.bytes_done), format_bytes(seen.bytes_total), known=seen.bytes_total > 0)
            )
        parts.append(_of_total(f"{seen.files_done:,}", f"{seen.files_total:,}", known=seen.files_total > 0) + " files")
        first_ns, first = self._seen[0]
        rate = 0  # A rate from the first second would be inaccurate.
        if now_ns - self._began_ns >= _SURE_NS and now_ns > first_ns:
            rate = (seen.bytes_done - first) * 1_000_000_000 // (now_ns - first_ns)
        if rate:
            parts.append(f"{format_bytes(rate)}/s")
            if seen.bytes_total > seen.bytes_done:
                seconds = max(1, -(-(seen.bytes_total - seen.bytes_done) // rate))
                parts.append(f"{seconds} s left" if seconds < 60 else f"{format_duration_ms(seconds * 1000)} left")
        if seen.waits_for:
            parts.append(f"waiting for another process on this node to fetch {seen.waits_for}")
        elif seen.name:
            parts.append(seen.name)
        return f"{_WORDS[self.phase]}: {' · '.join(parts)}"


def _of_total(done: str, total: str, *, known: bool) -> str:
    return f"{done} of {total}" if known else done


class Meters:
    """Draws the progress of the current phase on stderr. Leaving the context clears the progress line."""

    def __init__(self, stream: TextIO | None = None, clock: Clock | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = SystemClock() if clock is None else clock
        self._is_terminal = self._stream.isatty()
        self._lock = threading.Lock()
        self._meter: ProgressMeter | None = None
        self._drawn_ns = self._clock.boottime_ns()
        self._is_drawn = False
        self._is_over = False

    def __enter__(self) -> Meters:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_over = True
            if self._is_drawn:
                self._write("\r\x1b[K")

    def report(self, progress: ProgressPoint) -> None:
        """Record and draw a progress report from any thread."""
        with self._lock:
            if self._is_over:
                return
            now_ns = self._clock.boottime_ns()
            if self._meter is None or self._meter.phase != progress.phase:
                self._meter = ProgressMeter(progress.phase, now_ns)
            self._meter.note(progress, now_ns)
            if now_ns - self._drawn_ns >= (_REDRAW_NS if self._is_terminal else _PLAIN_NS):
                self._drawn_ns = now_ns
                line = self._meter.line(now_ns)
                if self._is_terminal:
                    self._is_drawn = True
                    line = "\r" + fit(safe(line, tty=True), _columns(self._stream) - 1) + "\x1b[K"
                self._write(line if self._is_terminal else line + "\n")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # The terminal or the stream is closed.
            self._is_over = True


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _COLUMNS
    except (OSError, ValueError):
        return _COLUMNS
