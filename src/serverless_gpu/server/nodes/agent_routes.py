"""Routes of `wire/agents.py` that nodes use: join, be there, be told what to do."""

from __future__ import annotations

from typing import Annotated

import msgspec

from serverless_gpu.errors import TooLarge
from serverless_gpu.server.http.routing import Call, Query, Routes, Stream, writing
from serverless_gpu.server.nodes.agent_service import Agents
from serverless_gpu.server.nodes.node_admission import JoinService
from serverless_gpu.server.records.runs.orders import OPEN_MAX
from serverless_gpu.wire.agents import AgentHello, AgentWelcome, Heartbeat, HeartbeatAnswer, Order, OrdersTaken
from serverless_gpu.wire.nodes import JoinAnswer, JoinRequest, RayPool

routes = Routes("agents")


class OrdersQuery(Query, frozen=True, kw_only=True):
    """Whose stream it is.

    Attributes:
        instance: of the node's home.
        process: of the node's uplink, as it said in its hello.
    """

    instance: Annotated[str, msgspec.Meta(max_length=64)] = ""
    process: Annotated[str, msgspec.Meta(max_length=64)] = ""


@routes.post("/agents", needs=writing("agents"))
def hello(call: Call, agents: Agents, body: AgentHello) -> AgentWelcome:
    """Join, or come back."""
    return agents.hello(call.who, body)


@routes.post("/agents/join", needs=writing("joining"))
def join(call: Call, joins: JoinService, body: JoinRequest) -> JoinAnswer:
    """Get what a machine needs to join the pool, with the token of the join file."""
    return joins.join(call.who, body)


@routes.get("/agents/ray", needs=writing("agents"))
def ray_pool(call: Call, joins: JoinService) -> RayPool:
    """Return how a node that has joined before joins the Ray cluster again."""
    return joins.ray_pool(call.who)


@routes.post("/agents/{node}/heartbeat", needs=writing("agents"))
def heartbeat(call: Call, agents: Agents, node: str, body: Heartbeat) -> HeartbeatAnswer:
    """Say that the node is there, and what it has."""
    return agents.heartbeat(call.who, node, body)


@routes.get("/agents/{node}/orders", needs=writing("orders"))
async def orders(call: Call, agents: Agents, node: str, query: OrdersQuery) -> Stream[Order]:
    """Stream what the node is to do; what it has not taken comes again."""
    await call.in_thread(
        lambda: agents.check(call.who, node, query.instance, query.process)
    )  # now, not in the middle of a stream
    return Stream(agents.stream(call.who, node, query.instance, query.process))


@routes.post("/agents/{node}/orders/ack", needs=writing("orders"))
def take_orders(call: Call, agents: Agents, node: str, body: OrdersTaken) -> None:
    """Say which orders need not come again."""
    if len(body.seqs) > OPEN_MAX:
        raise TooLarge(f"{len(body.seqs)} orders at once", hint=f"say {OPEN_MAX} at most")
    agents.take(call.who, node, body.seqs)
