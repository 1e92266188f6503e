"""Reduces time series to a bounded number of points, and keeps peaks and gaps.

    add(time, columns, values) ─▶ bucket of `step` milliseconds ─▶ minimum, mean and maximum of each column ─▶ result()

Buckets start at multiples of the step since 1970. A longer series with the same step therefore only appends buckets,
so that a chart can load its newest part alone. A bucket without samples does not exist, except the first bucket of a
gap, which contains None for every column.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

Value = float | None

BUCKETS_MAX = 1_000
"""Maximum number of buckets of a series. Each bucket draws two points, its minimum and its maximum."""
_MINUTE_MS, _HOUR_MS, _DAY_MS = 60_000, 3_600_000, 86_400_000
STEPS_MS = (
    *(1_000 * n for n in (1, 2, 5, 10, 15, 30)),
    *(_MINUTE_MS * n for n in (1, 2, 5, 10, 15, 30)),
    *(_HOUR_MS * n for n in (1, 2, 3, 6, 12)),
    *(_DAY_MS << n for n in range(16)),
)
"""Widths of buckets in milliseconds, which divide minutes, hours and days evenly."""
_GAP_MS_MIN = 5_000
_GAP_INTERVALS = 4
"""A gap is longer than this many intervals before it."""
_LONE_GAP_MS = 600_000  # Gap between the first two samples.


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one column in each bucket; None where the column has no value."""

    minimum: tuple[Value, ...]
    mean: tuple[Value, ...]
    maximum: tuple[Value, ...]


class Downsampled(msgspec.Struct, frozen=True, kw_only=True):
    """A downsampled table of values.

    Attributes:
        times_ms: time of the first sample in each bucket, in ascending milliseconds since 1970.
        bands: values of each column by its number.
    """

    times_ms: tuple[int, ...]
    bands: dict[int, Band]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Minimum, mean, maximum and last value of a band. The mean counts every bucket once."""

    minimum: float
    mean: float
    maximum: float
    last: float


def step_ms(start_ms: int, end_ms: int, buckets: int) -> int:
    """Return the smallest step that divides a time range into at most `buckets` buckets.

    Args:
        start_ms: start of the range in milliseconds since 1970.
        end_ms: end of the range, inclusive.
        buckets: maximum number of buckets, at least 1.
    """
    for step in STEPS_MS:
        if end_ms // step - start_ms // step < buckets:
            return step
    return max(STEPS_MS[-1], 2 * (end_ms + 1))  # One bucket from 1970 on, for a range of centuries.


class Downsampler:
    """Collects samples in ascending order of time.

    A sample that is older than its predecessor, because a clock was set back, counts in the predecessor's bucket.
    """

    def __init__(self, step_ms: int) -> None:
        self._step_ms = step_ms
        self._bucket = -1
        self._rows: list[tuple[Sequence[int], list[Sequence[Value]]]] = []
        self._times: list[int] = []
        self._found: dict[int, tuple[list[Value], list[Value], list[Value]]] = {}
        self._last_ms: int | None = None
        self._intervals_ms: deque[int] = deque(maxlen=3)
        self._gaps: list[int] = []

    def add(self, at_ms: int, columns: Sequence[int], values: Sequence[Value]) -> None:
        """Add a sample.

        Args:
            at_ms: time of the sample in milliseconds since 1970.
            columns: numbers of the columns. Samples with equal columns should share one object.
            values: value of each column.
        """
        bucket = at_ms // self._step_ms
        self._note_interval(at_ms)
        if bucket > self._bucket:
            self._flush()
            self._bucket = bucket
            self._times.append(at_ms)
        if self._rows and self._rows[-1][0] is columns:
            self._rows[-1][1].append(values)
        else:
            self._rows.append((columns, [values]))

    def result(self) -> Downsampled:
        """Return the buckets."""
        self._flush()
        times, order = list(self._times), list(range(len(self._times)))
        for gap_ms in self._gaps:
            times.append(gap_ms)
            order.append(-1)
        if self._gaps:
            pairs = sorted(zip(times, order, strict=True))
            times, order = [at for at, _ in pairs], [index for _, index in pairs]
        bands = {}
        for column, lists in sorted(self._found.items()):
            full = [[*values, *[None] * (len(self._times) - len(values))] for values in lists]
            low, mean, high = (tuple(None if index < 0 else values[index] for index in order) for values in full)
            bands[column] = Band(minimum=low, mean=mean, maximum=high)
        return Downsampled(times_ms=tuple(times), bands=bands)

    def _note_interval(self, at_ms: int) -> None:
        if self._last_ms is None:
            self._last_ms = at_ms
            return
        length_ms = at_ms - self._last_ms
        if length_ms <= 0:
            return
        # A gap needs an empty bucket between its two samples.
        if length_ms > self._gap_ms() and at_ms // self._step_ms - self._last_ms // self._step_ms > 1:
            self._gaps.append((self._last_ms // self._step_ms + 1) * self._step_ms)
        self._intervals_ms.append(length_ms)
        self._last_ms = at_ms

    def _gap_ms(self) -> int:
        """Return the interval above which there is a gap. It depends on earlier samples only."""
        if not self._intervals_ms:
            return _LONE_GAP_MS
        # The median of three ignores one gap or one early sample.
        usual = sorted(self._intervals_ms)[len(self._intervals_ms) // 2]
        return max(_GAP_MS_MIN, _GAP_INTERVALS * usual)

    def _flush(self) -> None:
        merged: dict[int, list[float]] = {}
        for columns, rows in self._rows:
            for column, values in zip(columns, zip(*rows, strict=True), strict=True):
                known = [value for value in values if value is not None]
                if known and not math.isfinite(sum(known)):
                    known = [value for value in known if math.isfinite(value)]
                if known:
                    merged.setdefault(column, []).extend(known)
        self._rows = []
        place = len(self._times) - 1
        for column, known in merged.items():
            lists = self._found.setdefault(column, ([], [], []))
            for target, value in zip(lists, (min(known), sum(known) / len(known), max(known)), strict=True):
                target.extend([None] * (place - len(target)))
                target.append(value)


def thinned(table: Downsampled, rows: int) -> Downsampled:
    """Return a table with at most `rows` buckets by combining neighbouring buckets."""
    count = len(table.times_ms)
    if count <= rows:
        return table
    edges = [count * n // rows for n in range(rows + 1)]
    parts = [slice(start, end) for start, end in itertools.pairwise(edges)]
    bands = {
        column: Band(
            minimum=tuple(_of(min, band.minimum[part]) for part in parts),
            mean=tuple(_of(_mean, band.mean[part]) for part in parts),
            maximum=tuple(_of(max, band.maximum[part]) for part in parts),
        )
        for column, band in table.bands.items()
    }
    return Downsampled(times_ms=tuple(table.times_ms[part.start] for part in parts), bands=bands)


def summary(bands: Sequence[Band]) -> Summary | None:
    """Return the summary of several bands, or None without a value. `last` is the mean of the last values."""
    low = [value for band in bands for value in band.minimum if value is not None]
    if not low:
        return None
    means = [value for band in bands for value in band.mean if value is not None]
    high = [value for band in bands for value in band.maximum if value is not None]
    last = [known[-1] for band in bands if (known := [value for value in band.mean if value is not None])]
    return Summary(minimum=min(low), mean=_mean(means), maximum=max(high), last=_mean(last))


def _of(function: Callable[[Sequence[float]], float], values: Sequence[Value]) -> Value:
    known = [value for value in values if value is not None]
    return function(known) if known else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
