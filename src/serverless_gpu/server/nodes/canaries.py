"""Starts the canary on a node, and keeps each node's last report in memory.

    POST /nodes/{node}/canary ─▶ request ─▶ order stream of the node ─▶ the node runs the canary
    GET  /nodes/{node}/canary ◀─ last report ◀─ POST /agents/{node}/canary ◀─┘

The order names targets that only the server knows: its database, Ray on all nodes, and the other nodes.

A restart of the server forgets requests and reports. The node runs a repeated request only once. A report does not
change scheduling decisions.

Failure cases: If the node does not answer within ten minutes, another request may start. A report for an unknown
request, for example after a restart, replaces no other report.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from urllib.parse import urlsplit

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock, new_run_id
from serverless_gpu.engines.base import EngineNode
from serverless_gpu.engines.ray.start_arguments import joined
from serverless_gpu.errors import InvalidValue, NotFound
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import Hub, node_key
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Routes, writing
from serverless_gpu.server.lifecycle.liveness import Presence
from serverless_gpu.server.nodes.egress_policies import EgressPolicies
from serverless_gpu.server.nodes.node_admission import find_node
from serverless_gpu.server.records import audit, nodes, pools
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.nodes import StoredNode
from serverless_gpu.wire.agents import CanaryResult, RunCanary
from serverless_gpu.wire.canary import CanaryRequest, CanaryView
from serverless_gpu.wire.nodes import RayPool

CANARY = "canary"
"""Capability of nodes that can run the canary."""
ANSWERED_S = 600.0
_POSTGRESQL_PORT, _SSH_PORT = 5432, 22
_TARGETS_MAX = 64
"""Most addresses of one attempt. The node tries all of them at once."""


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    order: RunCanary
    asked_ns: int  # Boottime of the request.


class CanaryService:
    """Stores the requested canaries and the last report of each node."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        hub: Hub,
        presence: Presence,
        ray_pool: Callable[[], RayPool | None],
        egress_policies: EgressPolicies,
        engine_nodes: Callable[[], Collection[EngineNode]] = tuple,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._hub = hub
        self._presence = presence
        self._ray_pool = ray_pool
        self._egress_policies = egress_policies
        self._engine_nodes = engine_nodes
        self._lock = threading.Lock()
        self._requests: dict[str, _Request] = {}
        self._reports: dict[str, CanaryView] = {}

    def start(self, who: Caller, name: str) -> CanaryView:
        """Request a canary at the isolation level of the node's pool. A running canary continues."""
        at_ns, now_ns = self._clock.wall_ns(), self._clock.boottime_ns()
        request_id = new_run_id()

        def work(connection: sa.Connection) -> tuple[str, RunCanary]:
            node = find_node(connection, name)
            if CANARY not in node.hello.takes:
                raise InvalidValue(f"{node.name} runs an old version without a canary", hint="upgrade the node")
            if not self._presence.is_there(node.id, now_ns=now_ns):
                raise InvalidValue(f"{node.name} is not connected to the server", hint="start the node, then try again")
            level = pools.level(connection, node.pool)
            detail = {"name": node.name, "isolation": level}
            audit.record(connection, who=who, action=Action.NODE_CANARY, subject=node.id, now_ns=at_ns, detail=detail)
            egress = self._egress_policies.of(connection, node.pool)
            services = self._services(node, nodes.every(connection))
            return node.id, RunCanary(id=request_id, isolation=level, services=services, egress=egress)

        node_id, order = self._database.write(work)
        with self._lock:
            running = self._requests.get(node_id)
            if running is None or now_ns - running.asked_ns > ANSWERED_S * 1e9:
                running = self._requests[node_id] = _Request(order=order, asked_ns=now_ns)
        self._hub.touch(node_key(node_id))
        return CanaryView(id=running.order.id)

    def view(self, name: str) -> CanaryView:
        """Return the last report about a node, or the request that the node has not answered yet."""
        node = self._database.read(lambda connection: find_node(connection, name))
        with self._lock:
            running, report = self._requests.get(node.id), self._reports.get(node.id)
        if running is not None:
            return CanaryView(id=running.order.id)
        if report is None:
            raise NotFound(
                f"the server has no canary report about {node.name}", hint=f"start one: sgpu node canary {node.name}"
            )
        return report

    def of(self, node_id: str) -> RunCanary | None:
        """Return the request that a node has not answered yet."""
        with self._lock:
            running = self._requests.get(node_id)
        return None if running is None else running.order

    def finish(self, who: Caller, node_id: str, said: CanaryResult) -> None:
        """Store the report of a node's canary. Ignore the answer to an unknown request."""
        node = self._database.read(lambda connection: nodes.get(connection, node_id))
        if node is None or node.principal != who.name or node.token_id != who.token_id:
            raise NotFound(f"{who.name} has no node {node_id!r}", hint="the agent must send its hello again")
        with self._lock:
            running = self._requests.get(node_id)
            if running is None or running.order.id != said.id:
                return
            del self._requests[node_id]
            report = msgspec.structs.replace(said.report, node=node.name)
            self._reports[node_id] = CanaryView(id=said.id, report=report)

    def _services(self, node: StoredNode, known: Sequence[StoredNode]) -> dict[str, str]:
        """Return the network addresses that only the server knows, as targets of a node's canary."""
        url, ray = urlsplit(self._settings.database), self._ray_pool()
        engine_nodes = self._engine_nodes()
        own_ray = [place for each in engine_nodes if each.name == node.name for place in each.endpoints]
        other_ray = [place for each in engine_nodes if each.name != node.name for place in each.endpoints]
        own = set(node.hello.addresses)
        others = [address for each in known if each.id != node.id for address in each.hello.addresses]
        found = {
            "database_port": [f"{url.hostname}:{url.port or _POSTGRESQL_PORT}"] if url.hostname else [],
            "ray_port": [*([ray.address] if ray is not None else []), *own_ray],
            "other_ray_port": other_ray,
            "other_node_port": [joined(address, _SSH_PORT) for address in others if address not in own],
        }
        return {name: ",".join(places[:_TARGETS_MAX]) for name, places in found.items() if places}


# --- routes -----------------------------------------------------------------------------------------------------------

routes = Routes("canaries")


@routes.post("/nodes/{node}/canary", needs=writing("nodes"))
def start_canary(call: Call, canaries: CanaryService, node: str, body: CanaryRequest) -> CanaryView:
    """Run the canary on a node, which tries to break out of a run."""
    return canaries.start(call.who, node)


@routes.get("/nodes/{node}/canary", needs=writing("nodes"))
def view_canary(call: Call, canaries: CanaryService, node: str) -> CanaryView:
    """Return the last report of a node's canary. Weaknesses are visible only with write access."""
    return canaries.view(node)


@routes.post("/agents/{node}/canary", needs=writing("orders"))
def finish_canary(call: Call, canaries: CanaryService, node: str, body: CanaryResult) -> None:
    """Store the report of a node's canary."""
    canaries.finish(call.who, node, body)
