"""Keys of nodes on a server: what a stolen token is good for, and how a node gets, replaces and loses its key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.errors import NotAuthenticated
from serverless_gpu.model.access_control import NodeIdentity
from serverless_gpu.model.node_keys import order_text
from serverless_gpu.node.uplink.node_key_file import PrivateKeys
from serverless_gpu.server.composition import Services, api_routes
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.http.routing import PROOF, PUBLIC
from serverless_gpu.server.identity.bootstrap import first_tokens
from serverless_gpu.server.lifecycle.liveness import PRESENT_S
from serverless_gpu.server.nodes.node_sessions import LIFETIME_S
from serverless_gpu.server.records import nodes
from serverless_gpu.server.records.principals import token_id
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import PrivatePart, Start
from serverless_gpu.wire.nodes import RayPool
from tests.support.server.agents import hello, placed
from tests.support.server.keyed_nodes import KeyedNode
from tests.support.server.made import recomposed
from tests.support.server.principals import Api
from tests.support.server.stored import add_people

POOL = RayPool(address="10.0.0.5:7900", port=7900, token="f" * 64, version="2.60.0", python="3.11.7")


@pytest.fixture
def api(services: Services, database: Database, clock: FakeClock) -> Iterator[Api]:
    made = Api(recomposed(services, ray_pool=lambda: POOL), database, clock)
    with made.client:
        yield made


@pytest.fixture
def node(api: Api) -> KeyedNode:
    """Return the server's own node, which has not said hello yet."""
    return KeyedNode(api, api.node)


def bound_key(api: Api) -> str:
    found = api.database.read(lambda connection: nodes.find(connection, token_id(api.node)))
    assert found is not None
    return found.node.key


# a stolen token -------------------------------------------------------------------------------------------------------


def test_27_7_a_nodes_token_without_its_key_is_good_for_no_route(api: Api, node: KeyedNode) -> None:
    node_id = node.joined()
    for route in api_routes():
        if route.needs in (PUBLIC, PROOF):
            continue
        path = route.path.replace("{node}", node_id)
        status, said = api.ask(api.node, route.method, path)
        assert (status, said["code"]) == (401, "not_authenticated"), route.path
    assert api.ask(api.node, "POST", "/agents", msgspec.to_builtins(hello(instance="i1")))[0] == 401
    assert node.beat(node_id)[0] == 200


def test_27_7_a_stolen_token_opens_no_session_with_another_key(api: Api, node: KeyedNode) -> None:
    node.joined()
    thief = KeyedNode(api, api.node)
    for _ in range(2):
        status, said = thief.open()
        assert status == 403 and "with another key" in said["message"]
        assert "sgpu node invite" in said["hint"]
    assert [entry[1] for entry in api.audited()].count("node.refuse") == 1
    forged = {**thief.request(), "keys": node.public()}
    status, said = api.ask(api.node, "POST", "/agents/session", forged)
    assert status == 403 and "signature" in said["message"]


def test_27_7_a_recorded_request_for_a_session_is_refused(api: Api, node: KeyedNode) -> None:
    recorded = node.request()
    assert api.ask(api.node, "POST", "/agents/session", recorded)[0] == 200
    status, said = api.ask(api.node, "POST", "/agents/session", recorded)
    assert status == 403 and "used before" in said["message"]
    other = api.do(api.admin, "POST", "/tokens", {"principal": "node", "scopes": ["agent"]})["secret"]
    assert api.ask(other, "POST", "/agents/session", node.request())[0] == 403  # nor with another token
    api.clock.advance(LIFETIME_S + 1)
    assert node.open()[0] == 200


def test_27_7_a_session_ends_and_the_server_forgets_no_key(api: Api, node: KeyedNode, clock: FakeClock) -> None:
    node_id = node.joined()
    clock.advance(LIFETIME_S + 1)
    assert node.beat(node_id)[0] == 401
    assert node.open()[0] == 200
    assert node.beat(node_id)[0] == 200
    assert bound_key(api) == node.keys.public.fingerprint


