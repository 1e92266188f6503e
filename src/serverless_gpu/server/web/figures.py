"""Makes figures of pages: a chart with its summary in words and the table behind it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import msgspec

from serverless_gpu.model.time_buckets import Downsampled, thinned
from serverless_gpu.server.web import line_chart
from serverless_gpu.server.web.line_chart import PlotLine

TABLE_ROWS_MAX = 50
_TABLE_CELLS_MAX = 200


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A chart with its summary and its table. `templates/figure.html` shows it.

    Attributes:
        svg: the chart as an SVG element.
        rows: times in the reader's zone, each with the values of the lines.
    """

    name: str
    title: str
    unit: str
    limit: float | None
    omitted: int
    labels: tuple[tuple[str, str], ...]
    sentence: str
    svg: str
    rows: tuple[tuple[str, tuple[str, ...]], ...]


def make_figure(
    name: str,
    title: str,
    times_ms: Sequence[int],
    lines: Sequence[PlotLine],
    *,
    unit: str,
    zone: datetime.tzinfo,
    limit: float | None = None,
    omitted: int = 0,
) -> Figure:
    """Return a figure.

    Args:
        name: identifier of the figure within its page.
        title: heading.
        times_ms: times in ascending milliseconds since 1970.
        lines: lines with one value for each time, at least one.
        unit: unit of the values, as in `line_chart.measure`.
        zone: time zone of the reader.
        limit: highest possible value, or None.
        omitted: number of further lines that the chart does not show.
    """
    rows = max(1, min(TABLE_ROWS_MAX, _TABLE_CELLS_MAX // len(lines)))
    bands = {number: line.band for number, line in enumerate(lines)}
    table = thinned(Downsampled(times_ms=tuple(times_ms), bands=bands), rows)
    means = [band.mean for _, band in sorted(table.bands.items())]
    return Figure(
        name=name,
        title=title,
        unit=unit,
        limit=limit,
        omitted=omitted,
        labels=tuple((line.label, line_chart.line_class(number)) for number, line in enumerate(lines)),
        sentence=line_chart.sentence(lines, unit),
        svg=line_chart.line_chart(times_ms, lines, unit=unit, zone=zone, limit=limit),
        rows=tuple(
            (
                f"{datetime.datetime.fromtimestamp(at_ms / 1000, zone):%Y-%m-%d %H:%M:%S}",
                tuple(line_chart.measure(mean[place], unit) for mean in means),
            )
            for place, at_ms in enumerate(table.times_ms)
        ),
    )
