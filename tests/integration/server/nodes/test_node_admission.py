"""Whose a node's token is: what a process gets that has a copy of it, and who has to say yes to a new name."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from serverless_gpu.errors import NotAllowed, NotFound
from serverless_gpu.model.access_control import (
    HelloDecision,
    HelloRefused,
    NodeIdentity,
    TokenBinding,
    judge_hello,
    second_process,
)
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.identity.bootstrap import first_tokens
from serverless_gpu.server.lifecycle.liveness import PRESENT_S
from serverless_gpu.server.nodes.agent_service import AgentService
from serverless_gpu.server.records import nodes
from serverless_gpu.server.records.principals import token_id
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Heartbeat
from tests.support.golden import golden
from tests.support.server.agents import H100, hello, placed, token_of
from tests.support.server.principals import Api
from tests.support.server.stored import add_people

HOME = NodeIdentity(name="n1", machine="m1", instance="i1")


@pytest.fixture
def api(services: Services, database: Database, clock: FakeClock) -> Iterator[Api]:
    made = Api(services, database, clock)
    with made.client:
        yield made


@pytest.fixture
def agents(services: Services) -> AgentService:
    """Return the verbs, and let a node's principal and a user exist."""
    add_people(services.database, "node", "alice")  # type: ignore[arg-type] # a Database
    return services.agents


def said(name: str = "n1", machine: str = "m1", instance: str = "i1") -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(hello(name, machine=machine, instance=instance))
    return found


# the decision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("identity", "answer"),
    [
        (HOME, HelloDecision.ADMITTED),
        (NodeIdentity(name="n2", machine="m1", instance="i1"), None),
        (NodeIdentity(name="n1", machine="m1", instance="i2"), None),
        (NodeIdentity(name="n1", machine="m1"), None),
        (NodeIdentity(name="n1", machine="m2", instance="i2"), None),
        (NodeIdentity(name="n1", machine="m2"), None),
        (NodeIdentity(name="n1", machine="m2", instance="i1"), HelloDecision.MOVED),
    ],
)
def test_22A3_a_token_is_good_for_one_name_and_one_home(identity: NodeIdentity, answer: HelloDecision | None) -> None:
    found = judge_hello(TokenBinding(node=HOME, approved=True), identity)
    assert found is answer or (answer is None and isinstance(found, HelloRefused))


def test_22A3_a_token_that_nobody_gave_to_a_node_waits() -> None:
    assert judge_hello(None, HOME) is HelloDecision.PENDING
    assert judge_hello(TokenBinding(node=HOME, approved=False), HOME) is HelloDecision.PENDING
    other = NodeIdentity(name="n2", machine="m1", instance="i1")
    assert isinstance(judge_hello(TokenBinding(node=HOME, approved=False), other), HelloRefused)
    assert judge_hello(TokenBinding(node=NodeIdentity(name="", machine=""), approved=True), HOME) is HelloDecision.BOUND


def test_22A3_a_node_that_is_upgraded_says_its_instance_from_then_on() -> None:
    before = TokenBinding(node=NodeIdentity(name="n1", machine="m1"), approved=True)
    assert judge_hello(before, HOME) is HelloDecision.BOUND
    assert isinstance(judge_hello(before, NodeIdentity(name="n1", machine="m2", instance="i1")), HelloRefused)
    assert isinstance(judge_hello(before, NodeIdentity(name="n1", machine="m2")), HelloRefused)


@pytest.mark.parametrize(
    ("before", "now", "connected", "refused"),
    [
        ("p1", "p2", True, True),
        ("p1", "", True, True),
        ("p1", "p1", True, False),
        ("p1", "p2", False, False),
        ("", "p2", True, False),  # a version that does not say which process it is
    ],
)
def test_22A3_a_second_process_is_one_that_comes_while_the_first_is_connected(
    before: str, now: str, connected: bool, refused: bool
) -> None:
    assert second_process(before, now, connected=connected) is refused


# a copied token -------------------------------------------------------------------------------------------------------


