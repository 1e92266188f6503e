"""Shows the reader's runs, what waits and why, free GPUs, spend and notices."""

from __future__ import annotations

from serverless_gpu.model.lifecycle.attempt import TERMINAL
from serverless_gpu.server import pools
from serverless_gpu.server.budgets import budget_service
from serverless_gpu.server.core.hub import CHARGED, SCHEDULER
from serverless_gpu.server.http.routing import ANY_CALLER, Call, Routes
from serverless_gpu.server.runs import queue_views, run_service
from serverless_gpu.server.runs.queue_views import QueueQuery
from serverless_gpu.server.runs.run_service import RunsQuery
from serverless_gpu.server.web.site import WEB, Page, Site

routes = Routes("home", mount=WEB)
_RUNS = 20


@routes.get("/", needs=ANY_CALLER)
def show_home(call: Call, site: Site) -> Page:
    """Show the home page."""
    mine = site.ask_if_allowed(
        call, run_service.list_runs, query=RunsQuery(owner=call.who.name, limit=_RUNS, costs=True)
    )
    queue = site.ask_if_allowed(call, queue_views.view_queue, query=QueueQuery(mine=True))
    there = site.ask_if_allowed(call, pools.list_pools)
    budgets = site.ask_if_allowed(call, budget_service.list_budgets)
    runs = mine.runs if mine is not None else ()
    return site.page(
        call,
        "home.html",
        title="Home",
        nav="home",
        wakes=(SCHEDULER, CHARGED),
        active=[run for run in runs if run.state not in TERMINAL],
        ended=[run for run in runs if run.state in TERMINAL][:8],
        costs={view.id: view.cost for view in mine.costs} if mine is not None else {},
        queue=queue,
        pools=there.pools if there is not None else (),
        budgets=budgets,
    )
