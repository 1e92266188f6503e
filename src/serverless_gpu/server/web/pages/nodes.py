"""Shows nodes and their GPUs."""

from __future__ import annotations

from serverless_gpu.server.core.hub import SCHEDULER
from serverless_gpu.server.http.routing import Call, Routes, reading
from serverless_gpu.server.nodes import node_service
from serverless_gpu.server.web.site import WEB, Page, Site

routes = Routes("node-pages", mount=WEB)


@routes.get("/nodes", needs=reading("nodes"))
def show_nodes(call: Call, site: Site) -> Page:
    """List nodes with their devices."""
    found = site.ask(call, node_service.list_nodes)
    return site.page(call, "nodes.html", title="Nodes", nav="nodes", wakes=(SCHEDULER,), nodes=found.nodes)
