"""Routes of `wire/state.py` that operators use: whether anything new is started."""

from __future__ import annotations

from serverless_gpu.server.http.routing import Call, Routes, reading, writing
from serverless_gpu.server.nodes.drain import DrainService
from serverless_gpu.wire.state import DrainRequest, DrainView

routes = Routes("drain")


@routes.get("/drain", needs=reading("nodes"))
def show_drain(call: Call, drain: DrainService) -> DrainView:
    """Return whether anything new is started, and what goes on."""
    return drain.view()


@routes.put("/drain", needs=writing("nodes"))
def put_drain(call: Call, drain: DrainService, body: DrainRequest) -> DrainView:
    """Start nothing new from now on, or again."""
    return drain.put(call.who, body)
