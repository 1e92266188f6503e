"""Sessions of browsers: how they begin, how they end, and where their secrets are valid."""

from __future__ import annotations

import functools

import msgspec
import pytest
import sqlalchemy as sa

from serverless_gpu.errors import NotAllowed, NotAuthenticated, NotFound
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.tables import audit, tokens
from serverless_gpu.server.identity.session_service import LINK_S
from serverless_gpu.server.records import principals
from serverless_gpu.server.records.principals import SESSION_IDLE_S, SESSION_S
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.access import PrincipalChange, PrincipalRequest, SessionOrigin

ROOT = Caller(name="root", role="admin")
BROWSER = SessionOrigin(method="link", browser="Firefox", address="127.0.0.1")


@pytest.fixture
def alice(services: Services) -> Caller:
    for name, role in (("root", "admin"), ("alice", "member"), ("bob", "member")):
        request = PrincipalRequest(name=name, kind="user", role=role)  # type: ignore[arg-type]  # from a tuple of texts
        services.database.write(functools.partial(principals.create_principal, request=request, now_ns=1))
    return Caller(name="alice", role="member")


def test_a_link_signs_in_once(services: Services, alice: Caller) -> None:
    code = services.sessions.link(alice).path.partition("code=")[2]
    assert services.sessions.redeem(code) == "alice"
    with pytest.raises(NotAuthenticated):
        services.sessions.redeem(code)


def test_a_link_ends_after_ten_minutes(services: Services, clock: FakeClock, alice: Caller) -> None:
    code = services.sessions.link(alice).path.partition("code=")[2]
    clock.advance(LINK_S + 1)
    with pytest.raises(NotAuthenticated):
        services.sessions.redeem(code)


@pytest.mark.parametrize("changes", [{"scopes": ("read",)}, {"kind": "service"}])
def test_only_a_users_whole_token_makes_a_link(services: Services, alice: Caller, changes: dict[str, object]) -> None:
    with pytest.raises(NotAllowed):
        services.sessions.link(msgspec.structs.replace(alice, **changes))


def test_a_session_is_valid_as_a_cookie_and_nowhere_else(services: Services, alice: Caller) -> None:
    secret = services.sessions.open("alice", BROWSER)
    assert services.authenticator.authenticate_session(secret).name == "alice"
    with pytest.raises(NotAuthenticated):
        services.authenticator.authenticate(secret)


def test_a_token_is_no_session(services: Services, alice: Caller) -> None:
    made = services.principals.make(ROOT, PrincipalRequest(name="carol", kind="user", role="member"))
    with pytest.raises(NotAuthenticated):
        services.authenticator.authenticate_session(made.secret)


@pytest.mark.parametrize("used", [True, False])
def test_a_session_ends_when_unused_and_after_a_week(
    services: Services, clock: FakeClock, alice: Caller, used: bool
) -> None:
    secret, days = services.sessions.open("alice", BROWSER), 0
    while used and days < SESSION_S / 86_400 - 1:
        clock.advance(SESSION_IDLE_S - 60)
        services.authenticator.authenticate_session(secret)
        days += 1
    clock.advance(SESSION_IDLE_S + 60)
    with pytest.raises(NotAuthenticated):
        services.authenticator.authenticate_session(secret)
    assert services.sessions.sessions(alice, reach="own") == ()


def test_sessions_of_a_user_have_a_limit_and_old_ones_leave_the_database(
    services: Services, clock: FakeClock, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(principals, "SESSIONS_MAX", 3)
    secrets = []
    for _ in range(5):
        clock.advance(1)
        secrets.append(services.sessions.open("alice", BROWSER))
    others = services.sessions.open("bob", BROWSER)
    assert len(services.sessions.sessions(alice, reach="own")) == 3
    for secret in secrets[:2]:
        with pytest.raises(NotAuthenticated):
            services.authenticator.authenticate_session(secret)
    assert services.authenticator.authenticate_session(others).name == "bob"
    clock.advance(SESSION_S + principals.SESSION_KEPT_S + 60)
    services.sessions.open("alice", BROWSER)
    query = sa.select(tokens.c.principal).where(tokens.c.kind == "session")
    kept = services.database.read(lambda connection: connection.scalars(query).all())
    assert sorted(kept) == ["alice", "bob"]


def test_disabling_a_user_ends_the_sessions(services: Services, alice: Caller) -> None:
    secret = services.sessions.open("alice", BROWSER)
    services.principals.change(ROOT, "alice", PrincipalChange(disabled=True))
    with pytest.raises(NotAuthenticated):
        services.authenticator.authenticate_session(secret)
    services.principals.change(ROOT, "alice", PrincipalChange(disabled=False))
    with pytest.raises(NotAuthenticated):
        services.authenticator.authenticate_session(secret)


def test_a_user_ends_own_sessions_and_an_administrator_all(services: Services, alice: Caller) -> None:
    secret = services.sessions.open("alice", BROWSER)
    [session] = services.sessions.sessions(alice, reach="own")
    assert session.origin == BROWSER
    bob = Caller(name="bob", role="member")
    assert services.sessions.sessions(bob, reach="own") == ()
    with pytest.raises(NotFound):
        services.sessions.end(bob, session.id, reach="own")
    services.sessions.end(ROOT, session.id, reach="all")
    with pytest.raises(NotAuthenticated):
        services.authenticator.authenticate_session(secret)
    rows = services.database.read(
        lambda connection: connection.execute(sa.select(audit.c.action, audit.c.subject)).all()
    )
    assert {("session.open", session.id), ("session.end", session.id)} <= {tuple(row) for row in rows}


def test_a_session_cannot_be_ended_as_a_token_of_the_list(services: Services, alice: Caller) -> None:
    services.sessions.open("alice", BROWSER)
    assert services.database.read(lambda connection: principals.tokens_of(connection, "alice")) == ()
