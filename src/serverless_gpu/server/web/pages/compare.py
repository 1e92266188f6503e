"""Compares two to eight runs."""

from __future__ import annotations

from serverless_gpu.server.http.routing import Call, Routes, reading
from serverless_gpu.server.runs import comparison
from serverless_gpu.server.runs.comparison import RUNS_MAX, RUNS_MIN, ComparisonQuery
from serverless_gpu.server.web.pages.runs import RunsOfQuery
from serverless_gpu.server.web.site import WEB, Page, Site

routes = Routes("compare-pages", mount=WEB)


@routes.get("/compare", needs=reading("runs"))
def show_comparison(call: Call, site: Site, query: RunsOfQuery) -> Page:
    """Compare runs: outcome, spec, arguments, tags, environment, metrics and cost."""
    wanted = query.identifiers
    compared = None
    if wanted:
        compared = site.ask(call, comparison.compare_runs, query=ComparisonQuery(runs=",".join(wanted)))
    return site.page(
        call, "compare.html", title="Compare runs", nav="runs", compared=compared, least=RUNS_MIN, most=RUNS_MAX
    )
