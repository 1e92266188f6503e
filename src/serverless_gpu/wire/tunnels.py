"""Defines bodies for tunnels between the owner of a run and the run's attempt (`model/tunnel_end.py`).

    PUT    /runs/{run}/tunnels/{tunnel}                      TunnelRequest → TunnelView
    GET    /runs/{run}/tunnels/{tunnel}/messages?received    → stream of `TunnelMessage` from the node
    POST   /runs/{run}/tunnels/{tunnel}/messages             SentMessage → TunnelAnswer
    DELETE /runs/{run}/tunnels/{tunnel}

The node uses the same routes below /agents/{node}, after it has received an `OpenTunnel` order. `received` is the
number of frames that the reader has received before. The server asks the other end for all later frames.
"""

from __future__ import annotations

from serverless_gpu.model.tunnel_end import TunnelMessage
from serverless_gpu.wire.base import Answer, Request

TUNNELS = "tunnels"
"""Capability of nodes that serve tunnels."""


class TunnelRequest(Request, frozen=True, kw_only=True):
    """Open a tunnel to the current attempt of a run."""


class TunnelView(Answer, frozen=True, kw_only=True):
    """An open tunnel.

    Attributes:
        fence: fence of the attempt.
        node: name of the node with the first rank, to which the tunnel leads.
    """

    fence: int
    node: str


class SentMessage(Request, frozen=True, kw_only=True):
    """A message for the other end."""

    message: TunnelMessage


class TunnelAnswer(Answer, frozen=True, kw_only=True):
    """Answer to a message.

    Attributes:
        taken: False if the other end does not read, so that the sender must send the message again later.
    """

    taken: bool