def test_27_7_a_hello_names_the_key_of_its_session(api: Api, node: KeyedNode) -> None:
    node.open()
    for keys in (None, PrivateKeys.generate().public):
        body = msgspec.to_builtins(msgspec.structs.replace(hello(instance="i1"), keys=keys))
        status, said = api.ask(node.session, "POST", "/agents", body)
        assert status == 403 and "of its session" in said["message"]
    body = msgspec.to_builtins(msgspec.structs.replace(hello(instance="i1"), keys=node.keys.public))
    assert api.ask(api.node, "POST", "/agents", body)[0] == 403  # a key that nobody has proven
    assert bound_key(api) == ""


# earlier nodes, and other machines ------------------------------------------------------------------------------------


def test_27_7_a_node_of_an_earlier_version_works_until_it_has_a_key(api: Api, node: KeyedNode) -> None:
    body = msgspec.to_builtins(hello(instance="i1"))
    node_id = api.do(api.node, "POST", "/agents", body)["node"]
    assert api.ask(api.node, "POST", f"/agents/{node_id}/heartbeat", {"devices": []})[0] == 200
    (view,) = api.do(api.admin, "GET", "/nodes")["nodes"]
    assert (view["key"], view["enrolled_ns"]) == ("", None)
    assert node.joined() == node_id  # its next start, after the upgrade
    assert api.ask(api.node, "POST", "/agents", body)[0] == 401
    (view,) = api.do(api.admin, "GET", "/nodes")["nodes"]
    assert view["key"] == node.keys.public.fingerprint and view["enrolled_ns"] == api.clock.wall_ns()
    assert api.audited()[-1][1] == "node.bind"


def test_27_7_a_home_on_another_machine_waits_for_an_administrator(api: Api, node: KeyedNode, clock: FakeClock) -> None:
    node_id = node.joined(host="h1")
    copied = KeyedNode(api, api.node, node.keys)
    there = {"machine": "m2", "boot": "b2", "host": "h2"}
    status, said = copied.hello(**there)
    assert status == 403 and "from another machine" in said["message"]
    clock.advance(PRESENT_S + 1)
    for _ in range(2):
        status, said = copied.hello(**there)
        assert status == 403 and "node approve n1" in said["hint"]
    assert [entry[1] for entry in api.audited()].count("node.pending") == 1
    waits = [one for one in api.do(api.admin, "GET", "/nodes")["nodes"] if one["state"] == "PENDING"]
    assert [(one["name"], one["key"]) for one in waits] == [("n1", node.keys.public.fingerprint)]
    api.do(api.admin, "POST", "/nodes/approve", {"name": "n1"})
    assert copied.joined(**there) == node_id


@pytest.mark.parametrize("same", [{"boot": "b1"}, {"boot": "b2", "host": "h1"}])
def test_27_7_a_restarted_container_needs_no_approval(api: Api, node: KeyedNode, same: dict[str, str]) -> None:
    node_id = node.joined(host="h1", boot="b1")
    api.clock.advance(PRESENT_S + 1)
    assert node.joined(machine="m2", **same) == node_id
    assert api.audited()[-1][1] == "node.move"


def request(node: KeyedNode, name: str, number: int) -> dict[str, object]:
    return {"name": name, "machine": f"m{number}", "instance": f"i{number}", "keys": node.public()}


