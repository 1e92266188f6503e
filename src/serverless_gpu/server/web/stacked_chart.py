"""Computes the geometry of stacked bars and steps, which templates draw as SVG without scripts.

Horizontal positions are per cent of the width and vertical positions are pixels, so that hatches keep their shape at
any width. Each series has a colour and a hatch of its own (`.series-N` in `app.css`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

SERIES_MAX = 8
"""Maximum number of series with a colour of their own. The chart adds all further series to "others"."""
HEIGHT = 200
OTHERS = SERIES_MAX
_GAP = 0.18
"""Part of a column's width that stays empty."""


class Series(NamedTuple):
    """A series of a chart: its label, the number of its colour, and its total."""

    label: str
    number: int
    total: int


class Segment(NamedTuple):
    """A rectangle of a chart: its series, value, top and height in pixels."""

    series: Series
    value: int
    y: float
    height: float


class Column(NamedTuple):
    """A column of a chart, with its edges in per cent and its segments from the bottom up."""

    label: str
    x: float
    width: float
    total: int
    segments: tuple[Segment, ...]


class StackedChart(NamedTuple):
    """A chart with stacked columns. `top` is the value at the upper edge."""

    series: tuple[Series, ...]
    columns: tuple[Column, ...]
    top: int

    @property
    def labels(self) -> tuple[Column, ...]:
        """Return the columns with a label below the axis: the first, the middle and the last."""
        count = len(self.columns)
        places = sorted({0, count // 2, count - 1}) if count else []
        return tuple(self.columns[place] for place in places)

    def value(self, column: Column, series: Series) -> int:
        """Return the value of a series in a column."""
        return sum(segment.value for segment in column.segments if segment.series == series)


def stack(columns: Sequence[str], values: Mapping[tuple[str, str], int], rest: Mapping[str, int]) -> StackedChart:
    """Return a stacked chart.

    Args:
        columns: labels of the columns.
        values: value by column and series. Negative values count as zero.
        rest: value by column that belongs to no listed series.
    """
    totals: dict[str, int] = {}
    for (_, name), value in values.items():
        totals[name] = totals.get(name, 0) + max(0, value)
    ordered = sorted((name for name, total in totals.items() if total), key=lambda name: (-totals[name], name))
    # A single further series needs no "others", because it can take the last colour.
    shown = ordered if len(ordered) == SERIES_MAX + 1 and not any(rest.values()) else ordered[:SERIES_MAX]
    series = {name: Series(name, number, totals[name]) for number, name in enumerate(shown)}
    others = {label: max(0, rest.get(label, 0)) for label in columns}
    for (label, name), value in values.items():
        if name not in series and label in others:
            others[label] += max(0, value)
    last = Series("others", OTHERS, sum(others.values()))
    whole = {label: sum(max(0, values.get((label, name), 0)) for name in series) + others[label] for label in columns}
    top = round_up(max(whole.values(), default=0))
    made: list[Column] = []
    for place, label in enumerate(columns):
        parts = [(one, max(0, values.get((label, one.label), 0))) for one in series.values()]
        parts += [(last, others[label])] if last.total else []
        made.append(
            Column(
                label=label,
                x=100 * (place + _GAP / 2) / len(columns),
                width=100 * (1 - _GAP) / len(columns),
                total=whole[label],
                segments=tuple(_segments(parts, top)),
            )
        )
    return StackedChart((*series.values(), *([last] if last.total else ())), tuple(made), top)


def round_up(value: int) -> int:
    """Return the next number of the form 1, 2 or 5 times a power of ten."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if value <= factor * power:
                return factor * power
        power *= 10


class Step(NamedTuple):
    """A rectangle of a chart of steps: left edge and width in per cent, top and height in pixels."""

    x: float
    width: float
    y: float
    height: float


def steps(
    periods: Sequence[tuple[int, int | None, int]], *, from_ns: int, until_ns: int, height: int
) -> tuple[Step, ...]:
    """Return one rectangle for each period, whose height is the period's value.

    Args:
        periods: start, end and value. An end of None means that the period has no end.
        from_ns: time at the left edge, in nanoseconds since 1970. `until_ns` is the time at the right edge.
        height: height of the chart in pixels.
    """
    top = max((value for *_, value in periods), default=0) or 1
    length = max(1, until_ns - from_ns)
    found: list[Step] = []
    for start, end, value in periods:
        left = min(1.0, max(0.0, (start - from_ns) / length))
        right = 1.0 if end is None else min(1.0, max(left, (end - from_ns) / length))
        tall = max(2.0, (height - 2) * value / top)
        found.append(Step(round(100 * left, 3), round(100 * (right - left), 3), height - tall, tall))
    return tuple(found)


def _segments(parts: Sequence[tuple[Series, int]], top: int) -> list[Segment]:
    found: list[Segment] = []
    below = 0
    for series, value in parts:
        if value <= 0:
            continue
        low, high = HEIGHT * below / top, HEIGHT * (below + value) / top
        found.append(Segment(series, value, round(HEIGHT - high, 2), round(high - low, 2)))
        below += value
    return found
