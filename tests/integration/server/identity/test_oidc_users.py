"""Which user an account at an identity provider is: linked, created, or neither; and what its groups change."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue, NotAllowed, NotAuthenticated, NotFound
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.settings import OidcSettings
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.db.tables import audit
from serverless_gpu.server.identity.oidc_service import TICKET_S
from serverless_gpu.server.identity.provider_accounts import Account
from serverless_gpu.server.records import principals
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.access import PrincipalChange, PrincipalRequest, SessionOrigin
from tests.support.server.made import made_services

ISSUER = "https://login.example"
ADA = Account(issuer=ISSUER, subject="42", name="ada", shown="ada@lab.example")
ROOT = Caller(name="root", role="admin")


class Team:
    """Services of a server with an identity provider, and users root (the only administrator) and bob."""

    def __init__(self, database: Database, home: Path, clock: FakeClock) -> None:
        self._database, self._home, self._clock = database, home, clock
        self.services = self.with_settings()
        for name, role in (("root", "admin"), ("bob", "member")):
            request = PrincipalRequest(name=name, role=role)  # type: ignore[arg-type]  # from a tuple of texts
            database.write(functools.partial(principals.create_principal, request=request, now_ns=1))

    def with_settings(self, **changes: Any) -> Services:
        oidc = OidcSettings(issuer=ISSUER, client_id="sgpu", **changes)
        self.services = made_services(self._database, self._home, clock=self._clock, oidc=oidc)
        return self.services

    def user(self, name: str) -> Any:
        return self._database.read(lambda connection: principals.principal(connection, name))


@pytest.fixture
def team(database: Database, tmp_path: Path, clock: FakeClock) -> Team:
    return Team(database, tmp_path, clock)


def test_an_unknown_account_gets_no_user_unless_the_settings_say_so(team: Team) -> None:
    result = team.services.oidc.sign_in(ADA, links=False)
    assert (result.principal, bool(result.ticket)) == ("", True)
    with pytest.raises(NotFound):
        team.user("ada")
    assert team.with_settings(create=True).oidc.sign_in(ADA, links=False).principal == "ada"
    assert (team.user("ada").role, team.user("ada").kind) == ("member", "user")


def test_an_account_stays_the_same_user_whatever_its_name_and_address_become(team: Team) -> None:
    services = team.with_settings(create=True)
    services.oidc.sign_in(ADA, links=False)
    renamed = msgspec.structs.replace(ADA, name="countess", shown="countess@lab.example")
    assert services.oidc.sign_in(renamed, links=False).principal == "ada"


def test_another_account_with_a_taken_name_or_address_is_not_its_user(team: Team) -> None:
    services = team.with_settings(create=True)
    services.oidc.sign_in(ADA, links=False)
    for other in (
        msgspec.structs.replace(ADA, subject="43"),
        msgspec.structs.replace(ADA, issuer="https://evil.example"),
        msgspec.structs.replace(ADA, subject="44", name="root"),
    ):
        result = services.oidc.sign_in(other, links=False)
        assert (result.principal, bool(result.ticket)) == ("", True)
        assert other.name in result.reason


@pytest.mark.parametrize("name", ["", "server", "attempt", "node"])
def test_a_name_of_the_servers_own_makes_no_user(team: Team, name: str) -> None:
    account = msgspec.structs.replace(ADA, name=name)
    assert team.with_settings(create=True).oidc.sign_in(account, links=False).principal == ""


def test_a_signed_in_user_links_an_account_once(team: Team, clock: FakeClock) -> None:
    oidc, bob = team.services.oidc, Caller(name="bob", role="member")
    ticket = oidc.sign_in(ADA, links=True).ticket
    assert oidc.account_of(ticket) == ADA
    linked = oidc.link(bob, ticket)
    assert (linked.principal, linked.issuer, linked.subject) == ("bob", ISSUER, "42")
    assert oidc.sign_in(ADA, links=False).principal == "bob"
    with pytest.raises(NotFound):
        oidc.link(ROOT, ticket)
    late = oidc.sign_in(msgspec.structs.replace(ADA, subject="9"), links=True).ticket
    clock.advance(TICKET_S + 1)
    with pytest.raises(NotFound):
        oidc.link(bob, late)


def test_an_account_belongs_to_one_user(team: Team) -> None:
    oidc = team.services.oidc
    first, second = oidc.sign_in(ADA, links=True).ticket, oidc.sign_in(ADA, links=True).ticket
    oidc.link(Caller(name="bob", role="member"), first)
    with pytest.raises(InvalidValue):
        oidc.link(ROOT, second)


@pytest.mark.parametrize("changes", [{"scopes": ("tokens",)}, {"kind": "service"}])
def test_only_a_whole_users_sign_in_links(team: Team, changes: dict[str, Any]) -> None:
    ticket = team.services.oidc.sign_in(ADA, links=True).ticket
    with pytest.raises(NotAllowed):
        team.services.oidc.link(Caller(name="bob", role="member", **changes), ticket)


def test_an_unlinked_account_signs_in_no_longer_and_its_sessions_end(team: Team) -> None:
    services = team.services
    bob = Caller(name="bob", role="member")
    linked = services.oidc.link(bob, services.oidc.sign_in(ADA, links=True).ticket)
    there = services.sessions.open("bob", SessionOrigin(method="provider"))
    other = services.sessions.open("bob", SessionOrigin(method="token"))
    with pytest.raises(NotFound):
        services.oidc.unlink(Caller(name="eve", role="member"), linked.id, reach="own")
    services.oidc.unlink(bob, linked.id, reach="own")
    assert services.oidc.sign_in(ADA, links=False).principal == ""
    with pytest.raises(NotAuthenticated):
        services.authenticator.authenticate_session(there)
    assert services.authenticator.authenticate_session(other).name == "bob"


def test_a_disabled_user_cannot_sign_in_and_keeps_role_and_teams(team: Team) -> None:
    services = team.with_settings(create=True, roles={"ops": "operator"})
    services.oidc.sign_in(ADA, links=False)
    services.principals.change(ROOT, "ada", PrincipalChange(disabled=True))
    name = services.oidc.sign_in(msgspec.structs.replace(ADA, groups=("ops",)), links=False).principal
    assert team.user("ada").role == "member"
    with pytest.raises(NotAuthenticated):
        services.sessions.open(name, SessionOrigin(method="provider"))


def test_groups_decide_role_and_mapped_teams_at_each_sign_in(team: Team) -> None:
    services = team.with_settings(create=True, roles={"ops": "operator"}, teams={"g-vision": "vision", "g-x": "x"})
    services.principals.make_team(ROOT, "own")
    services.oidc.sign_in(msgspec.structs.replace(ADA, groups=("ops", "g-vision")), links=False)
    services.principals.set_member(ROOT, team="own", principal="ada", member=True)
    assert (team.user("ada").role, team.user("ada").teams) == ("operator", ("own", "vision"))
    services.oidc.sign_in(msgspec.structs.replace(ADA, groups=("g-x",)), links=False)
    assert (team.user("ada").role, team.user("ada").teams) == ("member", ("own", "x"))


def test_without_a_mapping_of_roles_an_administrators_choice_stays(team: Team) -> None:
    services = team.with_settings(create=True)
    services.oidc.sign_in(ADA, links=False)
    services.principals.change(ROOT, "ada", PrincipalChange(role="operator"))
    services.oidc.sign_in(msgspec.structs.replace(ADA, groups=("any",)), links=False)
    assert team.user("ada").role == "operator"


def test_the_only_administrator_is_never_demoted(team: Team) -> None:
    services = team.with_settings(roles={"boss": "admin"})
    services.oidc.link(ROOT, services.oidc.sign_in(ADA, links=True).ticket)
    assert services.oidc.sign_in(ADA, links=False).principal == "root"
    assert team.user("root").role == "admin"


def test_the_audit_says_who_linked_and_created_what(team: Team, database: Database) -> None:
    services = team.with_settings(create=True)
    services.oidc.sign_in(ADA, links=False)
    query = sa.select(audit.c.principal, audit.c.action, audit.c.subject)
    found = {tuple(row) for row in database.read(lambda connection: connection.execute(query).all())}
    assert {("server", "user.create", "ada"), ("server", "identity.link", "ada")} <= found


def test_a_deleted_user_leaves_no_account_behind(team: Team) -> None:
    services = team.with_settings(create=True)
    services.oidc.sign_in(ADA, links=False)
    services.principals.delete(ROOT, "ada")
    assert services.oidc.sign_in(ADA, links=True).principal == ""
