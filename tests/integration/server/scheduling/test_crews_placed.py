"""A placement on two nodes becomes an attempt with two crews, and each node is ordered to start its own."""

from __future__ import annotations

import pytest

from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.scheduling.values import DeviceShare, Placement
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.core.server_key import parse_attempt_token, sha256
from serverless_gpu.server.records import nodes
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.server.records.nodes import by_id
from serverless_gpu.wire.agents import Start
from serverless_gpu.wire.nodes import PoolRequest
from tests.support.server.agents import ADMIN, NODE, find, hello, submit
from tests.support.server.stored import add_people


@pytest.fixture
def there(services: Services) -> tuple[str, str]:
    """Return two nodes that have joined."""
    add_people(services.database, "node", "alice")  # type: ignore[arg-type] # a Database
    agents = services.agents
    first, second = (hello(name, machine=name, takes=("crews",)) for name in ("n1", "n2"))
    return agents.hello(NODE, first).node, agents.hello(NODE, second).node


def share(node_id: str, count: int) -> DeviceShare:
    return DeviceShare(node_id=node_id, gpu_type="H100", count=count)


def placed(services: Services, *shares: DeviceShare) -> StoredAttempt | None:
    """Place a run as a planner would that places gangs on several nodes; return its attempt."""
    run_id = submit(services, sum(share.count for share in shares))
    stored = by_id(services.database.read(nodes.every))
    make_scheduler(services)._place([Placement(run_id=run_id, shares=shares)], stored)
    return find(services, run_id).attempt


def test_each_node_is_ordered_to_start_its_crew(services: Services, there: tuple[str, str]) -> None:
    first, second = there
    attempt = placed(services, share(first, 1), share(second, 2))
    assert attempt is not None and (attempt.state, attempt.world_size) == (State.STARTING, 3)
    assert [(crew.node, crew.first_rank, crew.gpus) for crew in attempt.crews] == [("n2", 0, 2), ("n1", 2, 1)]
    assert services.leases.count() == 2
    for number, node_id in enumerate((second, first)):
        (order,) = services.agents.waiting(NODE, node_id)
        assert isinstance(order, Start)
        assert (order.crew, order.gpus, order.world_size) == (number, attempt.crews[number].gpus, 3)
        assert order.crews == tuple(crew.place for crew in attempt.crews)
        assert parse_attempt_token(order.token) == (attempt.run_id, 1, number)
        assert sha256(order.token) == attempt.crews[number].token_sha256


def test_one_of_two_nodes_restarted_between_plan_and_intent(services: Services, there: tuple[str, str]) -> None:
    first, second = there
    before = by_id(services.database.read(nodes.every))
    services.agents.hello(NODE, hello("n2", machine="n2", boot="b2", takes=("crews",)))
    run_id = submit(services, 2)
    shares = (share(first, 1), share(second, 1))
    make_scheduler(services)._place([Placement(run_id=run_id, shares=shares)], before)
    run = find(services, run_id)
    assert run.state is State.QUEUED and run.attempt is None


@pytest.mark.parametrize("change", ["another pool", "another version"])
def test_one_of_two_nodes_is_no_part_of_a_gang_any_more(
    services: Services, there: tuple[str, str], change: str
) -> None:
    if change == "another pool":
        services.pools.put(ADMIN, "other", PoolRequest(kind="on-demand", nodes=("n2",)))
    else:
        services.agents.hello(NODE, hello("n2", machine="n2"))
    assert placed(services, share(there[0], 1), share(there[1], 1)) is None


def test_a_restart_of_one_node_is_the_end_of_its_crew(services: Services, there: tuple[str, str]) -> None:
    first, second = there
    attempt = placed(services, share(first, 1), share(second, 2))
    assert attempt is not None
    services.agents.waiting(NODE, first)  # its order leaves the server
    services.agents.hello(NODE, hello("n2", machine="n2", boot="b2", takes=("crews",)))
    now = find(services, attempt.run_id).attempt
    assert now is not None and [crew.node for crew in now.open_crews] == ["n1"]
    assert services.looks.of(first) == ((attempt.run_id, 1, 1),)
    assert services.agents.waiting(NODE, second) == []