def test_22A3_a_second_node_with_a_nodes_token_gets_no_orders(services: Services, agents: AgentService) -> None:
    """As the attack went: another process of the machine, with `node.token`, under another name."""
    node = token_of(services, "node.token")
    real = agents.hello(node, hello(instance="i1"))
    for other in (hello("thief", instance="i1"), hello("thief", instance="i2"), hello(instance="i2"), hello()):
        with pytest.raises(NotAllowed, match="the token of"):
            agents.hello(node, other)
    run_id = placed(services)
    assert [order.run_id for order in agents.waiting(node, real.node, "i1")] == [run_id]
    assert [found.name for found in services.database.read(nodes.every)] == ["n1"]


def test_22A3_a_forgotten_nodes_token_is_still_its_own(services: Services, agents: AgentService) -> None:
    node = token_of(services, "node.token")
    first = agents.hello(node, hello(instance="i1")).node
    services.database.write(lambda connection: nodes.forget(connection, first, at_ns=1))
    with pytest.raises(NotAllowed, match=re.escape(golden("server.node_admission.node-n1"))):
        agents.hello(node, hello("thief", instance="i2"))
    assert agents.hello(node, hello(instance="i1")).node == first


def test_22A3_refusals_and_what_becomes_of_tokens_are_in_the_audit(api: Api) -> None:
    api.do(api.node, "POST", "/agents", said())
    for _ in range(3):
        assert api.ask(api.node, "POST", "/agents", said("thief"))[0] == 403
    actions = [action for _, action, _ in api.audited()]
    assert actions.count("node.refuse") == 1
    assert actions.count("node.bind") == actions.count("node.join") == 1


# a second process -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(services: Services, node: Caller, node_id: str, process: str) -> Iterator[None]:
    """Have the stream of orders of a process open."""
    loop = asyncio.new_event_loop()
    orders = services.agents.stream(node, node_id, "i1", process)
    try:
        assert loop.run_until_complete(asyncio.wait_for(anext(orders), 30)) is not None
        yield
    finally:
        loop.run_until_complete(orders.aclose())  # type: ignore[attr-defined]  # a generator
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def test_22A3_a_second_process_of_a_home_takes_over_only_when_the_first_is_gone(
    services: Services, agents: AgentService, clock: FakeClock
) -> None:
    node = token_of(services, "node.token")
    first, second = (hello(instance="i1", process=process) for process in ("p1", "p2"))
    node_id = agents.hello(node, first).node
    placed(services)
    with connected(services, node, node_id, "p1"):
        for thief in (second, hello(instance="i1")):
            with pytest.raises(NotAllowed, match=re.escape(golden("server.node_admission.another-process-connected"))):
                agents.hello(node, thief)
        for ask in (
            lambda: agents.waiting(node, node_id, "i1", "p2"),
            lambda: agents.check(node, node_id, "i1", "p2"),
            lambda: agents.heartbeat(node, node_id, Heartbeat(devices=H100, instance="i1", process="p2")),
        ):
            with pytest.raises(NotFound, match=re.escape(golden("server.node_admission.another-process-said"))):
                ask()
        assert agents.hello(node, first).node == node_id  # the first may say hello again
    # kill -9 closes its stream: the next process is let in at once.
    assert agents.hello(node, second).node == node_id
    with pytest.raises(NotFound, match=re.escape(golden("server.node_admission.another-process-said"))):
        agents.heartbeat(node, node_id, Heartbeat(devices=H100, instance="i1", process="p1"))


def test_22A3_a_machine_that_was_cut_off_or_has_booted_joins_again(
    services: Services, agents: AgentService, clock: FakeClock
) -> None:
    node = token_of(services, "node.token")
    node_id = agents.hello(node, hello(instance="i1", process="p1")).node
    placed(services)
    with connected(services, node, node_id, "p1"):  # nothing tells the server that the line is dead
        rebooted = hello(instance="i1", process="p2", boot="b2")
        assert agents.hello(node, rebooted).node == node_id
        clock.advance(PRESENT_S + 1)
        assert agents.hello(node, hello(instance="i1", process="p3", boot="b2")).node == node_id


# new names ------------------------------------------------------------------------------------------------------------


