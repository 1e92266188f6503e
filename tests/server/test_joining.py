"""Machines that join: what the token of the join file is good for, what one gets for it, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serverless_gpu.server import identity
from serverless_gpu.server.database import Database
from serverless_gpu.server.first_start import join_token
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.base import PROTOCOL
from serverless_gpu.wire.joining import RayPool
from tests.server.made import made_services
from tests.server.test_principals import Api

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
    return Api(dataclasses.replace(services, ray_pool=lambda: POOL), database, clock)


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


def test_two_machines_have_a_token_each_so_both_are_let_in(api: Api, token: str) -> None:
    tokens = {}
    for number in (2, 3):
        said = api.do(
            token, "POST", "/agents/join", {"name": f"gpu-{number}", "machine": f"m{number}", "instance": "i"}
        )
        tokens[number] = said["token"]
        api.do(said["token"], "POST", "/agents", hello(f"gpu-{number}", f"m{number}", f"i{number}"))
    assert tokens[2] != tokens[3]


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


def test_asked_again_it_gets_another_and_the_first_is_revoked(api: Api, token: str) -> None:
    first = api.do(token, "POST", "/agents/join", REQUEST)["token"]
    second = api.do(token, "POST", "/agents/join", REQUEST)["token"]
    assert api.ask(first, "POST", "/agents", hello("gpu-2", "m2", "i2"))[0] == 401
    assert api.ask(second, "POST", "/agents", hello("gpu-2", "m2", "i2"))[0] == 200


def test_a_name_that_another_machine_has_is_refused_before_anything_is_started(api: Api, token: str) -> None:
    own = api.do(token, "POST", "/agents/join", REQUEST)["token"]
    api.do(own, "POST", "/agents", hello("gpu-2", "m2", "i2"))
    status, said = api.ask(token, "POST", "/agents/join", {"name": "gpu-2", "machine": "m3", "instance": "i3"})
    assert status == 403
    assert said["message"] == "a node named 'gpu-2' is connected, and it is another machine"
    assert said["hint"] == "give this one another name: --name"
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
    assert said["message"] == "this server has one machine: no other can join it"
    assert said["hint"] == "it is started so that others can: sgpu up --engine ray"


def test_a_deleted_file_is_how_the_token_is_changed(api: Api, database: Database, token: str, tmp_path: Path) -> None:
    path = tmp_path / "server" / "join.token"
    assert path.stat().st_mode & 0o777 == 0o600
    assert join_token(database, tmp_path / "server", now_ns=api.clock.wall_ns()) == token
    path.unlink()
    other = join_token(database, tmp_path / "server", now_ns=api.clock.wall_ns())
    assert api.ask(token, "POST", "/agents/join", REQUEST)[0] == 401
    assert api.ask(other, "POST", "/agents/join", REQUEST)[0] == 200
    labels = [one.label for one in database.read(identity.tokens_of) if one.scopes == ("joining",)]
    assert len(set(labels)) == 1 and len(labels) == 2
