"""Shows charts of the devices, ranks and nodes of a run.

Routes:

    GET /ui/runs/{run}/metrics         the page; without scripts, with SVG charts
    GET /ui/runs/{run}/metrics/data    values for `assets/charts.js`
"""

from __future__ import annotations

import datetime
from typing import Annotated

import msgspec

from serverless_gpu.server.http.routing import Call, Query, Routes, reading
from serverless_gpu.server.runs import run_telemetry
from serverless_gpu.server.runs.run_service import Fence
from serverless_gpu.server.runs.run_telemetry import TelemetryQuery
from serverless_gpu.server.web.figures import Figure, make_figure
from serverless_gpu.server.web.line_chart import PlotLine
from serverless_gpu.server.web.pages import run_frame
from serverless_gpu.server.web.site import WEB, Page, Site, zone_of_reader
from serverless_gpu.wire.runs import TelemetryChart, TelemetryView

STILL_BUCKETS = 120
"""Buckets of the charts without scripts."""
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
    return make_figure(
        chart.name,
        chart.title,
        view.times_ms,
        lines,
        unit=chart.unit,
        limit=chart.limit,
        omitted=chart.omitted,
        zone=zone,
    )
