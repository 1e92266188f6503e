"""Machines that join: what the token of the join file is good for, what one gets for it, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serverless_gpu.server.db.database import Database
from serverless_gpu.server.identity.bootstrap import join_token
from serverless_gpu.server.records import principals
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.base import PROTOCOL
from serverless_gpu.wire.nodes import INVITED_S, RayPool
from tests.support.golden import golden
from tests.support.server.made import made_services, recomposed
from tests.support.server.principals import Api

POOL = RayPool(address="10.0.0.5:7900", port=7900, token="f" * 64, version="2.60.0", python="3.11.7")
REQUEST = {"name": "gpu-2", "machine": "m2", "instance": "i2"}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    clock = FakeClock(wall_ns=1_750_000_000_000_000_000)
    found = Database(f"sqlite:///{tmp_path / 'server.db'}", clock=clock)
    found.migrate()
    yield found
    found.close()


@pytest.fixture
def api(database: Database, tmp_path: Path) -> Api:
    clock = FakeClock(wall_ns=1_750_000_000_000_000_000)
    services = made_services(database, tmp_path, clock=clock)
    return Api(recomposed(services, ray_pool=lambda: POOL), database, clock)


@pytest.fixture
def token(api: Api, database: Database, tmp_path: Path) -> str:
    return join_token(database, tmp_path / "server", now_ns=api.clock.wall_ns())


def hello(name: str, machine: str, instance: str) -> dict[str, Any]:
    return {
        "name": name,
        "machine": machine,
        "instance": instance,
        "boot_id": "b",
        "version": "0",
        "protocol": PROTOCOL,
        "python": "3.11",
        "platform": "linux",
        "devices": [],
    }


def test_a_machine_gets_an_agents_token_of_its_own_and_how_it_joins(api: Api, token: str) -> None:
    said = api.do(token, "POST", "/agents/join", REQUEST)
    assert said["ray"] == {
        "address": "10.0.0.5:7900",
        "port": 7900,
        "token": "f" * 64,
        "version": "2.60.0",
        "python": "3.11.7",
        "problem": "",
    }
    assert api.do(said["token"], "POST", "/agents", hello("gpu-2", "m2", "i2"))["node"]
    made = api.do(api.admin, "GET", "/tokens")["tokens"][-1]
    assert (made["principal"], made["label"], made["scopes"]) == ("node", "joined: gpu-2 (m2-i2)", ["agent"])
    assert api.audited()[-1][:2] == ("node", "node.join")


def test_22A3_a_join_token_lets_in_so_many_homes_and_each_has_a_token_of_its_own(api: Api) -> None:
    token = api.do(api.admin, "POST", "/nodes/invite", {"uses": 2})["token"]
    tokens = {}
    for number in (2, 3):
        request = {"name": f"gpu-{number}", "machine": f"m{number}", "instance": f"i{number}"}
        for _ in range(2):  # an answer that was lost costs no further use
            tokens[number] = api.do(token, "POST", "/agents/join", request)["token"]
        api.do(tokens[number], "POST", "/agents", hello(f"gpu-{number}", f"m{number}", f"i{number}"))
    assert tokens[2] != tokens[3]
    status, said = api.ask(token, "POST", "/agents/join", {"name": "gpu-4", "machine": "m4", "instance": "i4"})
    assert (status, said["message"]) == (403, golden("server.joining.join-token-used"))
    assert "sgpu node invite" in said["hint"]
    # Nor does it let in another home under the name of one that it let in.
    assert api.ask(token, "POST", "/agents/join", {"name": "gpu-4", "machine": "m3", "instance": "i3"})[0] == 403


def test_22A3_the_servers_own_join_file_lets_in_one_machine_and_a_start_renews_it(
    api: Api, database: Database, token: str, tmp_path: Path
) -> None:
    api.do(token, "POST", "/agents/join", REQUEST)
    other = {"name": "gpu-3", "machine": "m3", "instance": "i3"}
    assert api.ask(token, "POST", "/agents/join", other)[0] == 403
    renewed = join_token(database, tmp_path / "server", now_ns=api.clock.wall_ns())
    assert renewed != token
    api.do(renewed, "POST", "/agents/join", other)


def test_22A3_a_join_token_expires(api: Api, database: Database, token: str, tmp_path: Path) -> None:
    api.clock.advance(INVITED_S + 1)
    assert api.ask(token, "POST", "/agents/join", REQUEST)[0] == 401
    assert join_token(database, tmp_path / "server", now_ns=api.clock.wall_ns()) != token
    invited = api.do(api.admin, "POST", "/nodes/invite", {"expires_s": 60})["token"]
    api.clock.advance(61)
    assert api.ask(invited, "POST", "/agents/join", REQUEST)[0] == 401


def test_22A3_a_join_token_for_a_name_lets_in_no_other(api: Api) -> None:
    token = api.do(api.admin, "POST", "/nodes/invite", {"name": "gpu-2"})["token"]
    status, said = api.ask(token, "POST", "/agents/join", {**REQUEST, "name": "gpu-3"})
    assert (status, said["message"]) == (403, golden("server.joining.join-token-node"))
    api.do(token, "POST", "/agents/join", REQUEST)


def test_22A3_a_nodes_own_token_lets_in_no_other_and_joins_again_after_a_boot(api: Api, token: str) -> None:
    own = api.do(token, "POST", "/agents/join", REQUEST)["token"]
    for secret in (own, api.node):
        assert api.ask(secret, "POST", "/agents/join", {"name": "x", "machine": "m", "instance": "i"})[0] == 403
    assert api.do(own, "GET", "/agents/ray")["token"] == POOL.token
    api.clock.advance(INVITED_S + 1)  # long after the join token has expired
    assert api.do(own, "GET", "/agents/ray")["token"] == POOL.token
    made = api.do(api.admin, "POST", "/tokens", {"principal": "node", "scopes": ["agent"]})["secret"]
    for secret in (made, token, api.user("ada")):
        assert api.ask(secret, "GET", "/agents/ray")[0] in (401, 403, 404)


@pytest.mark.parametrize(
    "body", [{"uses": 0}, {"uses": 1001}, {"expires_s": 0}, {"expires_s": 1e9}, {"name": "a", "uses": 2}]
)
def test_22A3_an_invitation_has_bounds(api: Api, body: dict[str, Any]) -> None:
    assert api.ask(api.admin, "POST", "/nodes/invite", body)[0] == 400


@pytest.mark.parametrize("role", ["operator", "member", "viewer", "agent"])
def test_22A3_only_administrators_invite_and_approve(api: Api, role: str) -> None:
    secret = api.user("somebody", role)
    assert api.ask(secret, "POST", "/nodes/invite", {})[0] == 403
    assert api.ask(secret, "POST", "/nodes/approve", {"name": "n"})[0] == 403


def test_the_token_of_the_join_file_is_good_for_joining_alone(api: Api, token: str) -> None:
    for method, path in (("POST", "/agents"), ("GET", "/runs"), ("GET", "/tokens"), ("POST", "/tokens")):
        status, _ = api.ask(token, method, path, hello("x", "m", "i") if path == "/agents" else {})
        assert status in (403, 404), path


def test_what_a_machine_gets_cannot_let_in_another(api: Api, token: str) -> None:
    own = api.do(token, "POST", "/agents/join", REQUEST)["token"]
    assert api.ask(own, "POST", "/agents/join", REQUEST)[0] == 403


@pytest.mark.parametrize("role", ["admin", "operator", "member", "viewer"])
def test_nobody_else_gets_the_token_of_ray(api: Api, role: str) -> None:
    secret = api.admin if role == "admin" else api.user("somebody", role)
    assert api.ask(secret, "POST", "/agents/join", REQUEST)[0] == 403


def test_22A3_asked_again_it_gets_another_and_the_first_is_revoked(api: Api, token: str) -> None:
    first = api.do(token, "POST", "/agents/join", REQUEST)["token"]
    second = api.do(token, "POST", "/agents/join", REQUEST)["token"]
    assert api.ask(first, "POST", "/agents", hello("gpu-2", "m2", "i2"))[0] == 401
    assert api.ask(second, "POST", "/agents", hello("gpu-2", "m2", "i2"))[0] == 200


def test_a_name_that_another_machine_has_is_refused_before_anything_is_started(api: Api, token: str) -> None:
    own = api.do(token, "POST", "/agents/join", REQUEST)["token"]
    api.do(own, "POST", "/agents", hello("gpu-2", "m2", "i2"))
    status, said = api.ask(token, "POST", "/agents/join", {"name": "gpu-2", "machine": "m3", "instance": "i3"})
    assert status == 403
    assert said["message"] == golden("server.joining.node-named-gpu")
    assert said["hint"] == golden("server.joining.give-one-another")
    assert api.ask(own, "POST", "/agents", hello("gpu-2", "m2", "i2"))[0] == 200


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 129])
def test_a_name_that_cannot_be_is_refused(api: Api, token: str, name: str) -> None:
    assert api.ask(token, "POST", "/agents/join", {**REQUEST, "name": name})[0] == 400


def test_a_server_of_one_machine_says_how_it_becomes_one_of_many(database: Database, tmp_path: Path) -> None:
    clock = FakeClock(wall_ns=1_750_000_000_000_000_000)
    api = Api(made_services(database, tmp_path, clock=clock), database, clock)
    token = join_token(database, tmp_path / "server", now_ns=clock.wall_ns())
    status, said = api.ask(token, "POST", "/agents/join", REQUEST)
    assert status == 403
    assert said["message"] == golden("server.joining.server-one-machine")
    assert said["hint"] == golden("server.joining.started-so-others")


def test_a_deleted_file_is_how_the_token_is_changed(api: Api, database: Database, token: str, tmp_path: Path) -> None:
    path = tmp_path / "server" / "join.token"
    assert path.stat().st_mode & 0o777 == 0o600
    assert join_token(database, tmp_path / "server", now_ns=api.clock.wall_ns()) == token
    path.unlink()
    other = join_token(database, tmp_path / "server", now_ns=api.clock.wall_ns())
    assert api.ask(token, "POST", "/agents/join", REQUEST)[0] == 401
    assert api.ask(other, "POST", "/agents/join", REQUEST)[0] == 200
    labels = [one.label for one in database.read(principals.tokens_of) if one.scopes == ("joining",)]
    assert len(set(labels)) == 1 and len(labels) == 2
