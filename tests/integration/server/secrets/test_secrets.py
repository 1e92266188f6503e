"""Secrets of a server (F70): who sees which, which version an attempt gets, and that nobody else gets a value."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serverless_gpu.errors import SecretMissing
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.server_key import Keys, Sealer
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.invariants import self_check
from serverless_gpu.server.records import audit
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.access import SecretValue
from serverless_gpu.wire.agents import AttemptSeen, Start
from tests.support.golden import golden
from tests.support.server.agents import NODE, find, hello, tell
from tests.support.server.measures import value
from tests.support.server.principals import Api
from tests.support.server.stored import rows
from tests.support.server.submitting import request

ALICE = Caller(name="alice", role="member", teams=("search",))
VALUE = b"hunter2-of-alice"


@pytest.fixture
def api(services: Services, database: Database, clock: FakeClock) -> Iterator[Api]:
    made = Api(services, database, clock)
    with made.client:
        made.do(made.admin, "POST", "/teams", {"name": "search"})
        made.alice = made.user("alice", teams=["search"])
        services.agents.hello(NODE, hello(takes=("renewal", "secrets")))
        yield made
    assert self_check.check(database.read).violations == ()


def put(api: Api, token: str, name: str, value: bytes, team: str = "") -> Any:
    body = {"value": base64.b64encode(value).decode(), "team": team}
    return api.do(token, "PUT", f"/secrets/{name}", body)


def submit(services: Services, *names: str, **spec: Any) -> str:
    asked = request(secrets=names, **spec)
    services.submissions.submit(ALICE, asked)
    return asked.id


def tick(services: Services) -> None:
    services.clock.advance(31)  # type: ignore[attr-defined] # a FakeClock; what waits after a refusal waits no more
    node = services.agents.hello(NODE, hello(takes=("renewal", "secrets"))).node
    assert node
    make_scheduler(services).tick(services.clock.boottime_ns())


def given(services: Services, run_id: str) -> tuple[SecretValue, ...]:
    """Return what the node gets with the order for a run."""
    agents = services.agents
    orders = agents.waiting(NODE, agents.hello(NODE, hello(takes=("renewal", "secrets"))).node)
    return next(order.secrets for order in orders if isinstance(order, Start) and order.run_id == run_id)


def pinned(services: Services, run_id: str) -> list[str]:
    attempt = find(services, run_id).attempt
    assert attempt is not None
    return [one.text for one in attempt.secrets]


def test_a_secret_has_versions_and_no_route_returns_a_value(api: Api) -> None:
    assert put(api, api.alice, "TOKEN", VALUE)["version"] == 1
    assert put(api, api.alice, "TOKEN", VALUE)["version"] == 1  # a request may come twice
    assert put(api, api.alice, "TOKEN", b"another")["version"] == 2
    listed = api.do(api.alice, "GET", "/secrets")["secrets"]
    assert [(one["name"], one["version"], one["owner"], one["by"]) for one in listed] == [
        ("TOKEN", 2, "alice", "alice")
    ]
    assert api.ask(api.alice, "GET", "/secrets/TOKEN")[0] == 405
    assert api.do(api.alice, "DELETE", "/secrets/TOKEN")["name"] == "TOKEN"
    assert api.do(api.alice, "GET", "/secrets")["secrets"] == []
    assert api.ask(api.alice, "DELETE", "/secrets/TOKEN")[0] == 404
    assert put(api, api.alice, "TOKEN", VALUE)["version"] == 4  # a number is never two things
    entries = [one for one in api.database.read(audit.entries) if one.action.startswith("secret.")]
    assert [(one.principal, one.action, one.subject, one.detail["version"]) for one in entries] == [
        ("alice", "secret.set", "TOKEN", 1),
        ("alice", "secret.set", "TOKEN", 2),
        ("alice", "secret.delete", "TOKEN", 2),
        ("alice", "secret.set", "TOKEN", 4),
    ]


def test_who_sees_which(api: Api) -> None:
    bob, viewer = api.user("bob"), api.user("vic", "viewer")
    put(api, api.alice, "MINE", VALUE)
    put(api, api.alice, "OURS", VALUE, team="search")
    assert api.do(bob, "GET", "/secrets")["secrets"] == []
    assert api.ask(bob, "PUT", "/secrets/OURS", {"value": "YQ==", "team": "search"})[0] == 404
    assert api.ask(bob, "DELETE", "/secrets/OURS?team=search")[0] == 404
    assert api.ask(bob, "DELETE", "/secrets/MINE")[0] == 404
    assert api.ask(viewer, "GET", "/secrets")[0] == api.ask(api.node, "GET", "/secrets")[0] == 403
    assert [one["name"] for one in api.do(api.admin, "GET", "/secrets")["secrets"]] == ["MINE", "OURS"]
    carol = api.user("carol", teams=["search"])
    assert [(one["name"], one["team"], one["owner"]) for one in api.do(carol, "GET", "/secrets")["secrets"]] == [
        ("OURS", "search", "")
    ]
    assert put(api, carol, "OURS", b"carols", team="search")["version"] == 2


@pytest.mark.parametrize("name", ["a%2Fb", ".of", "x" * 65, "a b"])
def test_a_name_or_value_that_cannot_be_is_refused(api: Api, name: str) -> None:
    assert api.ask(api.alice, "PUT", f"/secrets/{name}", {"value": "YQ=="})[0] in (400, 404)
    assert api.ask(api.alice, "PUT", "/secrets/A", {"value": ""})[0] == 400
    too_long = base64.b64encode(b"x" * ((64 << 10) + 1)).decode()
    assert api.ask(api.alice, "PUT", "/secrets/A", {"value": too_long})[0] == 400


def test_a_run_that_names_what_is_not_there_is_refused(services: Services, api: Api) -> None:
    put(api, api.user("bob"), "BOBS", VALUE)
    put(api, api.alice, "OURS", VALUE, team="search")
    for names in (("NOWHERE",), ("BOBS",), ("OURS",)):  # the last is for runs of the team
        with pytest.raises(SecretMissing, match=golden("server.secrets.secret", names=names[0])):
            submit(services, *names)
    submit(services, "OURS", team="search")


def test_an_attempt_gets_the_newest_version_of_then_and_ones_own_goes_first(services: Services, api: Api) -> None:
    put(api, api.alice, "OURS", b"the team's", team="search")
    put(api, api.alice, "BOTH", b"the team's", team="search")
    put(api, api.alice, "BOTH", b"alice's")
    run_id = submit(services, "OURS", "BOTH", team="search", secret_variables={"BOTH": "BOTH"})
    put(api, api.alice, "OURS", b"the team's second", team="search")
    tick(services)
    assert pinned(services, run_id) == ["search/OURS@2", "BOTH@1"]
    assert [(one.name, one.value, one.variable) for one in given(services, run_id)] == [
        ("OURS", b"the team's second", ""),
        ("BOTH", b"alice's", "BOTH"),
    ]
    attempts = api.do(api.alice, "GET", f"/runs/{run_id}/attempts")["attempts"]
    assert attempts[0]["secrets"] == ["search/OURS@2", "BOTH@1"]


def test_F70_a_rotated_secret_stays_for_the_attempt_that_has_it_and_the_next_gets_the_new_one(
    services: Services, api: Api
) -> None:
    put(api, api.alice, "TOKEN", b"one")
    run_id = submit(services, "TOKEN", retries=1)
    tick(services)
    put(api, api.alice, "TOKEN", b"two")
    put(api, api.alice, "TOKEN", b"three")
    assert [one.value for one in given(services, run_id)] == [b"one"]  # also when its order comes again
    assert [row["version"] for row in rows(api.database, tables.secrets)] == [1, 3]
    tell(services, run_id, AttemptEnded(reason=Reason.RANK_RAISED, began=True))
    services.secrets.remove_replaced()
    assert [row["version"] for row in rows(api.database, tables.secrets)] == [3]
    tick(services)
    assert pinned(services, run_id) == ["TOKEN@3"]
    assert [one.value for one in given(services, run_id)] == [b"three"]


def test_F70_a_run_whose_secret_was_deleted_fails_before_user_code(services: Services, api: Api) -> None:
    put(api, api.alice, "TOKEN", b"one")
    run_id = submit(services, "TOKEN", retries=3)
    api.do(api.alice, "DELETE", "/secrets/TOKEN")
    tick(services)
    run = find(services, run_id)
    assert (run.state, run.reason, run.finished) == (State.FAILED, Reason.SECRET_MISSING, True)
    assert value(services.measures, "sgpu_runs_ended_total", reason="secret_missing") == 1
    assert run.detail.startswith("there is no secret 'TOKEN'") and run.attempt is not None and not run.attempt.began
    assert rows(api.database, tables.orders)[0]["taken_ns"] is None
    agents = services.agents
    assert agents.waiting(NODE, agents.hello(NODE, hello(takes=("secrets",))).node) == []


def test_F70_a_run_whose_secret_cannot_be_opened_ends_at_once(services: Services, api: Api) -> None:
    put(api, api.alice, "TOKEN", VALUE)
    run_id = submit(services, "TOKEN")
    foreign = Sealer(Keys(b"y" * 32).sealing).seal(VALUE, about="secret:user:alice:TOKEN:1")
    api.database.write(lambda connection: connection.execute(tables.secrets.update().values(sealed=foreign)))
    with pytest.raises(SecretMissing, match="another key"):
        submit(services, "TOKEN")
    tick(services)
    run = find(services, run_id)
    assert (run.state, run.reason, run.fence) == (State.FAILED, Reason.SECRET_MISSING, 1)
    put(api, api.alice, "TOKEN", VALUE)
    run_id = submit(services, "TOKEN")
    tick(services)
    assert [one.value for one in given(services, run_id)] == [VALUE]


def test_F70_a_secret_that_is_deleted_while_the_order_is_on_its_way_comes_without_a_value(
    services: Services, api: Api
) -> None:
    put(api, api.alice, "TOKEN", b"one")
    run_id = submit(services, "TOKEN")
    tick(services)
    api.do(api.alice, "DELETE", "/secrets/TOKEN")
    assert [(one.text, one.value) for one in given(services, run_id)] == [("TOKEN@1", None)]
    assert all(row["sealed"] is None for row in rows(api.database, tables.secrets))
    tell(services, run_id, AttemptEnded(reason=Reason.REFUSED, began=False))  # what the node makes of that
    tick(services)
    assert find(services, run_id).reason is Reason.SECRET_MISSING


def test_F70_who_left_a_team_has_its_secrets_no_more(services: Services, api: Api) -> None:
    api.user("carol", teams=["search"])
    put(api, api.alice, "OURS", b"the team's", team="search")
    run_id = submit(services, "OURS", team="search")
    api.do(api.admin, "DELETE", "/teams/search/members/alice")
    tick(services)
    assert find(services, run_id).reason is Reason.SECRET_MISSING


def test_a_node_that_knows_no_secrets_gets_no_run_with_some(services: Services, api: Api) -> None:
    put(api, api.alice, "TOKEN", b"one")
    services.agents.hello(NODE, hello())
    run_id = submit(services, "TOKEN")
    make_scheduler(services).tick(services.clock.boottime_ns())
    run = find(services, run_id)
    assert run.state is State.QUEUED and run.attempt is not None and run.attempt.reason is Reason.REFUSED
    tick(services)  # it was upgraded
    assert find(services, run_id).state is State.STARTING


def test_F70_no_value_is_in_the_database_and_none_opens_elsewhere_or_with_another_key(
    services: Services, api: Api, tmp_path: Path
) -> None:
    put(api, api.alice, "TOKEN", VALUE)
    put(api, api.alice, "OTHER", b"x" * 20)
    run_id = submit(services, "TOKEN")
    tick(services)
    assert [one.value for one in given(services, run_id)] == [VALUE]
    for table in tables.metadata.sorted_tables:
        for row in rows(api.database, table):
            for cell in row.values():
                data = cell if isinstance(cell, bytes) else str(cell).encode()
                assert VALUE not in data and base64.b64encode(VALUE) not in data, table.name
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or VALUE not in path.read_bytes(), path
    sealed = {row["name"]: row["sealed"] for row in rows(api.database, tables.secrets)}
    with pytest.raises(Exception, match="another key"):
        Sealer(Keys(b"y" * 32).sealing).unseal(sealed["TOKEN"], about="secret:user:alice:TOKEN:1")
    for about in ("secret:user:bob:TOKEN:1", "secret:user:alice:TOKEN:2", "secret:team:alice:TOKEN:1"):
        with pytest.raises(Exception, match=re.escape(golden("server.secrets.belongs-something-else"))):
            services.sealer.unseal(sealed["TOKEN"], about=about)


def test_the_last_use_is_when_a_node_confirms_the_order_of_an_attempt(api: Api, services: Services) -> None:
    def used() -> dict[str, int | None]:
        return {one["name"]: one["used_ns"] for one in api.do(api.alice, "GET", "/secrets")["secrets"]}

    put(api, api.alice, "TOKEN", VALUE)
    put(api, api.alice, "TOKEN", b"a later value", team="search")
    put(api, api.alice, "OTHER", VALUE)
    submit(services, "TOKEN")
    tick(services)
    node = services.agents.hello(NODE, hello(takes=("renewal", "secrets"))).node
    order = next(one for one in services.agents.waiting(NODE, node) if isinstance(one, Start))
    assert used() == {"TOKEN": None, "OTHER": None}
    services.clock.advance(5)  # type: ignore[attr-defined] # a FakeClock
    services.agents.take(NODE, node, [order.seq])
    at_ns = services.clock.wall_ns()
    shown = api.do(api.alice, "GET", "/secrets")["secrets"]
    assert [(one["name"], one["team"], one["used_ns"]) for one in shown] == [
        ("OTHER", "", None),
        ("TOKEN", "search", None),
        ("TOKEN", "", at_ns),
    ]
    services.clock.advance(5)  # type: ignore[attr-defined] # a FakeClock
    services.agents.take(NODE, node, [order.seq])
    assert put(api, api.alice, "TOKEN", b"replaced")["used_ns"] == at_ns  # A second confirmation is no use.


def test_an_attempt_that_a_node_reports_has_received_its_secrets(api: Api, services: Services) -> None:
    put(api, api.alice, "TOKEN", VALUE)
    run_id = submit(services, "TOKEN")
    tick(services)
    given(services, run_id)
    seen = AttemptSeen(run_id=run_id, fence=1, state=State.RUNNING)
    services.agents.hello(NODE, hello(takes=("renewal", "secrets"), attempts=(seen,)))
    assert api.do(api.alice, "GET", "/secrets")["secrets"][0]["used_ns"] == services.clock.wall_ns()
