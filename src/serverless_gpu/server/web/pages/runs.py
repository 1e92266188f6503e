"""Lists runs with filters in the address."""

from __future__ import annotations

from serverless_gpu.server.core.hub import SCHEDULER
from serverless_gpu.server.http.routing import Call, Routes, reading
from serverless_gpu.server.runs import run_service
from serverless_gpu.server.runs.run_service import RunsQuery
from serverless_gpu.server.web.site import WEB, Page, Site

routes = Routes("run-pages", mount=WEB)


@routes.get("/runs", needs=reading("runs"))
def show_runs(call: Call, site: Site, query: RunsQuery) -> Page:
    """List runs, newest first."""
    found = site.ask(call, run_service.list_runs, query=query)
    return site.page(
        call,
        "runs.html",
        title="Runs",
        nav="runs",
        wakes=(SCHEDULER,),
        query=query,
        runs=found.runs,
        cursor=found.cursor,
        costs={view.id: view.cost for view in found.costs},
    )
