"""Tokens of nodes that a test makes, as `sgpu node invite` and `sgpu join` make them."""

from __future__ import annotations

import contextlib

from serverless_gpu.ambient import machine
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink.presence import instance_of
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.nodes import InviteAnswer, InviteRequest, JoinAnswer, JoinRequest


def node_token(admin: Connection, name: str, home: Home) -> str:
    """Return a token for a home of this machine, which is to be a node of that name."""
    made = admin.ask("POST", "/nodes/invite", InviteRequest(name=name), answer=InviteAnswer)
    request = JoinRequest(name=name, machine=machine(), instance=instance_of(home), ray=False)
    with contextlib.closing(Connection(admin.url, made.token)) as joining:
        return joining.ask("POST", "/agents/join", request, answer=JoinAnswer).token
