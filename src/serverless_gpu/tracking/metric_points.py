"""Converts a growing file of telemetry samples to MLflow metric points in bounded memory.

    logs/<node rank>.telemetry ─▶ Samples ─▶ window (10 s, later more) ─▶ merged ─▶ series ─▶ points of one request
    header, sample, sample, …       ▲                                                  │ sent(): the cursor moves
                                    └────────── SampleCursor, for the next process ◀───┘

The sample file serves as the buffer while MLflow is unavailable. `MetricPoints.next` returns the same points until the
caller calls `sent`. The sample times delimit the averaging windows, so that a restarted process creates the same
windows.

Failure cases: The reader treats a missing file as empty. The reader waits for the rest of an incomplete line, or skips
the line if the writer was killed. A reader that starts in the middle of the file finds the last header before its
offset. If the wall clock moves back, the reader closes the current window.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from serverless_gpu.model.telemetry import SECOND_NS, Header, Line, Sample, decode, merged, series, step
from serverless_gpu.model.tracking_rules import send_interval_s
from serverless_gpu.tracking.base import Metric

_READ_BYTES = 1 << 20
BACKLOG_BYTES_MAX = 64 << 20
_CHUNK_BYTES = 256 << 10
_POINTS_MAX = 1000
_WINDOW_MAX = 512
_EARLY_NS = SECOND_NS // 2  # Tolerance in nanoseconds for the sampler's inexact intervals.


class SampleCursor(NamedTuple):
    """Position of a delivery in a sample file. Samples after `offset` and after `sent_ns` are unsent."""

    offset: int = 0
    sent_ns: int = 0


def telemetry_path(directory: Path, node_rank: int) -> Path:
    """Return the path of an attempt's sample file on a node."""
    return directory / "logs" / f"{node_rank}.telemetry"


class MetricPoints:
    """Produces the metric points of one sample file, which may not exist yet. Not thread-safe.

    All `num_nodes` nodes together stay below the limit of points per run. `shorten` drops the oldest points if the
    backlog exceeds `backlog_bytes_max` bytes.
    """

    def __init__(
        self, path: Path, num_nodes: int, cursor: SampleCursor, *, backlog_bytes_max: int = BACKLOG_BYTES_MAX
    ) -> None:
        self._samples = SampleReader(path, cursor.offset)
        self._num_nodes = num_nodes
        self._backlog_bytes_max = backlog_bytes_max
        self._known_ns = cursor.sent_ns  # Time up to which an earlier process has sent the rows.
        self._last_ns = cursor.sent_ns  # End time of the last closed window.
        self._cursor = cursor
        self._rows: deque[_Row] = deque()
        self._window: list[_Row] = []
        self._batch: list[Metric] = []

    @property
    def cursor(self) -> SampleCursor:
        """Return the position up to which the points of the file are sent."""
        return self._cursor

    def next(self, *, ended: bool) -> Sequence[Metric]:
        """Return the points for the next request. Return the same points until the caller calls `sent`.

        With `ended`, the points include the last, possibly incomplete window.
        """
        if self._batch:
            return self._batch
        room = _POINTS_MAX
        while room > 0:
            row = self._row()
            if row is None:
                if ended:
                    self._close()
                break
            before = len(self._batch)
            self._add(row)
            wide = len(self._batch) - before
            room = room - wide if room - wide >= wide else 0  # The next row will need the same number of points.
        return self._batch

    def sent(self) -> None:
        """Record that the caller has sent or dropped the points from `next`."""
        self._batch = []
        waiting = self._window or self._rows
        offset = waiting[0].offset if waiting else self._samples.offset
        self._cursor = SampleCursor(offset, self._last_ns)

    def shorten(self) -> int:
        """Drop the oldest points of a too large backlog, and return the number of dropped points."""
        dropped = 0
        while self._samples.backlog + self._samples.offset - self._cursor.offset > self._backlog_bytes_max:
            batch = self.next(ended=False)
            if not batch:
                break
            dropped += len(batch)
            self.sent()
        return dropped

    def _row(self) -> _Row | None:
        while not self._rows:
            offset = self._samples.offset
            pairs = self._samples.read(_CHUNK_BYTES)
            if self._samples.offset == offset:
                return None
            for header, sample in pairs:
                if self._known_ns and sample.at_ns <= self._known_ns:
                    continue
                self._known_ns = 0
                self._rows.append(_Row(header, sample, offset))
        return self._rows.popleft()

    def _add(self, row: _Row) -> None:
        """Add a row to the current window, and close the window at the end of its interval."""
        if self._window and self._window[-1].header != row.header:
            self._close()
        self._window.append(row)
        if len(self._window) > _WINDOW_MAX:
            self._window = [
                row._replace(sample=merged([old.sample for old in self._window]), offset=self._window[0].offset)
            ]
        since_ns = row.sample.at_ns - self._last_ns
        elapsed_s = (row.sample.at_ns - row.header.origin_ns) / SECOND_NS
        wide = len(series(row.header, row.sample))
        interval_ns = send_interval_s(elapsed_s, wide, self._num_nodes) * SECOND_NS
        if since_ns < 0 or since_ns >= interval_ns - _EARLY_NS:
            self._close()

    def _close(self) -> None:
        if not self._window:
            return
        header, sample = self._window[-1].header, merged([row.sample for row in self._window])
        at_ms, at_step = sample.at_ns // 1_000_000, step(header, sample)
        for key, value in series(header, sample).items():
            if math.isfinite(value):
                self._batch.append(Metric(key, value, at_ms, at_step))
        self._last_ns = sample.at_ns
        self._window = []


class _Row(NamedTuple):
    header: Header
    sample: Sample
    offset: int


class SampleReader:
    """Reads one sample file from the offset of an earlier reader."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._header = _header_before(path, offset)

    @property
    def offset(self) -> int:
        """Return the file offset of the next read."""
        return self._offset

    @property
    def backlog(self) -> int:
        """Return the number of unread bytes in the sample file."""
        try:
            return max(0, os.stat(self._path).st_size - self._offset)
        except OSError:
            return 0

    def read(self, limit: int = _READ_BYTES) -> list[tuple[Header, Sample]]:
        """Return the next samples with their headers, from at most `limit` bytes. Skip lines above the limit."""
        data = _bytes(self._path, self._offset, limit)
        lines, used = decode(data)
        self._offset += used if used or len(data) < limit else len(data)
        return self._paired(lines)

    def _paired(self, lines: list[Line]) -> list[tuple[Header, Sample]]:
        paired: list[tuple[Header, Sample]] = []
        for line in lines:
            if isinstance(line, Header):
                self._header = line
            elif self._header is not None:
                paired.append((self._header, line))
        return paired


def _header_before(path: Path, offset: int) -> Header | None:
    """Return the last header line before an offset."""
    found: Header | None = None
    at = 0
    while at < offset:
        data = _bytes(path, at, min(_READ_BYTES, offset - at))
        end = data.rfind(b"\n") + 1
        headers = b"\n".join(line for line in data[:end].splitlines() if line.startswith(b"{"))
        for line in decode(headers + b"\n")[0]:
            found = line if isinstance(line, Header) else found
        if not end:
            break
        at += end
    return found


def _bytes(path: Path, offset: int, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(limit)
    except OSError:
        return b""
