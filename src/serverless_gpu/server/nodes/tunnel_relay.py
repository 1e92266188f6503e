"""Passes messages of tunnels between the owner of a run and the run's node.

    owner ◀── stream ── mailbox of the owner ◀──────────────── POST ──────────── uplink
    owner ─── POST ───────────────────────────▶ mailbox of the node ── stream ──▶ uplink
                                                `OpenTunnel` in the node's order stream

The server does not read frames and stores nothing. Both ends keep all frames that the other end has not confirmed
(`model/tunnel_end.py`). When an end connects, the server discards its mailbox, and asks both ends to send unconfirmed
frames again. `server/runs/tunnels.py` opens tunnels.

Failure cases: After a restart of the server, the owner opens the tunnel again, and the node continues it. If an end
does not read, the mailbox fills up, and the server asks the other end to send the message again later. If an end is
away for an hour, or the attempt has ended, the server closes the tunnel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import AlreadyFinished, NotFound, TooManyRequests
from serverless_gpu.model.tunnel_end import Data, TunnelMessage
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import Hub, node_key
from serverless_gpu.server.http.routing import Call, Query, Routes, Stream, writing
from serverless_gpu.server.records.nodes import StoredNode
from serverless_gpu.wire.agents import OpenTunnel
from serverless_gpu.wire.tunnels import SentMessage, TunnelAnswer, TunnelView

MAILBOX_BYTES = 4 << 20
TUNNELS_MAX = 2_000
TUNNELS_OF_RUN_MAX = 32
AWAY_S = 3600.0
"""Seconds after which the server closes a tunnel with only one end."""
CLOSED_MAX = 10_000
"""Number of closed tunnels that the server remembers, so that their other end does not wait."""
_ROOM_S = 5.0
_ALIVE_S = 9.0
_FRAME_BYTES = 64


class _Mailbox:
    """Messages for one end, in memory."""

    def __init__(self, now_ns: int) -> None:
        self.messages: deque[TunnelMessage] = deque()
        self.bytes = 0
        self.reader = 0  # Number of the current reader.
        # Number of frames that the end has received; None before the end has connected to this server process.
        self.received: int | None = None
        self.sends_again = False  # True if the end must send all frames again that the other end has not received.
        self.is_read = False
        self.seen_ns = now_ns  # Boottime at which the end was last connected.

    def put(self, message: TunnelMessage) -> None:
        self.messages.append(message)
        self.bytes += _size(message)

    def take(self) -> TunnelMessage | None:
        if not self.messages:
            return None
        message = self.messages.popleft()
        self.bytes -= _size(message)
        return message

    def clear(self) -> None:
        self.messages.clear()
        self.bytes = 0


class Tunnel:
    """An open tunnel with a mailbox for each end."""

    def __init__(self, tunnel: str, run_id: str, fence: int, owner: str, node: StoredNode, now_ns: int) -> None:
        self.id = tunnel
        self.run_id = run_id
        self.fence = fence
        self.owner = owner
        self.node = node
        self.boxes = {"user": _Mailbox(now_ns), "node": _Mailbox(now_ns)}
        self.closed = False

    @property
    def key(self) -> str:
        """Return the hub key of the tunnel."""
        return f"tunnel:{self.id}"


class TunnelRelay:
    """The open tunnels. All methods run in the event loop."""

    def __init__(self, *, clock: Clock, hub: Hub) -> None:
        self._clock = clock
        self._hub = hub
        self._tunnels: dict[str, Tunnel] = {}
        self._closed: deque[str] = deque(maxlen=CLOSED_MAX)

    def open(self, who: Caller, run_id: str, tunnel: str, fence: int, node: StoredNode) -> TunnelView:
        """Open a tunnel, or return the open tunnel with this identifier."""
        self._collect()
        found = self._tunnels.get(tunnel)
        if found is None:
            of_run = sum(each.run_id == run_id for each in self._tunnels.values())
            if of_run >= TUNNELS_OF_RUN_MAX or len(self._tunnels) >= TUNNELS_MAX:
                raise TooManyRequests(
                    f"run {run_id} already has {of_run} connections", hint="close a terminal or a forwarded port"
                )
            if tunnel in self._closed:
                raise AlreadyFinished(f"the connection to run {run_id} was closed", hint="connect again")
            now_ns = self._clock.boottime_ns()
            found = self._tunnels[tunnel] = Tunnel(tunnel, run_id, fence, who.name, node, now_ns)
        elif (found.run_id, found.owner) != (run_id, who.name) or found.fence != fence:
            raise AlreadyFinished(f"the connection belongs to another attempt of run {run_id}", hint="connect again")
        self._hub.touch(node_key(node.id))
        return TunnelView(fence=found.fence, node=found.node.name)

    def wanted(self, node_id: str) -> tuple[OpenTunnel, ...]:
        """Return the tunnels to which a node has not connected yet."""
        return tuple(
            OpenTunnel(id=each.id, run_id=each.run_id, fence=each.fence)
            for each in tuple(self._tunnels.values())
            if each.node.id == node_id and not each.boxes["node"].is_read
        )

    def of_user(self, who: Caller, run_id: str, tunnel: str) -> Tunnel:
        """Return a tunnel for its owner. Raises NotFound or AlreadyFinished."""
        found = self._tunnels.get(tunnel)
        if found is not None and (found.owner, found.run_id) == (who.name, run_id):
            return found
        raise self._missing(tunnel, known=found is not None)

    def of_node(self, who: Caller, node_id: str, tunnel: str) -> Tunnel:
        """Return a tunnel for its node. Raises NotFound or AlreadyFinished."""
        found = self._tunnels.get(tunnel)
        if found is not None and found.node.id == node_id:
            node = found.node
            if (node.principal, node.token_id) == (who.name, who.token_id):
                return found
        raise self._missing(tunnel, known=found is not None)

    def _missing(self, tunnel: str, *, known: bool) -> NotFound | AlreadyFinished:
        if tunnel in self._closed and not known:
            return AlreadyFinished("the connection was closed", hint="connect again")
        return NotFound("the server does not know this connection", hint="open the connection again")

    async def messages(self, tunnel: Tunnel, side: str, received: int) -> AsyncIterator[TunnelMessage | None]:
        """Yield the messages for one end until the tunnel closes or the end connects again."""
        own, other = tunnel.boxes[side], tunnel.boxes["node" if side == "user" else "user"]
        own.reader += 1
        reader = own.reader
        own.is_read = own.sends_again = other.sends_again = True
        own.received = received
        own.clear()
        self._hub.touch(tunnel.key)
        try:
            while not (self._hub.closed or tunnel.closed or own.reader != reader):
                own.seen_ns = self._clock.boottime_ns()
                seen = self._hub.version(tunnel.key)
                if own.sends_again and other.received is not None:
                    own.sends_again = False
                    yield TunnelMessage(received=other.received, again=True)
                elif (message := own.take()) is not None:
                    if not own.messages:
                        self._hub.touch(tunnel.key)  # The other end may wait for room.
                    yield message
                elif await self._hub.changed(tunnel.key, seen, _ALIVE_S) == seen:
                    yield None
        finally:
            if own.reader == reader:
                own.is_read = False
                self._hub.touch(node_key(tunnel.node.id))

    async def put(self, tunnel: Tunnel, side: str, message: TunnelMessage) -> TunnelAnswer:
        """Give a message to the other end. Wait a short time for room."""
        box = tunnel.boxes["node" if side == "user" else "user"]
        own = tunnel.boxes[side]
        own.received = max(own.received or 0, message.received)
        until_ns = self._clock.boottime_ns() + int(_ROOM_S * 1e9)
        while box.bytes > MAILBOX_BYTES or not box.is_read:
            seen = self._hub.version(tunnel.key)
            left_s = (until_ns - self._clock.boottime_ns()) / 1e9
            if tunnel.closed or self._hub.closed or left_s <= 0:
                return TunnelAnswer(taken=False)
            await self._hub.changed(tunnel.key, seen, left_s)
        box.put(message)
        self._hub.touch(tunnel.key)
        return TunnelAnswer(taken=True)

    def close(self, tunnel: Tunnel) -> None:
        """Close a tunnel. Its other end learns about the close from its stream."""
        tunnel.closed = True
        if self._tunnels.pop(tunnel.id, None) is not None:
            self._closed.append(tunnel.id)
        self._hub.touch(tunnel.key)

    def _collect(self) -> None:
        """Close the tunnels with an end that is away for too long."""
        now_ns = self._clock.boottime_ns()
        for tunnel in tuple(self._tunnels.values()):
            if any(now_ns - box.seen_ns > AWAY_S * 1e9 and not box.is_read for box in tunnel.boxes.values()):
                self.close(tunnel)


def _size(message: TunnelMessage) -> int:
    return _FRAME_BYTES + sum(
        _FRAME_BYTES + (len(frame.data) if isinstance(frame, Data) else 0) for frame in message.frames
    )


# --- routes -----------------------------------------------------------------------------------------------------------

routes = Routes("tunnels")


class MessagesQuery(Query, frozen=True, kw_only=True):
    """Position of a reader."""

    received: Annotated[int, msgspec.Meta(ge=0)] = 0


@routes.get("/agents/{node}/tunnels/{tunnel}/messages", needs=writing("orders"))
async def read_as_node(
    call: Call, tunnel_relay: TunnelRelay, node: str, tunnel: str, query: MessagesQuery
) -> Stream[TunnelMessage]:
    """Stream the messages of the owner of a run to the run's node."""
    return Stream(tunnel_relay.messages(tunnel_relay.of_node(call.who, node, tunnel), "node", query.received))


@routes.post("/agents/{node}/tunnels/{tunnel}/messages", needs=writing("orders"))
async def write_as_node(
    call: Call, tunnel_relay: TunnelRelay, node: str, tunnel: str, body: SentMessage
) -> TunnelAnswer:
    """Give a message to the owner of a run."""
    return await tunnel_relay.put(tunnel_relay.of_node(call.who, node, tunnel), "node", body.message)


@routes.delete("/agents/{node}/tunnels/{tunnel}", needs=writing("orders"))
async def close_as_node(call: Call, tunnel_relay: TunnelRelay, node: str, tunnel: str) -> None:
    """Close a tunnel whose attempt has ended."""
    tunnel_relay.close(tunnel_relay.of_node(call.who, node, tunnel))