def test_27_7_a_second_node_of_a_name_waits_and_replaces_the_first_when_it_is_approved(
    api: Api, clock: FakeClock
) -> None:
    token = api.do(api.admin, "POST", "/nodes/invite", {"uses": 2})["token"]
    first, second = KeyedNode(api, ""), KeyedNode(api, "")
    first.token = api.do(token, "POST", "/agents/join", request(first, "gpu-2", 2))["token"]
    node_id = first.joined("gpu-2", machine="m2", instance="i2")
    assert api.ask(token, "POST", "/agents/join", request(second, "gpu-2", 3))[0] == 403  # the first is there
    clock.advance(PRESENT_S + 1)
    for _ in range(2):  # an answer that was lost costs no further use
        said = api.do(token, "POST", "/agents/join", request(second, "gpu-2", 3))
        assert said["ray"] is None and "for an administrator" in said["waits"]
    second.token = said["token"]
    assert second.open()[0] == 200
    status, waits = api.ask(second.session, "GET", "/agents/ray")
    assert status == 403 and "node approve gpu-2" in waits["hint"]
    assert second.hello("gpu-2", machine="m3", instance="i3")[0] == 403
    assert first.joined("gpu-2", machine="m2", instance="i2") == node_id
    status, refused = api.ask(api.admin, "POST", "/nodes/approve", {"name": "gpu-2"})
    assert status == 403 and "node revoke gpu-2" in refused["hint"]
    clock.advance(PRESENT_S + 1)
    api.do(api.admin, "POST", "/nodes/approve", {"name": "gpu-2"})
    assert api.do(second.session, "GET", "/agents/ray")["token"] == POOL.token
    assert second.joined("gpu-2", machine="m3", instance="i3") == node_id
    assert api.ask(first.token, "POST", "/agents/challenge")[0] == 401


def test_27_7_an_invitation_of_a_name_is_its_approval(api: Api, clock: FakeClock) -> None:
    first, second = KeyedNode(api, ""), KeyedNode(api, "")
    for number, one in enumerate((first, second)):
        token = api.do(api.admin, "POST", "/nodes/invite", {"name": "gpu-2"})["token"]
        one.token = api.do(token, "POST", "/agents/join", request(one, "gpu-2", number))["token"]
        one.joined("gpu-2", machine=f"m{number}", instance=f"i{number}")
        clock.advance(PRESENT_S + 1)
    assert api.ask(first.token, "POST", "/agents/challenge")[0] == 401  # its token was revoked


def test_27_7_the_servers_own_node_keeps_its_key_at_a_start_and_a_restored_home_gets_another(
    database: Database, tmp_path: Path, clock: FakeClock
) -> None:
    def key_after(node: NodeIdentity) -> str:
        secret = first_tokens(database, tmp_path / "s", login="root", now_ns=7, node=node).node_token
        found = database.read(lambda connection: nodes.find(connection, token_id(secret)))
        assert found is not None
        return found.node.key

    home = NodeIdentity(name="n1", machine="m1", instance="i1")
    key_after(home)
    secret = (tmp_path / "s" / "node.token").read_text().strip()
    keyed = msgspec.structs.replace(home, key="a" * 32)
    database.write(lambda connection: nodes.bind(connection, token_id(secret), keyed, by="server", at_ns=7))
    assert key_after(home) == key_after(msgspec.structs.replace(home, name="renamed")) == "a" * 32
    assert key_after(msgspec.structs.replace(home, instance="i2")) == ""


# rotation and revocation ----------------------------------------------------------------------------------------------


def test_27_7_a_node_replaces_its_key_when_an_administrator_asks(api: Api, node: KeyedNode) -> None:
    node_id, new = node.joined(), PrivateKeys.generate()
    body = node.rotation(new)
    status, said = api.ask(node.session, "POST", "/agents/key", body)
    assert status == 403 and "administrator has requested" in said["message"]
    assert api.do(api.admin, "POST", "/nodes/n1/rotate")["rotating"] is True
    assert node.beat(node_id)[1]["rotate"] is True
    for forged in (node.rotation(new, signed_by=PrivateKeys.generate()), {**body, "new": body["old"]}):
        assert api.ask(node.session, "POST", "/agents/key", forged)[0] == 403  # a stolen session is not enough
    answer = api.do(node.session, "POST", "/agents/key", body)
    assert node.beat(node_id)[0] == 401 and node.open()[0] == 403  # the old key is worth nothing
    node.keys, node.session = new, answer["token"]
    assert node.beat(node_id) == (200, {**node.beat(node_id)[1], "rotate": False})
    assert api.ask(node.session, "POST", "/agents/key", body)[0] in (401, 403)
    (view,) = api.do(api.admin, "GET", "/nodes")["nodes"]
    assert (view["key"], view["rotating"]) == (new.public.fingerprint, False)
    actions = [action for _, action, _ in api.audited()]
    assert actions.count("node.rotate") == actions.count("node.key") == 1


