"""Deleting users, teams and pools: nothing that refers to them may be lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.errors import InvalidValue, NotAllowed, NotAuthenticated, NotFound
from serverless_gpu.model.billing.budget import Period
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import audit, principals, references
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.access import PrincipalRequest
from serverless_gpu.wire.billing import BudgetRequest
from serverless_gpu.wire.nodes import PoolRequest
from tests.support.server.agents import NODE, hello
from tests.support.server.made import made_services
from tests.support.server.stored import add_people
from tests.support.server.submitting import request

pytestmark = pytest.mark.any_database

ROOT = Caller(name="root", role="admin", token_id="t")


@pytest.fixture
def services(database: Database, tmp_path: Path, clock: FakeClock) -> Services:
    """Return services with the administrator `other` and the team `search`."""
    add_people(database, "root", "node")
    made = made_services(database, tmp_path, clock=clock)
    made.principals.make(ROOT, PrincipalRequest(name="other", role="admin"))
    made.principals.make_team(ROOT, "search")
    return made


def actions(services: Services, kind: str) -> list[tuple[str, str]]:
    """Return the audited actions of a kind with their subjects."""
    entries = services.database.read(audit.entries)
    return [(entry.action, entry.subject) for entry in entries if entry.action.endswith(kind)]


def test_a_deleted_user_leaves_no_token_membership_or_share(services: Services) -> None:
    secret = services.principals.make(ROOT, PrincipalRequest(name="ada", teams=("search",))).secret
    services.pools.put_share(ROOT, "user", "ada", 3.0)
    gone = services.principals.delete(ROOT, "ada")
    assert (gone.name, gone.teams) == ("ada", ("search",))
    with pytest.raises(NotAuthenticated):
        services.database.read(lambda connection: principals.authenticate(connection, secret, now_ns=2))
    with pytest.raises(NotFound):
        services.principals.delete(ROOT, "ada")
    assert actions(services, ".delete") == [("user.delete", "ada")]
    again = services.principals.make(ROOT, PrincipalRequest(name="ada"))
    assert again.token.principal == "ada"
    assert services.database.read(lambda connection: principals.principal(connection, "ada")).teams == ()


def test_a_user_with_runs_is_refused_and_named(services: Services) -> None:
    services.principals.make(ROOT, PrincipalRequest(name="ada"))
    services.submissions.submit(Caller(name="ada", role="member"), request())
    with pytest.raises(InvalidValue) as caught:
        services.principals.delete(ROOT, "ada")
    assert "1 run" in caught.value.message and "--disable" in caught.value.hint
    assert actions(services, ".delete") == []


def test_nobody_deletes_themselves_or_the_last_administrator(services: Services) -> None:
    with pytest.raises(InvalidValue):
        services.principals.delete(ROOT, "root")
    services.principals.make(ROOT, PrincipalRequest(name="third", role="admin"))
    services.principals.delete(ROOT, "third")
    with pytest.raises(InvalidValue):
        services.principals.delete(ROOT, "other")


def test_a_token_with_scopes_deletes_nobody(services: Services) -> None:
    scoped = Caller(name="root", role="admin", scopes=("users",))
    with pytest.raises(NotAllowed):
        services.principals.delete(scoped, "other")
    with pytest.raises(NotAllowed):
        services.principals.delete_team(scoped, "search")


def test_a_team_with_a_budget_is_refused_until_that_is_deleted(services: Services) -> None:
    budget = BudgetRequest(kind="team", scope="search", period=Period.MONTH, limit_micros=1_000_000)
    services.budgets.put(ROOT, "monthly", budget)
    with pytest.raises(InvalidValue) as caught:
        services.principals.delete_team(ROOT, "search")
    assert "budget monthly" in caught.value.message
    services.budgets.delete(ROOT, "monthly")
    assert services.principals.delete_team(ROOT, "search").name == "search"
    assert actions(services, "team.delete") == [("team.delete", "search")]
    with pytest.raises(NotFound):
        services.principals.delete_team(ROOT, "search")


def test_a_pool_with_nodes_is_refused_until_they_are_moved(services: Services) -> None:
    services.agents.hello(NODE, hello())
    name = services.nodes.view_nodes()[0].name
    services.pools.put(ROOT, "lab", PoolRequest(nodes=(name,)))
    with pytest.raises(InvalidValue) as caught:
        services.pools.delete(ROOT, "lab")
    assert f"node {name}" in caught.value.message
    services.pools.put(ROOT, "default", PoolRequest(nodes=(name,)))
    assert services.pools.delete(ROOT, "lab").name == "lab"
    assert actions(services, "pool.delete") == [("pool.delete", "lab")]
    with pytest.raises(InvalidValue):
        services.pools.delete(ROOT, "lab")


def test_the_default_pool_stays(services: Services) -> None:
    services.agents.hello(NODE, hello())
    with pytest.raises(InvalidValue):
        services.pools.delete(ROOT, "default")


def test_many_references_are_counted() -> None:
    with pytest.raises(InvalidValue) as caught:
        references.refuse("team 'x'", [f"policy {number}" for number in range(8)])
    assert "policy 4 and 3 more" in caught.value.message
