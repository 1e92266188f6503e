"""The canary of a node: its request, the order to the node, and the last report."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from serverless_gpu.engines.base import EngineNode
from serverless_gpu.errors import InvalidValue, NotFound
from serverless_gpu.model.canary import CanaryReport
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.nodes.canaries import ANSWERED_S, CANARY, CanaryService
from serverless_gpu.server.records import audit
from serverless_gpu.server.records.audit import Action
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import AgentHello, CanaryResult, RunCanary, StreamedOrder
from serverless_gpu.wire.nodes import PoolRequest
from tests.support.server.agents import NODE, OTHER, hello
from tests.support.server.made import recomposed
from tests.support.server.stored import add_people

ADMIN = Caller(name="root", role="admin", token_id="t")
REPORT = CanaryReport(node="what the node says", level="sandbox", at_ns=7, version="1")


@pytest.fixture
def node_id(services: Services) -> str:
    """Return the identifier of a node that can run the canary."""
    add_people(services.database, "node", "other", "root")  # type: ignore[arg-type] # the fixture's is a Database
    return services.agents.hello(NODE, with_canary()).node


def with_canary() -> AgentHello:
    return hello(takes=(CANARY,))


def finished(canaries: CanaryService, node_id: str, request: str) -> None:
    canaries.finish(NODE, node_id, CanaryResult(id=request, report=REPORT))


def test_a_request_becomes_an_order_and_the_answer_becomes_the_last_report(services: Services, node_id: str) -> None:
    canaries = services.canaries
    services.pools.put(ADMIN, "default", PoolRequest(isolation="sandbox"))
    asked = canaries.start(ADMIN, "n1")
    order = canaries.of(node_id)
    assert order is not None and (order.id, order.isolation) == (asked.id, "sandbox")
    assert canaries.view("n1") == asked, "no report yet"
    finished(canaries, node_id, asked.id)
    view = canaries.view(node_id)
    assert (view.id, view.report) == (asked.id, msgspec.structs.replace(REPORT, node="n1"))
    assert canaries.of(node_id) is None
    entries = services.database.read(lambda connection: audit.entries(connection))
    found = [entry for entry in entries if entry.action == Action.NODE_CANARY]
    assert [(entry.principal, entry.subject) for entry in found] == [("root", node_id)]


RAY = {"n1": "10.0.0.1:7901", "n2": "10.0.0.2:7901"}


def test_an_order_names_ray_on_the_own_and_on_other_nodes_and_the_other_nodes(services: Services, node_id: str) -> None:
    engine_nodes = [
        EngineNode(name=name, endpoints=(place, place.replace("7901", "7902"))) for name, place in RAY.items()
    ]
    services = recomposed(services, engine_nodes=lambda: engine_nodes)
    addresses = ("10.0.0.1", "172.16.0.1")
    services.agents.hello(NODE, msgspec.structs.replace(with_canary(), addresses=addresses))
    other = hello("n2", takes=(CANARY,), addresses=("10.0.0.2", "fd00::2", "172.16.0.1"))
    services.agents.hello(OTHER, other)
    services.canaries.start(ADMIN, "n1")
    order = services.canaries.of(node_id)
    assert order is not None
    assert order.services == {
        "ray_port": "10.0.0.1:7901,10.0.0.1:7902",
        "other_ray_port": "10.0.0.2:7901,10.0.0.2:7902",
        "other_node_port": "10.0.0.2:22,[fd00::2]:22",
    }


def test_a_pool_closes_the_addresses_of_an_engine_except_loopback(services: Services, node_id: str) -> None:
    places = ("10.9.0.1:7901", "127.0.0.2:7901", "[fd00::9]:7901", "a name:1")
    services = recomposed(services, engine_nodes=lambda: [EngineNode(name="n1", endpoints=places)])
    services.pools.put(ADMIN, "default", PoolRequest(isolation="sandbox"))
    services.canaries.start(ADMIN, "n1")
    order = services.canaries.of(node_id)
    assert order is not None and order.egress is not None
    assert {"10.9.0.1", "fd00::9"} <= set(order.egress.closed)
    assert not [each for each in order.egress.closed if "127." in each or "name" in each]


def test_a_second_request_joins_the_running_canary_until_the_node_is_late(
    services: Services, node_id: str, clock: FakeClock
) -> None:
    first = services.canaries.start(ADMIN, "n1")
    assert services.canaries.start(ADMIN, "n1") == first
    clock.advance(ANSWERED_S + 1)
    services.agents.hello(NODE, with_canary())
    second = services.canaries.start(ADMIN, "n1")
    assert second != first
    finished(services.canaries, node_id, first.id)
    assert services.canaries.view("n1").report is None, "the answer to the first request is late"


def test_only_the_node_itself_reports_about_its_canary(services: Services, node_id: str) -> None:
    asked = services.canaries.start(ADMIN, "n1")
    with pytest.raises(NotFound, match="has no node"):
        services.canaries.finish(OTHER, node_id, CanaryResult(id=asked.id, report=REPORT))
    assert services.canaries.view("n1").report is None


def test_a_canary_needs_a_connected_node_of_this_version(services: Services, node_id: str, clock: FakeClock) -> None:
    with pytest.raises(NotFound, match="report about n1"):
        services.canaries.view("n1")
    services.agents.hello(NODE, hello("n2", machine="m2"))
    with pytest.raises(InvalidValue, match="an old version"):
        services.canaries.start(ADMIN, "n2")
    clock.advance(120)
    with pytest.raises(InvalidValue, match="is not connected"):
        services.canaries.start(ADMIN, "n1")
    with pytest.raises(NotFound, match="no node 'n3'"):
        services.canaries.start(ADMIN, "n3")


def test_the_stream_of_a_node_carries_each_request_once(services: Services, node_id: str) -> None:
    async def watch() -> list[StreamedOrder]:
        heard: list[StreamedOrder] = []
        async for order in services.agents.stream(NODE, node_id):
            heard += [] if order is None else [order]
            if len(heard) == 1:
                finished(services.canaries, node_id, services.canaries.start(ADMIN, "n1").id)
                services.canaries.start(ADMIN, "n1")
            elif len(heard) == 2:
                services.hub.close()
        return heard

    first = services.canaries.start(ADMIN, "n1")
    heard = asyncio.run(asyncio.wait_for(watch(), 30))
    assert [type(order) for order in heard] == [RunCanary, RunCanary]
    assert isinstance(heard[0], RunCanary) and heard[0].id == first.id
    assert heard[0] != heard[1]
