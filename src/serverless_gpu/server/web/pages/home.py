"""Shows the reader's runs, what waits and why, free GPUs, spend against budgets, and notices."""

from __future__ import annotations

from serverless_gpu.model.lifecycle.attempt import TERMINAL, State
from serverless_gpu.server import pools
from serverless_gpu.server.budgets import budget_service
from serverless_gpu.server.core.hub import CHARGED, SCHEDULER
from serverless_gpu.server.http.routing import ANY_CALLER, Call, Routes
from serverless_gpu.server.nodes import drain, node_service
from serverless_gpu.server.runs import queue_views, run_service
from serverless_gpu.server.runs.queue_views import QueueQuery
from serverless_gpu.server.runs.run_service import RunsQuery
from serverless_gpu.server.web.pages.nodes import PENDING
from serverless_gpu.server.web.pages.queue import queue_row
from serverless_gpu.server.web.site import WEB, Page, Site, zone_of_reader
from serverless_gpu.wire.nodes import NodeView

routes = Routes("home", mount=WEB)
_ENDED = 8
_ACTIVE = 20
_UNENDED = ",".join(state.value for state in State if state not in TERMINAL and state is not State.QUEUED)
_NOTICES_MAX = 6


@routes.get("/", needs=ANY_CALLER)
def show_home(call: Call, site: Site) -> Page:
    """Show the home page."""
    me, zone = call.who.name, zone_of_reader(call)
    active = site.ask_if_allowed(
        call, run_service.list_runs, query=RunsQuery(owner=me, state=_UNENDED, limit=_ACTIVE, costs=True)
    )
    latest = site.ask_if_allowed(
        call, run_service.list_runs, query=RunsQuery(owner=me, state=",".join(TERMINAL), limit=_ENDED, costs=True)
    )
    queue = site.ask_if_allowed(call, queue_views.view_queue, query=QueueQuery(mine=True))
    there = site.ask_if_allowed(call, pools.list_pools)
    nodes = site.ask_if_allowed(call, node_service.list_nodes)
    costs = [*(active.costs if active else ()), *(latest.costs if latest else ())]
    return site.page(
        call,
        "home.html",
        title="Home",
        nav="home",
        wakes=(SCHEDULER, CHARGED),
        active=active.runs if active else (),
        more_active=bool(active and active.cursor),
        ended=latest.runs if latest else (),
        costs={view.id: view.cost for view in costs},
        waiting=[
            queue_row(entry, number, zone, call.clock.wall_ns())
            for number, entry in enumerate(queue.entries if queue else (), 1)
        ],
        pools=there.pools if there else (),
        budgets=site.ask_if_allowed(call, budget_service.list_budgets),
        notices=_notices(nodes.nodes if nodes else ()),
        drain=site.ask_if_allowed(call, drain.show_drain),
    )


def _notices(nodes: tuple[NodeView, ...]) -> list[str]:
    """Return what a reader should know about the nodes."""
    found = [f"{node.name} waits for the approval of an administrator." for node in nodes if node.state == PENDING]
    found += [f"{node.name} {node.sentence}." for node in nodes if node.sentence and node.state != PENDING]
    found += [f"{node.name}: {finding}" for node in nodes for finding in node.findings]
    more = len(found) - _NOTICES_MAX
    return [*found[:_NOTICES_MAX], f"{more} more: see the nodes."] if more > 0 else found
