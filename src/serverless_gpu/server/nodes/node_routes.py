"""Routes of nodes: what operators and users call."""

from __future__ import annotations

from serverless_gpu.errors import NotAllowed
from serverless_gpu.model.access.roles import AccessReach
from serverless_gpu.server.http.routing import Call, Routes, reading, writing
from serverless_gpu.server.nodes.node_admission import NodeAdmission
from serverless_gpu.server.nodes.node_service import NodeCommand, NodeRuleService, NodeService
from serverless_gpu.wire.agents import ForgetRequest, NodeList, NodeView
from serverless_gpu.wire.nodes import (
    ApproveRequest,
    CalendarRequest,
    InviteAnswer,
    InviteRequest,
    NodeDrainRequest,
    QuarantineRequest,
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
