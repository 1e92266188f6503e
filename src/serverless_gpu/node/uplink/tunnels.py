"""Serves tunnels from the owner of a run to the attempts on this node.

    server ── OpenTunnel ──▶ NodeTunnels ── one TunnelPump per tunnel (`wire/tunnel_pump.py`)
                             each stream: a socket pair, one end ──▶ supervisor ──▶ stem ──▶ endpoint

The node has no inbound port: the uplink connects to the server.

Failure cases: If the uplink is killed, its streams break, and the user's programs connect again. A shell continues
without its terminal. If the server does not answer, streams wait for up to an hour.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from serverless_gpu.errors import AgentUnavailable, NotFound, ServerlessGpuError, ServerUnavailable
from serverless_gpu.model.endpoint import EndpointTarget
from serverless_gpu.model.tunnel_end import TunnelMessage
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.uplink.server import UplinkServer
from serverless_gpu.wire.agents import OpenTunnel
from serverless_gpu.wire.tunnel_pump import TunnelPump
from serverless_gpu.wire.tunnels import SentMessage, TunnelAnswer

AWAY_S = 3600.0
TUNNELS_MAX = 512


class NodeTunnels:
    """The tunnels of this node. `say` writes a line to the uplink's log."""

    def __init__(self, home: Home, server: UplinkServer, say: Callable[[str], None]) -> None:
        self._home = home
        self._server = server
        self._say = say
        self._lock = threading.Lock()
        self._pumps: dict[str, tuple[OpenTunnel, TunnelPump]] = {}

    def open(self, node: str, order: OpenTunnel) -> None:
        """Serve a tunnel, or connect a known tunnel to the server again."""
        with self._lock:
            self._forget_ended()
            known = self._pumps.get(order.id)
            if known is not None:
                known[1].resume()
                return
            if len(self._pumps) >= TUNNELS_MAX:
                self._say(f"refuses a connection to run {order.run_id}: {TUNNELS_MAX} connections are open")
                return
            transport = NodeTransport(self._server, node, order.id)
            pump = TunnelPump(transport, lambda target: self._connect(order, target), away_s=AWAY_S)
            self._pumps[order.id] = order, pump
        self._say(f"opens a connection to run {order.run_id}")
        pump.start()

    def end(self, run_id: str, fence: int) -> None:
        """End the tunnels of an attempt that has ended."""
        with self._lock:
            ended = [pump for order, pump in self._pumps.values() if (order.run_id, order.fence) == (run_id, fence)]
        for pump in ended:
            pump.close()

    def _forget_ended(self) -> None:
        self._pumps = {key: one for key, one in self._pumps.items() if not one[1].over.is_set()}

    def _connect(self, order: OpenTunnel, target: EndpointTarget) -> socket.socket:
        """Return a socket whose other end the attempt's supervisor has. Raises AgentUnavailable."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                with contextlib.closing(Channel(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))) as channel:
                    channel.sock.connect(str(self._home.sockets() / f"{order.run_id}.sock"))
                    protocol.send(channel, protocol.OpenEndpoint(target=target), (theirs.fileno(),))
            except OSError as error:
                ours.close()
                raise AgentUnavailable(f"the supervisor of the run does not answer: {error.strerror}") from None
        return ours


class NodeTransport:
    """The way of one tunnel of this node to the server."""

    def __init__(self, server: UplinkServer, node: str, tunnel: str) -> None:
        self._path = f"/agents/{node}/tunnels/{tunnel}"
        self._reader, self._writer = server.line(), server.line()

    def messages(self, received: int) -> Iterator[TunnelMessage]:
        """Yield messages of the user."""
        query = {"received": str(received)}
        with _patient():
            yield from self._reader.get().stream("GET", f"{self._path}/messages", answer=TunnelMessage, query=query)

    def send(self, message: TunnelMessage) -> bool:
        """Send a message to the user."""
        with _patient():
            answer: TunnelAnswer = self._writer.get().ask(
                "POST", f"{self._path}/messages", SentMessage(message=message), answer=TunnelAnswer
            )
        return answer.taken

    def close(self) -> None:
        """Close the tunnel at the server, and the connections."""
        with contextlib.suppress(ServerlessGpuError):
            self._writer.get().ask("DELETE", self._path, answer=type(None))
        self._reader.close()
        self._writer.close()


@contextlib.contextmanager
def _patient() -> Iterator[None]:
    """Treat an unknown tunnel as an unreachable server, because the user opens it again after a restart."""
    try:
        yield
    except NotFound as error:
        raise ServerUnavailable(error.message) from None
