"""Routes of nodes: those that operators and users call (`routes`), and those of agents (`agent_routes`)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from serverless_gpu.errors import NotAllowed, TooLarge
from serverless_gpu.model.access_control import AccessReach
from serverless_gpu.server.http.routing import Call, Query, Routes, Stream, reading, writing
from serverless_gpu.server.nodes.agent_service import AgentService
from serverless_gpu.server.nodes.node_admission import JoinService, NodeAdmission
from serverless_gpu.server.nodes.node_service import NodeCommand, NodeRuleService, NodeService
from serverless_gpu.server.records.orders import OPEN_MAX
from serverless_gpu.wire.agents import AgentHello, AgentWelcome, Heartbeat, HeartbeatAnswer, Order, OrdersTaken
from serverless_gpu.wire.nodes import (
    ApproveRequest,
    CalendarRequest,
    ForgetRequest,
    InviteAnswer,
    InviteRequest,
    JoinAnswer,
    JoinRequest,
    NodeDrainRequest,
    NodeList,
    NodeView,
    QuarantineRequest,
    RayPool,
)

routes = Routes("nodes")


@routes.get("/nodes", needs=reading("nodes"))
def list_nodes(call: Call, node_admission: NodeAdmission, nodes: NodeService) -> NodeList:
    """Return all nodes."""
    return NodeList(nodes=(*nodes.view_nodes(), *node_admission.view_pending()))


@routes.post("/nodes/invite", needs=writing("tokens"))
def invite(call: Call, node_admission: NodeAdmission, body: InviteRequest) -> InviteAnswer:
    """Make a join token, good for some machines and a short time."""
    _check_administrator(call)
    return node_admission.invite(call.who, body)


@routes.post("/nodes/approve", needs=writing("tokens"))
def approve(call: Call, node_admission: NodeAdmission, body: ApproveRequest) -> NodeView:
    """Let in a node that waits for an administrator."""
    _check_administrator(call)
    return node_admission.approve(call.who, body)


@routes.post("/nodes/{node}/forget", needs=writing("nodes"))
def forget(call: Call, nodes: NodeService, node: str, body: ForgetRequest) -> NodeView:
    """Give up a node that is known to be dead, with its attempts."""
    return nodes.forget(call.who, node, known_dead=body.i_know_it_is_dead)


@routes.put("/nodes/{node}/drain", needs=writing("node-rules"))
def drain(call: Call, node_rules: NodeRuleService, node: str, body: NodeDrainRequest) -> NodeView:
    """Give a node nothing new, and have what runs there leave where that is asked for; or end that."""
    return node_rules.drain(_asked(call, node), body)


@routes.put("/nodes/{node}/calendar", needs=writing("node-rules"))
def put_calendar(call: Call, node_rules: NodeRuleService, node: str, body: CalendarRequest) -> NodeView:
    """Say whose a node is, and when others may use it."""
    return node_rules.put_calendar(_asked(call, node), body)


@routes.put("/nodes/{node}/quarantine", needs=writing("node-rules"))
def quarantine(call: Call, node_rules: NodeRuleService, node: str, body: QuarantineRequest) -> NodeView:
    """Leave a device of a node out of what runs get, or take that back."""
    return node_rules.quarantine(_asked(call, node), body)


def _check_administrator(call: Call) -> None:
    if call.reach != AccessReach.ALL:
        raise NotAllowed("nodes are invited and approved by administrators", hint="ask one")


def _asked(call: Call, node: str) -> NodeCommand:
    return NodeCommand(who=call.who, reach=call.reach, node=node)


agent_routes = Routes("agents")


class OrdersQuery(Query, frozen=True, kw_only=True):
    """Whose stream it is."""

    instance: Annotated[str, msgspec.Meta(max_length=64)] = ""  # of the node's home
    process: Annotated[str, msgspec.Meta(max_length=64)] = ""  # of the node's uplink, as it said in its hello


@agent_routes.post("/agents", needs=writing("agents"))
def hello(call: Call, agents: AgentService, body: AgentHello) -> AgentWelcome:
    """Join, or come back."""
    return agents.hello(call.who, body)


@agent_routes.post("/agents/join", needs=writing("joining"))
def join(call: Call, joins: JoinService, body: JoinRequest) -> JoinAnswer:
    """Get what a machine needs to join the pool, with the token of the join file."""
    return joins.join(call.who, body)


@agent_routes.get("/agents/ray", needs=writing("agents"))
def ray_pool(call: Call, joins: JoinService) -> RayPool:
    """Return how a node that has joined before joins the Ray cluster again."""
    return joins.ray_pool(call.who)


@agent_routes.post("/agents/{node}/heartbeat", needs=writing("agents"))
def heartbeat(call: Call, agents: AgentService, node: str, body: Heartbeat) -> HeartbeatAnswer:
    """Say that the node is there, and what it has."""
    return agents.heartbeat(call.who, node, body)


@agent_routes.get("/agents/{node}/orders", needs=writing("orders"))
async def orders(call: Call, agents: AgentService, node: str, query: OrdersQuery) -> Stream[Order]:
    """Stream what the node is to do; what it has not taken comes again."""
    await call.in_thread(
        lambda: agents.check(call.who, node, query.instance, query.process)
    )  # now, not in the middle of a stream
    return Stream(agents.stream(call.who, node, query.instance, query.process))


@agent_routes.post("/agents/{node}/orders/ack", needs=writing("orders"))
def take_orders(call: Call, agents: AgentService, node: str, body: OrdersTaken) -> None:
    """Say which orders need not come again."""
    if len(body.seqs) > OPEN_MAX:
        raise TooLarge(f"{len(body.seqs)} orders at once", hint=f"say {OPEN_MAX} at most")
    agents.take(call.who, node, body.seqs)
