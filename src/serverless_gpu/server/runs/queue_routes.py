"""Routes of `wire/queue.py`: who waits, and shares of the queue."""

from __future__ import annotations

from typing import Annotated

import msgspec

from serverless_gpu.server.http.routing import Call, Query, Routes, reading, writing
from serverless_gpu.server.pools import PoolService
from serverless_gpu.server.runs.queue_views import QueueViews
from serverless_gpu.wire.queue import (
    LIMIT_MAX,
    QueueView,
    ShareList,
    ShareRequest,
    ShareView,
)

routes = Routes("queue")


class QueueQuery(Query, frozen=True, kw_only=True):
    """How much of the queue, and whether only one's own runs."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)] = LIMIT_MAX
    mine: bool = False


@routes.get("/queue", needs=reading("runs"))
def view_queue(call: Call, queue_views: QueueViews, query: QueueQuery) -> QueueView:
    """Return those that wait, in the order in which they are looked at."""
    return queue_views.view(call.who, call.reach, limit=query.limit, mine=query.mine)


@routes.get("/shares", needs=reading("shares"))
def list_shares(call: Call, queue_views: QueueViews) -> ShareList:
    """List shares of the queue, and what was used."""
    return queue_views.view_shares(call.who, call.reach)


@routes.put("/shares/{kind}/{name}", needs=writing("shares"))
def put_share(call: Call, pools: PoolService, kind: str, name: str, body: ShareRequest) -> ShareView:
    """Set how much a team, or a user within their team, gets while others want devices, too."""
    return pools.put_share(call.who, kind, name, body.weight)


@routes.delete("/shares/{kind}/{name}", needs=writing("shares"))
def remove_share(call: Call, pools: PoolService, kind: str, name: str) -> ShareView:
    """Take a share away: it is 1 again."""
    return pools.remove_share(call.who, kind, name)
