"""Shows charts of the devices, ranks and nodes of a run.

Routes:

    GET /ui/runs/{run}/metrics         the page; without scripts, with SVG charts
    GET /ui/runs/{run}/metrics/data    values for `assets/charts.js`
"""

from __future__ import annotations

import datetime
from typing import Annotated

import msgspec

from serverless_gpu.model.time_buckets import Downsampled, thinned
from serverless_gpu.server.http.routing import Call, Query, Routes, reading
from serverless_gpu.server.runs import run_telemetry
from serverless_gpu.server.runs.run_service import Fence
from serverless_gpu.server.runs.run_telemetry import TelemetryQuery
from serverless_gpu.server.web import line_chart
from serverless_gpu.server.web.line_chart import PlotLine
from serverless_gpu.server.web.pages import run_frame
from serverless_gpu.server.web.site import WEB, Page, Site, zone_of_reader
from serverless_gpu.wire.runs import TelemetryChart, TelemetryView

STILL_BUCKETS = 120
"""Buckets of the charts without scripts."""
TABLE_ROWS_MAX = 50
_TABLE_CELLS_MAX = 200
RANGES = (
    (0, "Whole attempt"),
    (600_000, "Last 10 minutes"),
    (3_600_000, "Last hour"),
    (86_400_000, "Last day"),
)
"""Time ranges in milliseconds, which a reader can choose without scripts."""

routes = Routes("run-metric-pages", mount=WEB)


class MetricsQuery(Query, frozen=True, kw_only=True):
    """The shown attempt, node and time range."""

    fence: Fence = 0
    node: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    last_ms: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A chart of the page.

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


@routes.get("/runs/{run}/metrics", needs=reading("runs"))
def show_metrics(call: Call, site: Site, run: str, query: MetricsQuery) -> Page:
    """Show the charts of a run."""
    view = run_frame.read(call, site, run)
    asked = TelemetryQuery(fence=query.fence, node=query.node, last_ms=query.last_ms, buckets=STILL_BUCKETS)
    found = site.ask(call, run_telemetry.read_telemetry, run=run, query=asked)
    zone = zone_of_reader(call)
    return run_frame.page(
        call,
        site,
        view,
        "run_metrics.html",
        tab="metrics",
        is_live=not found.complete,
        query=query,
        found=found,
        figures=[_figure(found, chart, zone) for chart in found.charts],
        ranges=RANGES,
    )


@routes.get("/runs/{run}/metrics/data", needs=reading("runs"))
def read_data(call: Call, site: Site, run: str, query: TelemetryQuery) -> TelemetryView:
    """Return values for the charts."""
    return site.ask(call, run_telemetry.read_telemetry, run=run, query=query)


def _figure(view: TelemetryView, chart: TelemetryChart, zone: datetime.tzinfo) -> Figure:
    lines = [
        PlotLine(label=line.label, mean=line.mean, minimum=line.minimum, maximum=line.maximum) for line in chart.lines
    ]
    rows = max(1, min(TABLE_ROWS_MAX, _TABLE_CELLS_MAX // len(lines)))
    bands = {number: line.band for number, line in enumerate(lines)}
    table = thinned(Downsampled(times_ms=view.times_ms, bands=bands), rows)
    means = [band.mean for _, band in sorted(table.bands.items())]
    return Figure(
        name=chart.name,
        title=chart.title,
        unit=chart.unit,
        limit=chart.limit,
        omitted=chart.omitted,
        labels=tuple((line.label, line_chart.line_class(number)) for number, line in enumerate(lines)),
        sentence=line_chart.sentence(lines, chart.unit),
        svg=line_chart.line_chart(view.times_ms, lines, unit=chart.unit, zone=zone, limit=chart.limit),
        rows=tuple(
            (
                f"{datetime.datetime.fromtimestamp(at_ms / 1000, zone):%Y-%m-%d %H:%M:%S}",
                tuple(line_chart.measure(mean[place], chart.unit) for mean in means),
            )
            for place, at_ms in enumerate(table.times_ms)
        ),
    )
