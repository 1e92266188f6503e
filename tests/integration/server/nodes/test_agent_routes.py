"""Routes of nodes over a real connection: who may use them, and an order on its way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.ambient import new_run_id
from serverless_gpu.errors import InvalidValue, NotAllowed, NotFound
from serverless_gpu.model.spec import Resources, RunSpec
from serverless_gpu.wire.access import TokenMade, TokenRequest
from serverless_gpu.wire.agents import AgentWelcome, Heartbeat, HeartbeatAnswer, Order, OrdersTaken, Start
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.nodes import ForgetRequest, NodeList, NodeView, PoolList, PoolRequest, PoolView
from serverless_gpu.wire.runs import RunRequest, RunView, Target
from tests.support.server.agents import H100, hello
from tests.support.server.served import Served, served


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    """Yield a server without a node."""
    with served(tmp_path) as server:
        yield server


def submit(admin: Connection) -> str:
    """Ask for a run on one H100."""
    asked = RunRequest(
        id=new_run_id(),
        spec=RunSpec(remote=True, resources=Resources(gpus=1, gpu_type="H100")),
        target=Target(machine="m1", python="3.11", platform="linux-x86_64"),
        context=msgspec.Raw(b"{}"),
        call=b"call",
    )
    return admin.ask("POST", "/runs", asked, answer=RunView).id


@pytest.fixture
def node(server: Served) -> Connection:
    """Return a connection with the token of an agent."""
    return server.connection(server.node_token)


def test_a_node_joins_hears_of_a_run_and_says_that_it_took_it(server: Served, node: Connection) -> None:
    admin = server.connection()
    welcome = node.ask("POST", "/agents", hello(), answer=AgentWelcome)
    path = f"/agents/{welcome.node}"
    assert node.ask("POST", f"{path}/heartbeat", Heartbeat(devices=H100), answer=HeartbeatAnswer).stale == ()
    orders = node.stream("GET", f"{path}/orders", answer=Order)
    run_id = submit(admin)
    order = next(orders)
    assert isinstance(order, Start)
    assert (order.run_id, order.fence, order.world_size) == (run_id, 1, 1)
    node.ask("POST", f"{path}/orders/ack", OrdersTaken(seqs=(order.seq,)), answer=type(None))
    assert node.ask("POST", "/agents", hello(), answer=AgentWelcome).node == welcome.node
    (seen,) = admin.ask("GET", "/nodes", answer=NodeList).nodes
    assert (seen.name, seen.state, seen.busy, seen.runs) == ("n1", "UP", 1, (run_id,))
    (pool,) = admin.ask("GET", "/pools", answer=PoolList).pools
    assert (pool.name, pool.total, pool.free) == ("default", {"H100": 8}, {"H100": 7})


def test_the_orders_of_a_node_need_a_token_that_may_take_them(server: Served, node: Connection) -> None:
    welcome = node.ask("POST", "/agents", hello(), answer=AgentWelcome)
    asked = TokenRequest(principal="node", scopes=("read",))
    reader = server.connection(server.connection().ask("POST", "/tokens", asked, answer=TokenMade).secret)
    for somebody in (reader, server.connection()):
        with pytest.raises(NotAllowed, match="orders"):
            next(somebody.stream("GET", f"/agents/{welcome.node}/orders", answer=Order))


def test_people_are_no_nodes_and_nodes_are_no_people(server: Served, node: Connection) -> None:
    for method, path in (("GET", "/nodes"), ("GET", "/pools"), ("GET", "/runs"), ("GET", "/users")):
        with pytest.raises(NotAllowed):
            node.ask(method, path, answer=NodeList)
    with pytest.raises(NotAllowed):
        node.ask("POST", "/nodes/n1/forget", ForgetRequest(i_know_it_is_dead=True), answer=NodeView)


def test_orders_of_a_node_that_is_not_there_are_refused_before_a_stream_begins(node: Connection) -> None:
    with pytest.raises(NotFound):
        next(node.stream("GET", "/agents/nobody/orders", answer=Order))


def test_an_operator_forgets_a_node_and_moves_others(server: Served, node: Connection) -> None:
    admin = server.connection()
    node.ask("POST", "/agents", hello(), answer=AgentWelcome)
    view = admin.ask("PUT", "/pools/research", PoolRequest(kind="reserved", nodes=("n1",)), answer=PoolView)
    assert (view.kind, view.nodes) == ("reserved", ("n1",))
    with pytest.raises(InvalidValue):
        admin.ask("POST", "/nodes/n1/forget", ForgetRequest(i_know_it_is_dead=False), answer=NodeView)
    gone = admin.ask("POST", "/nodes/n1/forget", ForgetRequest(i_know_it_is_dead=True), answer=NodeView)
    assert gone.state == "GONE"
    assert admin.ask("GET", "/nodes", answer=NodeList).nodes == ()
