"""Draws line charts as SVG, which need no script.

    times_ms, ChartLine("GPU 0", mean, minimum, maximum), … ─▶ line_chart() ─▶ <svg> with axes, bands and lines

Colours and dashes are classes of `app.css`. `assets/charts.js` replaces the SVG by a chart that zooms. Other pages can
use the same functions for any series, for example for the devices of a node.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence

import msgspec
from markupsafe import Markup

from serverless_gpu.model.time_buckets import STEPS_MS, Band, Summary, Value, summary
from serverless_gpu.units import format_bytes

COLOURS = 8
"""Number of line colours. Further lines repeat the colours with other dashes."""
WIDTH, HEIGHT = 640, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 8, 8, 24
_TICKS_X, _TICKS_Y = 6, 4
_DAY_MS = 86_400_000


class PlotLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a chart, with one value for each time; None interrupts the line.

    Attributes:
        minimum: lower edge of the band around the line, or an empty tuple for a line without a band.
    """

    label: str
    mean: tuple[Value, ...]
    minimum: tuple[Value, ...] = ()
    maximum: tuple[Value, ...] = ()

    @property
    def band(self) -> Band:
        """Return the line's values as a band."""
        return Band(mean=self.mean, minimum=self.minimum or self.mean, maximum=self.maximum or self.mean)


def measure(value: float | None, unit: str) -> str:
    """Return a measured value with its unit, or a dash for None."""
    if value is None:
        return "–"
    if unit == "bytes":
        return format_bytes(round(value))
    text = f"{value:.0f}" if abs(value) >= 10 else f"{value:.3g}"
    return f"{text} {({'percent': '%', 'celsius': '°C', 'watts': 'W'}).get(unit, unit)}"


def summarized(lines: Sequence[PlotLine]) -> Summary | None:
    """Return minimum, mean, maximum and last value of several lines, or None without a value."""
    return summary([line.band for line in lines])


def sentence(lines: Sequence[PlotLine], unit: str) -> str:
    """Return the summary of a chart in words."""
    found = summarized(lines)
    if found is None:
        return "No values."
    subject = lines[0].label if len(lines) == 1 else f"{lines[0].label} to {lines[-1].label}"
    return (
        f"{subject}: minimum {measure(found.minimum, unit)}, mean {measure(found.mean, unit)}, "
        f"maximum {measure(found.maximum, unit)}, last {measure(found.last, unit)}."
    )


def line_chart(
    times_ms: Sequence[int], lines: Sequence[PlotLine], *, unit: str, zone: datetime.tzinfo, limit: float | None = None
) -> Markup:
    """Return a chart as an SVG element.

    Args:
        times_ms: times in ascending milliseconds since 1970.
        lines: lines with one value for each time.
        unit: unit of the values, as in `measure`.
        zone: time zone of the time axis.
        limit: highest possible value, or None to end the axis above the highest value.
    """
    high = max((value for line in lines for value in line.band.maximum if value is not None), default=0.0)
    ticks_y = _value_ticks(limit if limit and high <= limit else high, unit)
    top = ticks_y[-1]
    start, end = (times_ms[0], times_ms[-1]) if times_ms else (0, 0)
    span = max(1, end - start)

    def x(at_ms: float) -> float:
        return round(_LEFT + (at_ms - start) / span * (WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - _BOTTOM - value / top * (HEIGHT - _TOP - _BOTTOM), 1)

    parts = [Markup('<svg class="line-chart" viewBox="0 0 {} {}">').format(WIDTH, HEIGHT)]
    for value in ticks_y:
        parts.append(
            Markup('<path class="grid" d="M{} {}H{}"/><text x="{}" y="{}" text-anchor="end">{}</text>').format(
                _LEFT, y(value), WIDTH - _RIGHT, _LEFT - 6, y(value) + 4, measure(value, unit)
            )
        )
    for at_ms, text in _time_ticks(start, end, zone):
        parts.append(Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(x(at_ms), HEIGHT - 6, text))
    for number, line in enumerate(lines):
        parts += _line(number, line, [x(at_ms) for at_ms in times_ms], y)
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def line_class(number: int) -> str:
    """Return the CSS classes of a line's colour and dash."""
    dash = number // COLOURS % 3
    return f"line{number % COLOURS}" + (f" dash{dash}" if dash else "")


def _line(number: int, line: PlotLine, places: Sequence[float], y: Callable[[float], float]) -> list[Markup]:
    parts = []
    for start, end in _stretches(line.mean):
        if line.minimum:
            edge = [f"{places[n]} {y(line.maximum[n] or 0)}" for n in range(start, end)]
            edge += [f"{places[n]} {y(line.minimum[n] or 0)}" for n in reversed(range(start, end))]
            parts.append(Markup('<path class="band {}" d="M{}Z"/>').format(line_class(number), "L".join(edge)))
        points = [f"{places[n]} {y(line.mean[n] or 0)}" for n in range(start, end)]
        if len(points) == 1:  # A line of one point is invisible without its round end.
            points *= 2
        parts.append(Markup('<path class="line {}" d="M{}"/>').format(line_class(number), "L".join(points)))
    return parts


def _stretches(values: Sequence[Value]) -> list[tuple[int, int]]:
    """Return the ranges of known values between gaps."""
    found, start = [], None
    for place, value in enumerate([*values, None]):
        if value is not None and start is None:
            start = place
        elif value is None and start is not None:
            found.append((start, place))
            start = None
    return found


def _value_ticks(high: float, unit: str) -> list[float]:
    """Return round values from 0 to at least `high`."""
    if not high > 0:
        return [0.0, 100.0 if unit == "percent" else 1.0]
    raw = high / _TICKS_Y
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * n for n in (1, 2, 2.5, 5, 10) if scale * n >= raw * 0.999)
    count = math.ceil(high / step * 0.999)
    return [step * n for n in range(count + 1)]


def _time_ticks(start_ms: int, end_ms: int, zone: datetime.tzinfo) -> list[tuple[int, str]]:
    """Return round times in a time zone with their texts."""
    step = next((step for step in STEPS_MS if (end_ms - start_ms) / step <= _TICKS_X), STEPS_MS[-1])
    local = datetime.datetime.fromtimestamp(start_ms / 1000, zone)
    offset_ms = round((local.utcoffset() or datetime.timedelta()).total_seconds() * 1000)
    form = "%H:%M:%S" if step < 60_000 else "%H:%M" if step < _DAY_MS else "%d %b"
    first = -(-(start_ms + offset_ms) // step) * step - offset_ms
    return [
        (at_ms, datetime.datetime.fromtimestamp(at_ms / 1000, zone).strftime(form))
        for at_ms in range(first, end_ms + 1, step)
    ]
