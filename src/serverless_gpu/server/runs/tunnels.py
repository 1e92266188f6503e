"""Opens tunnels from the owner of a run to the run's attempt.

    owner ── PUT ──▶ TunnelService: owner? running? ──▶ audit log ──▶ TunnelRelay ──▶ `OpenTunnel` to the node

Only the owner of the run may open or use a tunnel, because the program of a tunnel has the run's environment variables
and secrets. Administrators may not. The audit log records each opened tunnel. `server/nodes/tunnel_relay.py` passes the
messages.
"""

from __future__ import annotations

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import AlreadyFinished, InvalidValue, NotAllowed
from serverless_gpu.model.lifecycle.attempt import TERMINAL, State
from serverless_gpu.model.tunnel_end import TunnelMessage
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Routes, Stream, reading, writing
from serverless_gpu.server.nodes.tunnel_relay import MessagesQuery, TunnelRelay
from serverless_gpu.server.records import audit, crews, nodes
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.nodes import StoredNode
from serverless_gpu.server.runs import run_views
from serverless_gpu.wire.tunnels import TUNNELS, SentMessage, TunnelAnswer, TunnelRequest, TunnelView


class TunnelService:
    """Finds the attempt to which a tunnel leads."""

    def __init__(self, *, clock: Clock, database: Transactions) -> None:
        self._clock = clock
        self._database = database

    def find_target(self, who: Caller, reach: str, run_id: str, tunnel: str) -> tuple[int, StoredNode]:
        """Return the fence and the node of a run's current attempt, and record the tunnel in the audit log.

        Raises:
            NotFound: the caller may not see the run.
            NotAllowed: the run belongs to another principal.
            AlreadyFinished: the run has ended.
            InvalidValue: the run has not started yet, or its node does not support tunnels.
        """
        at_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> tuple[int, StoredNode]:
            run = run_views.visible(connection, run_id, who=who, reach=reach)
            if run.owner != who.name:
                raise NotAllowed(
                    f"only {run.owner} may connect to run {run_id}",
                    hint="a connection has the run's environment variables and secrets. Ask the owner",
                )
            if run.state in TERMINAL:
                raise AlreadyFinished(f"run {run_id} has ended", hint=f"show the run with `sgpu show {run_id}`")
            first = crews.find(connection, run_id, run.fence, 0)
            if run.state is not State.RUNNING or first is None:
                raise InvalidValue(f"run {run_id} is {run.state}", hint="connect once the run is RUNNING")
            node = nodes.get(connection, first.node_id)
            if node is None or TUNNELS not in node.hello.takes:
                raise InvalidValue(
                    f"the node of run {run_id} has no tunnels", hint="upgrade serverless-gpu on the node"
                )
            detail = {"tunnel": tunnel, "node": node.name}
            audit.record(connection, who=who, action=Action.TUNNEL_OPEN, subject=run_id, now_ns=at_ns, detail=detail)
            return run.fence, node

        return self._database.write(work)


# --- routes -----------------------------------------------------------------------------------------------------------

routes = Routes("tunnels")


@routes.put("/runs/{run}/tunnels/{tunnel}", needs=writing("runs"))
async def open_tunnel(
    call: Call, tunnels: TunnelService, tunnel_relay: TunnelRelay, run: str, tunnel: str, body: TunnelRequest
) -> TunnelView:
    """Open a connection to the current attempt of an own run. Open it again after a server restart."""
    fence, node = await call.in_thread(lambda: tunnels.find_target(call.who, call.reach, run, tunnel))
    return tunnel_relay.open(call.who, run, tunnel, fence, node)


@routes.get("/runs/{run}/tunnels/{tunnel}/messages", needs=reading("runs"))
async def read_as_user(
    call: Call, tunnel_relay: TunnelRelay, run: str, tunnel: str, query: MessagesQuery
) -> Stream[TunnelMessage]:
    """Stream the messages of the attempt to the owner of the run."""
    return Stream(tunnel_relay.messages(tunnel_relay.of_user(call.who, run, tunnel), "user", query.received))


@routes.post("/runs/{run}/tunnels/{tunnel}/messages", needs=writing("runs"))
async def write_as_user(
    call: Call, tunnel_relay: TunnelRelay, run: str, tunnel: str, body: SentMessage
) -> TunnelAnswer:
    """Give a message to the attempt."""
    return await tunnel_relay.put(tunnel_relay.of_user(call.who, run, tunnel), "user", body.message)


@routes.delete("/runs/{run}/tunnels/{tunnel}", needs=writing("runs"))
async def close_as_user(call: Call, tunnel_relay: TunnelRelay, run: str, tunnel: str) -> None:
    """Close a connection to an attempt."""
    tunnel_relay.close(tunnel_relay.of_user(call.who, run, tunnel))
