"""Nodes and pools as people see and change them."""

from __future__ import annotations

import pytest

from serverless_gpu.ambient import format_clock
from serverless_gpu.errors import InvalidValue, NotFound
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.nodes.agent_service import AgentService
from serverless_gpu.server.records import audit
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Heartbeat
from serverless_gpu.wire.nodes import PoolRequest, PoolView
from tests.support.golden import golden
from tests.support.server.agents import H100, NODE, find, hello, submit
from tests.support.server.stored import add_people

pytestmark = pytest.mark.any_database

ADMIN = Caller(name="root", role="admin", token_id="t")


@pytest.fixture
def agents(services: Services) -> AgentService:
    """Return the verbs, and let people exist."""
    add_people(services.database, "node", "alice", "root")  # type: ignore[arg-type] # the fixture's is a Database
    return services.agents


def placed(services: Services) -> str:
    run_id = submit(services, 3)
    make_scheduler(services).tick(services.clock.boottime_ns())
    return run_id


def test_a_node_is_up_then_silent_then_gone(services: Services, agents: AgentService, clock: FakeClock) -> None:
    node_id = agents.hello(NODE, hello()).node
    run_id = placed(services)
    (node,) = services.nodes.view_nodes()
    assert (node.id, node.state, node.sentence, node.busy, node.runs) == (node_id, "UP", "", 3, (run_id,))
    since = format_clock(clock.wall_ns())
    clock.advance(30)
    (node,) = services.nodes.view_nodes()
    assert (node.state, node.sentence) == ("SILENT", golden("server.operating.been-heard-since", since=since))
    clock.advance(960)
    assert services.nodes.view_nodes()[0].state == "GONE"


def test_a_pool_counts_what_there_is_and_what_is_free(services: Services, agents: AgentService) -> None:
    services.pools.put(ADMIN, "research", PoolRequest(kind="on-demand"))
    node_id = agents.hello(NODE, hello(pool="research")).node
    placed(services)
    agents.heartbeat(NODE, node_id, Heartbeat(devices=H100, unavailable=("FAKE-H100-7",)))
    (pool,) = services.nodes.view_pools()
    assert pool == PoolView(
        name="research",
        kind="on-demand",
        nodes=("n1",),
        total={"H100": 8},
        free={"H100": 4},
        queued=0,
        isolation="none",
    )


def test_a_run_that_names_no_pool_waits_for_every_on_demand_pool(services: Services, agents: AgentService) -> None:
    agents.hello(NODE, hello())
    services.pools.put(ADMIN, "research", PoolRequest(kind="reserved"))
    submit(services, 64)
    assert [(pool.name, pool.queued) for pool in services.nodes.view_pools()] == [("default", 1), ("research", 0)]


def test_a_pool_is_made_changed_and_given_nodes_and_that_is_written_down(
    services: Services, agents: AgentService
) -> None:
    agents.hello(NODE, hello())
    view = services.pools.put(ADMIN, "research", PoolRequest(kind="reserved", nodes=("n1",)))
    assert (view.kind, view.nodes) == ("reserved", ("n1",))
    run_id = submit(services)
    make_scheduler(services).tick(services.clock.boottime_ns())
    sentence = "every node is in a reserved pool, which the run must name: research"
    assert services.sentences.of(run_id).startswith(f"{sentence}; the run waits for a suitable node until ")
    view = services.pools.put(ADMIN, "research", PoolRequest())
    assert (view.kind, view.nodes) == ("reserved", ("n1",))  # what is not said stays as it is
    view = services.pools.put(ADMIN, "research", PoolRequest(kind="on-demand"))
    assert view.kind == "on-demand"
    make_scheduler(services).tick(services.clock.boottime_ns())
    assert find(services, run_id).state is State.STARTING
    _, *written = services.database.read(audit.entries)
    said = [(entry.action, entry.subject, entry.principal) for entry in written]
    assert said == [("pool.put", "research", "root")] * 3


@pytest.mark.parametrize(
    ("name", "asked", "error"),
    [
        ("", PoolRequest(), InvalidValue),
        ("a\nb", PoolRequest(), InvalidValue),
        ("p", PoolRequest(kind="spot"), InvalidValue),
        ("p", PoolRequest(nodes=("n9",)), NotFound),
    ],
)
def test_a_pool_that_cannot_be_is_refused_and_nothing_of_it_is_there(
    services: Services, agents: AgentService, name: str, asked: PoolRequest, error: type[Exception]
) -> None:
    with pytest.raises(error):
        services.pools.put(ADMIN, name, asked)
    assert services.nodes.view_pools() == []


def test_F22_a_node_that_an_operator_knows_to_be_dead_is_given_up_at_once_and_that_is_written_down(
    services: Services, agents: AgentService
) -> None:
    node_id = agents.hello(NODE, hello()).node
    run_id = placed(services)
    agents.waiting(NODE, node_id)  # its order leaves the server
    with pytest.raises(InvalidValue, match="would run twice"):
        services.nodes.forget(ADMIN, "n1", known_dead=False)
    view = services.nodes.forget(ADMIN, "n1", known_dead=True)
    assert (view.state, view.sentence) == ("GONE", golden("server.operating.given-up-root"))
    run = find(services, run_id)
    assert (run.state, run.reason) == (State.LOST, Reason.NODE_GONE)
    assert services.nodes.view_nodes() == []
    joined, entry = services.database.read(audit.entries)
    assert (joined.action, joined.principal) == ("node.join", "node")
    assert (entry.action, entry.detail) == ("node.forget", {"name": "n1", "runs": [run_id]})
    with pytest.raises(NotFound):
        services.nodes.forget(ADMIN, "n1", known_dead=True)


def test_a_forgotten_node_that_comes_back_is_a_node_again(services: Services, agents: AgentService) -> None:
    node_id = agents.hello(NODE, hello()).node
    services.nodes.forget(ADMIN, node_id, known_dead=True)
    with pytest.raises(NotFound):
        agents.heartbeat(NODE, node_id, Heartbeat(devices=H100))
    assert agents.hello(NODE, hello()).node == node_id
    assert services.nodes.view_nodes()[0].state == "UP"