def test_27_7_a_node_without_a_key_cannot_rotate_it(api: Api) -> None:
    api.do(api.node, "POST", "/agents", msgspec.to_builtins(hello(instance="i1")))
    status, said = api.ask(api.admin, "POST", "/nodes/n1/rotate")
    assert status == 400 and "upgrade the node" in said["hint"]


@pytest.mark.parametrize("verb", ["rotate", "revoke"])
def test_27_7_only_administrators_rotate_and_revoke(api: Api, node: KeyedNode, verb: str) -> None:
    node.joined()
    for role in ("operator", "member", "viewer"):
        assert api.ask(api.user(role, role), "POST", f"/nodes/n1/{verb}")[0] == 403
    assert api.ask(api.admin, "POST", f"/nodes/nobody/{verb}")[0] == 404


def test_27_7_a_revoked_node_is_out_and_its_runs_are_not_reported_any_more(
    api: Api, node: KeyedNode, services: Services, clock: FakeClock
) -> None:
    add_people(api.database, "alice")
    node_id = node.joined()
    run_id = placed(services)
    attempt = services.attempt_tokens.token((run_id, 1, 0))
    who = Caller(name="node", kind="service", role="agent", token_id=token_id(api.node), key=bound_key(api))
    assert services.agents.waiting(who, node_id, "i1")
    report = f"/attempts/{run_id}/1/report"
    said = {"state": "STARTING"}
    assert api.ask(attempt, "POST", report, said)[0] == 200
    view = api.do(api.admin, "POST", "/nodes/n1/revoke")
    assert view["state"] == "REVOKED" and "was revoked" in view["sentence"] and view["runs"] == [run_id]
    assert node.beat(node_id)[0] == 401 and api.ask(api.node, "POST", "/agents/challenge")[0] == 401
    assert api.ask(attempt, "POST", report, said)[0] == 401
    with pytest.raises(NotAuthenticated, match="was revoked"):  # an open stream of orders
        services.agents.waiting(who, node_id, "i1")
    actions = [action for _, action, _ in api.audited()]
    assert actions[-2:] == ["token.revoke", "node.revoke"]


def test_27_7_a_revoked_machine_comes_back_with_an_invitation(api: Api, node: KeyedNode, clock: FakeClock) -> None:
    node_id = node.joined()
    api.do(api.admin, "POST", "/nodes/n1/revoke")
    token = api.do(api.admin, "POST", "/nodes/invite", {})["token"]
    again = KeyedNode(api, "")
    body = {**request(again, "n1", 1), "instance": "i1"}
    again.token = api.do(token, "POST", "/agents/join", body)["token"]
    assert again.joined() == node_id
    (view,) = api.do(api.admin, "GET", "/nodes")["nodes"]
    assert (view["state"], view["key"]) == ("UP", again.keys.public.fingerprint)


# sealed orders --------------------------------------------------------------------------------------------------------


def test_27_7_an_order_is_sealed_to_its_nodes_key(api: Api, node: KeyedNode, services: Services) -> None:
    add_people(api.database, "alice")
    node_id = node.joined()
    who = Caller(name="node", kind="service", role="agent", token_id=token_id(api.node), key=bound_key(api))
    run_id = placed(services)
    (order,) = services.agents.waiting(who, node_id, "i1")
    assert isinstance(order, Start)
    assert (bytes(order.context), order.secrets) == (b"{}", ())
    data = node.keys.open(order.sealed, about=order_text(run_id, 1, 0))
    assert data is not None
    assert json.loads(bytes(msgspec.json.decode(data, type=PrivatePart).context)) == {"environ": {"A": "1"}}
    assert node.keys.open(order.sealed, about=order_text(run_id, 2, 0)) is None
    assert PrivateKeys.generate().open(order.sealed, about=order_text(run_id, 1, 0)) is None
