"""The list of environments that runs use: in pages by last use, with sizes, and only with what a caller may see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from serverless_gpu.server import environment_catalog
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.testing import FakeClock
from tests.support.environment.environments_in_stores import capture
from tests.support.server.principals import Api
from tests.support.server.submitting import request


@pytest.fixture
def api(services: Services, database: Database, clock: FakeClock) -> Iterator[Api]:
    made = Api(services, database, clock)
    with made.client:
        made.alice = made.user("alice")
        yield made


def stored(services: Services, *contents: bytes) -> str:
    return capture(services.environments.documents(), *contents).address


def used(services: Services, database: Database, owner: str, address: str, at_ns: int) -> str:
    """Submit a run of a principal in an environment, at a time."""
    asked = request()
    services.submissions.submit(Caller(name=owner, role="member"), asked)
    change = tables.runs.update().where(tables.runs.c.id == asked.id).values(snapshot=address, created_ns=at_ns)
    database.write(lambda connection: connection.execute(change))
    return asked.id


def addresses(page: Any) -> list[str]:
    return [one["address"] for one in page["environments"]]


def test_pages_go_by_last_use_and_have_sizes(api: Api, services: Services, database: Database) -> None:
    one, two, gone = stored(services, b"one"), stored(services, b"one", b"two"), "0" * 64
    for at_ns, address in enumerate((one, two, gone, one), 1):
        used(services, database, "alice", address, at_ns)
    first = api.do(api.admin, "GET", "/environments?limit=2")
    rest = api.do(api.admin, "GET", f"/environments?limit=2&cursor={first['cursor']}")
    assert (addresses(first), addresses(rest), rest["cursor"]) == ([one, gone], [two], "")
    known, lost = first["environments"]
    assert (known["runs"], known["first_ns"], known["last_ns"]) == (2, 1, 4)
    assert (known["snapshot"]["size"], known["snapshot"]["files"], known["snapshot"]["units"]) == (3, 1, 1)
    assert lost["snapshot"] is None
    assert api.ask(api.admin, "GET", "/environments?cursor=nonsense")[0] == 400


def test_a_list_reads_snapshots_for_a_bounded_time(
    api: Api, services: Services, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    used(services, database, "alice", stored(services, b"one"), 1)
    monkeypatch.setattr(environment_catalog, "READ_S", 0)
    assert api.do(api.admin, "GET", "/environments")["environments"][0]["snapshot"] is None


def test_a_member_sees_own_runs_and_an_operator_sees_all(api: Api, services: Services, database: Database) -> None:
    address = stored(services, b"one", b"two")
    api.user("bob")
    mine = used(services, database, "alice", address, 1)
    theirs = used(services, database, "bob", address, 2)
    used(services, database, "bob", stored(services, b"three"), 3)
    assert addresses(api.do(api.alice, "GET", "/environments")) == [address]
    seen = api.do(api.alice, "GET", f"/environments/snapshots/{address}")
    assert ([one["owner"] for one in seen["owners"]], [one["run_id"] for one in seen["latest"]]) == (["alice"], [mine])
    whole = api.do(api.admin, "GET", f"/environments/snapshots/{address}")
    assert [one["owner"] for one in whole["owners"]] == ["bob", "alice"]
    assert [one["run_id"] for one in whole["latest"]] == [theirs, mine]
    assert [unit["size"] for unit in whole["units"]] == [3, 3]
    viewer = api.user("vera", role="viewer")
    assert api.ask(viewer, "GET", "/environments")[0] == 403
    for wrong in ("0" * 64, "nonsense"):
        assert api.ask(api.admin, "GET", f"/environments/snapshots/{wrong}")[0] == 404


def test_differences_are_those_of_the_command(api: Api, services: Services) -> None:
    one, two = stored(services, b"one"), stored(services, b"one", b"two")
    found = api.do(api.admin, "GET", f"/environments/diff?old={one}&new={two}")
    assert found["count"] == len(found["changes"]) == 1
    assert "added" in found["changes"][0]
    assert api.do(api.admin, "GET", f"/environments/diff?old={one}&new={one}")["changes"] == []
    assert api.ask(api.admin, "GET", f"/environments/diff?old={one}")[0] == 404


def test_summaries_of_many_environments_have_a_bound(
    api: Api, services: Services, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_catalog, "SUMMARIES_MAX", 2)
    for number in range(4):
        used(services, database, "alice", stored(services, f"{number}".encode()), number + 1)
    found = api.do(api.admin, "GET", "/environments")["environments"]
    assert all(one["snapshot"] for one in found)
    assert len(services.environment_catalog._summaries) == 2
