"""Users, teams and tokens over the API: what each role sees and may do, and what is written into the audit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.server.composition import Services
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import audit, principals
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.base import API
from tests.support.server.made import made_services
from tests.support.server.postgres import Cluster
from tests.support.server.principals import Api


@pytest.fixture
def api(services: Services, database: Database, clock: FakeClock) -> Iterator[Api]:
    made = Api(services, database, clock)
    with made.client:
        yield made


def test_whoami_says_whose_token_it_is(api: Api) -> None:
    said = api.do(api.user("ada", "viewer"), "GET", "/whoami")
    assert (said["name"], said["kind"], said["role"], said["teams"]) == ("ada", "user", "viewer", [])
    assert api.do(api.node, "GET", "/whoami")["role"] == "agent"


def test_an_administrator_sees_all_users_and_others_see_themselves(api: Api) -> None:
    ada = api.user("ada")
    names = [one["name"] for one in api.do(api.admin, "GET", "/users")["principals"]]
    assert names == ["ada", "node", "root"]
    assert [one["name"] for one in api.do(ada, "GET", "/users")["principals"]] == ["ada"]


def test_only_administrators_say_who_may_what(api: Api) -> None:
    api.do(api.admin, "POST", "/teams", {"name": "search"})
    others = [api.user(role, role) for role in ("operator", "member", "viewer", "agent")]
    before = api.audited()
    for other in others:
        for method, path, body in (
            ("POST", "/users", {"name": "eve", "role": "admin"}),
            ("PATCH", "/users/root", {"disabled": True}),
            ("POST", "/teams", {"name": "eves"}),
            ("PUT", "/teams/search/members/member", None),
            ("DELETE", "/teams/search/members/root", None),
        ):
            assert api.ask(other, method, path, body)[0] == 403
    assert api.audited() == before


def test_teams_are_seen_by_their_members(api: Api) -> None:
    for team in ("search", "ads"):
        api.do(api.admin, "POST", "/teams", {"name": team})
    ada = api.user("ada", teams=["search"])
    assert api.do(ada, "GET", "/teams")["teams"] == [{"name": "search", "members": ["ada"], "time_zone": "UTC"}]
    assert len(api.do(api.admin, "GET", "/teams")["teams"]) == 2
    assert api.do(api.admin, "PUT", "/teams/ads/members/ada")["members"] == ["ada"]
    assert len(api.do(ada, "GET", "/teams")["teams"]) == 2
    assert api.do(api.admin, "DELETE", "/teams/ads/members/ada")["members"] == []
    assert api.ask(api.admin, "PUT", "/teams/nowhere/members/ada")[0] == 404


def test_a_disabled_user_is_let_in_no_more(api: Api) -> None:
    ada = api.user("ada")
    assert api.do(api.admin, "PATCH", "/users/ada", {"disabled": True})["disabled"]
    status, said = api.ask(ada, "GET", "/whoami")
    assert (status, said["code"]) == (401, "not_authenticated")


def test_a_new_role_holds_at_once(api: Api) -> None:
    ada = api.user("ada")
    api.do(api.admin, "PATCH", "/users/ada", {"role": "admin"})
    assert len(api.do(ada, "GET", "/users")["principals"]) == 3


def test_the_last_administrator_cannot_go(api: Api) -> None:
    status, said = api.ask(api.admin, "PATCH", "/users/root", {"disabled": True})
    assert (status, said["code"]) == (400, "invalid_value")


def test_tokens_are_ones_own(api: Api) -> None:
    ada, bob = api.user("ada"), api.user("bob")
    mine = api.do(ada, "POST", "/tokens", {"label": "laptop"})
    assert mine["token"]["principal"] == "ada" and mine["secret"].startswith("sgpu_")
    assert api.do(mine["secret"], "GET", "/whoami")["name"] == "ada"
    assert {one["principal"] for one in api.do(ada, "GET", "/tokens")["tokens"]} == {"ada"}
    assert {one["principal"] for one in api.do(api.admin, "GET", "/tokens")["tokens"]} > {"ada", "bob"}
    listed = repr(api.do(api.admin, "GET", "/tokens"))
    assert mine["secret"][-43:] not in listed
    bobs = principals.token_id(bob)
    assert api.ask(ada, "DELETE", f"/tokens/{bobs}")[0] == 404
    assert api.ask(ada, "POST", "/tokens", {"principal": "bob"})[0] == 404
    assert api.do(bob, "GET", "/whoami")["name"] == "bob"


def test_a_token_is_revoked_at_once(api: Api) -> None:
    ada = api.user("ada")
    revoked = api.do(ada, "DELETE", f"/tokens/{principals.token_id(ada)}")
    assert revoked["revoked_ns"] is not None
    assert api.ask(ada, "GET", "/whoami")[0] == 401


def test_a_token_ends_after_90_days_or_when_it_was_said(api: Api) -> None:
    ada = api.user("ada")
    short = api.do(ada, "POST", "/tokens", {"expires_s": 60})["secret"]
    api.clock.advance(61)
    assert api.ask(short, "GET", "/whoami")[0] == 401
    api.clock.advance(90 * 86_400)
    assert api.ask(ada, "GET", "/whoami")[0] == 401
    assert api.ask(api.admin, "GET", "/whoami")[0] == 401, "the first administrator's, too"


def test_a_token_of_no_time_or_for_ever_is_refused(api: Api) -> None:
    for seconds in (0, -1, 1e12):
        assert api.ask(api.admin, "POST", "/tokens", {"expires_s": seconds})[0] == 400


def test_a_token_with_scopes_is_no_way_to_more(api: Api) -> None:
    scoped = api.do(api.admin, "POST", "/tokens", {"scopes": ["users", "tokens", "teams"]})["secret"]
    assert len(api.do(scoped, "GET", "/users")["principals"]) == 2
    assert api.ask(scoped, "POST", "/users", {"name": "eve", "role": "admin"})[0] == 403
    assert api.ask(scoped, "PATCH", "/users/node", {"role": "admin"})[0] == 403
    assert api.ask(scoped, "POST", "/teams", {"name": "eves"})[0] == 403
    assert api.ask(scoped, "POST", "/tokens", {})[0] == 403
    assert api.ask(scoped, "POST", "/tokens", {"scopes": ["runs"]})[0] == 403
    less = api.do(scoped, "POST", "/tokens", {"scopes": ["users"]})["secret"]
    assert api.ask(less, "GET", "/tokens")[0] == 403


def test_a_token_to_read_changes_nothing(api: Api) -> None:
    reader = api.do(api.admin, "POST", "/tokens", {"scopes": ["read"]})["secret"]
    assert api.ask(reader, "GET", "/users")[0] == 200
    assert api.ask(reader, "POST", "/users", {"name": "eve"})[0] == 403
    assert api.ask(reader, "DELETE", f"/tokens/{principals.token_id(reader)}")[0] == 403


def test_a_node_sees_nobody(api: Api) -> None:
    for path in ("/users", "/teams", "/tokens"):
        assert api.ask(api.node, "GET", path)[0] == 403


def test_who_did_what_is_in_the_audit_without_secrets(api: Api) -> None:
    seen = len(api.audited())
    made = api.do(api.admin, "POST", "/users", {"name": "ada"})
    api.do(api.admin, "POST", "/teams", {"name": "search"})
    for _ in range(2):
        api.do(api.admin, "PUT", "/teams/search/members/ada")
    api.do(api.admin, "PATCH", "/users/ada", {"role": "viewer"})
    api.do(api.admin, "PATCH", "/users/ada", {"role": "viewer"})
    api.do(made["secret"], "DELETE", f"/tokens/{made['token']['id']}")
    assert api.audited()[seen:] == [
        ("root", "user.create", "ada"),
        ("root", "token.create", made["token"]["id"]),
        ("root", "team.create", "search"),
        ("root", "team.add", "search"),
        ("root", "user.change", "ada"),
        ("ada", "token.revoke", made["token"]["id"]),
    ]
    written = repr(api.database.read(audit.entries))
    assert made["secret"][-43:] not in written


def test_bodies_that_cannot_be_are_refused(api: Api) -> None:
    for body in ({"name": "ada", "role": "god"}, {"name": "ada", "kind": "robot"}, {"name": "A"}, {"nam": "ada"}, {}):
        status, said = api.ask(api.admin, "POST", "/users", body)
        assert (status, said["code"]) == (400, "invalid_value")


def test_F35_while_postgresql_is_away_the_answer_is_later_and_then_all_is_well(
    postgres: Cluster, postgres_template: str, tmp_path: Path, clock: FakeClock
) -> None:
    name = postgres.new_database(postgres_template)
    database = Database(postgres.url(name), clock=clock)
    api = Api(made_services(database, tmp_path, clock=clock), database, clock)
    with api.client:
        ada = api.user("ada")
        postgres.stop()
        try:
            answer = api.client.get(f"{API}/whoami", headers={"Authorization": f"Bearer {ada}"})
            assert (answer.status_code, answer.json()["code"]) == (503, "server_unavailable")
            assert int(answer.headers["Retry-After"]) > 0
        finally:
            postgres.start()
        assert api.do(ada, "GET", "/whoami")["name"] == "ada"
        assert [one["name"] for one in api.do(api.admin, "GET", "/users")["principals"]] == ["ada", "node", "root"]
    database.close()
    postgres.drop_database(name)
