"""Asks a home's agent for its status."""

from __future__ import annotations

from pathlib import Path

from serverless_gpu.errors import AgentUnavailable
from serverless_gpu.node.agent.connection import running_agent
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home

_ANSWER_S = 10.0


def agent_status(home: Path) -> protocol.Status | None:
    """Return the status of a home's agent, or None when none is running."""
    connection = running_agent(Home(home))
    if connection is None:
        return None
    channel, greeting = connection
    channel.sock.settimeout(_ANSWER_S)
    try:
        protocol.send(channel, protocol.StatusRequest())
        received = protocol.receive(channel)
    except TimeoutError:
        raise AgentUnavailable(f"the agent (pid {greeting.pid}) did not answer within {_ANSWER_S:.0f} s") from None
    finally:
        channel.close()
    if received is None or not isinstance(received[0], protocol.Status):
        raise AgentUnavailable("the agent of this node ended while it was asked for its status")
    return received[0]