def test_22A3_a_new_name_waits_for_an_administrator(api: Api) -> None:
    secret = api.do(api.admin, "POST", "/tokens", {"principal": "node", "scopes": ["agent"]})["secret"]
    for _ in range(2):
        status, refused = api.ask(secret, "POST", "/agents", said("new"))
        assert (status, refused["message"]) == (403, golden("server.node_admission.node-new-waits"))
        assert refused["hint"] == golden("server.node_admission.administrator-server-sgpu")
    assert api.ask(secret, "POST", "/agents", said("other"))[0] == 403
    (waiting,) = api.do(api.user("ada"), "GET", "/nodes")["nodes"]
    assert (waiting["name"], waiting["state"]) == ("new", "PENDING")
    assert golden("server.node_admission.sgpu-node-approve") in waiting["sentence"]
    status, missing = api.ask(api.admin, "POST", "/nodes/approve", {"name": "other"})
    assert (status, missing["hint"]) == (404, golden("server.node_admission.nodes-wait-new"))
    assert api.do(api.admin, "POST", "/nodes/approve", {"name": "new"})["state"] == "APPROVED"
    assert api.do(secret, "POST", "/agents", said("new"))["node"]
    (there,) = api.do(api.admin, "GET", "/nodes")["nodes"]
    assert (there["name"], there["state"]) == ("new", "UP")
    assert api.ask(secret, "POST", "/agents", said("new", instance="i2"))[0] == 403
    assert [entry for entry in api.audited() if entry[1].startswith("node.")] == [
        ("node", "node.pending", "new"),
        ("node", "node.refuse", token_id(secret)),
        ("node", "node.refuse", token_id(secret)),
        ("root", "node.approve", "new"),
        ("node", "node.join", there["id"]),
        ("node", "node.refuse", token_id(secret)),
    ]


def test_22A3_two_that_wait_under_one_name_are_told_apart_by_their_tokens(api: Api) -> None:
    made = [api.do(api.admin, "POST", "/tokens", {"principal": "node", "scopes": ["agent"]}) for _ in range(2)]
    for number, one in enumerate(made):
        api.ask(one["secret"], "POST", "/agents", said("new", instance=f"i{number}"))
    status, refused = api.ask(api.admin, "POST", "/nodes/approve", {"name": "new"})
    assert status == 400 and made[1]["token"]["id"] in refused["hint"]
    api.do(api.admin, "POST", "/nodes/approve", {"name": made[1]["token"]["id"]})
    api.do(made[1]["secret"], "POST", "/agents", said("new", instance="i1"))
    api.do(api.admin, "DELETE", f"/tokens/{made[0]['token']['id']}")
    assert [one["state"] for one in api.do(api.admin, "GET", "/nodes")["nodes"]] == ["UP"]


def test_22A3_so_many_nodes_may_wait(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "PENDING_MAX", 1)
    for name in ("one", "two"):
        secret = api.do(api.admin, "POST", "/tokens", {"principal": "node", "scopes": ["agent"]})["secret"]
        status, refused = api.ask(secret, "POST", "/agents", said(name))
        assert status == 403
    assert golden("server.node_admission.nodes-wait-administrator") in refused["message"]


# the server's own node ------------------------------------------------------------------------------------------------


def test_22A3_the_servers_own_token_is_its_machines_and_follows_its_home(
    database: Database, tmp_path: Path, services: Services
) -> None:
    def start(node: NodeIdentity | None) -> str:
        return first_tokens(database, tmp_path / "s", login="root", now_ns=7, node=node).node_token

    secret = start(HOME)
    who = Caller(name="node", kind="service", role="agent", token_id=token_id(secret))
    agents = services.agents
    with pytest.raises(NotAllowed, match=re.escape(golden("server.node_admission.node-n1"))):
        agents.hello(who, hello("thief", instance="i2"))
    agents.hello(who, hello(instance="i1"))
    moved = NodeIdentity(name="renamed", machine="m2", instance="i1")
    assert start(moved) == start(moved) == start(None) == secret  # another machine, or a backup that was restored there
    agents.hello(who, hello("renamed", machine="m2", instance="i1"))
    assert database.read(lambda connection: nodes.find(connection, token_id(secret))) is not None
    bound = [
        row for row in database.read(lambda connection: connection.execute(sa.select(tables.audit.c.action)).all())
    ]
    assert [action for (action,) in bound].count("node.bind") == 2
