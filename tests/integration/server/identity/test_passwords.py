"""Passwords: who sets them, what an attacker learns and how often may try, and the links of administrators."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from argon2 import PasswordHasher

from serverless_gpu.errors import (
    InvalidValue,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    ServerlessGpuError,
    TooManyRequests,
)
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.settings import OidcSettings
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.db.tables import passwords
from serverless_gpu.server.identity import password_service
from serverless_gpu.server.identity.password_service import PER_ADDRESS, PER_USER, RESET_S, PasswordService
from serverless_gpu.server.records import principals
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.access import PrincipalRequest, SessionOrigin
from serverless_gpu.wire.sign_in import PasswordRequest
from tests.support.server.made import made_services

pytestmark = pytest.mark.any_database
ROOT, ALICE = Caller(name="root", role="admin"), Caller(name="alice", role="member", token_id="t")
GOOD, BETTER = "correct horse battery", "staple of another horse"
HERE = "10.0.0.1"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute hashes in a millisecond."""
    hasher = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    monkeypatch.setattr(password_service, "PasswordHasher", lambda: hasher)


@pytest.fixture
def services(database: Database, tmp_path: Path, clock: FakeClock) -> Services:
    """Return services with the users root and alice, and the service bot."""
    made = made_services(database, tmp_path, clock=clock)
    for name, role, kind in (("root", "admin", "user"), ("alice", "member", "user"), ("bot", "member", "service")):
        request = PrincipalRequest(name=name, role=role, kind=kind)  # type: ignore[arg-type]  # from a tuple of texts
        database.write(functools.partial(principals.create_principal, request=request, now_ns=1))
    return made


@pytest.fixture
def own(services: Services) -> PasswordService:
    """Return passwords of a server on which alice has one."""
    services.passwords.change(ALICE, "alice", PasswordRequest(password=GOOD), reach="own")
    return services.passwords


def refusal(own: PasswordService, name: str, password: str, address: str = HERE) -> ServerlessGpuError:
    with pytest.raises(ServerlessGpuError) as caught:
        own.authenticate(name, password, address=address)
    return caught.value


def test_a_name_and_its_password_sign_in(own: PasswordService) -> None:
    assert own.authenticate("alice", GOOD, address=HERE) == "alice"
    assert own.authenticate(" Alice ", GOOD, address=HERE) == "alice"


def test_only_a_hash_is_stored(own: PasswordService, database: Database) -> None:
    row = database.read(lambda connection: connection.execute(sa.select(passwords)).one())
    assert row.hash.startswith("$argon2id$")
    assert GOOD not in str(tuple(row))


def test_an_unknown_user_and_a_wrong_password_look_alike(own: PasswordService, monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[str] = []
    verify = PasswordHasher.verify

    def count(hasher: PasswordHasher, text: str, password: str) -> bool:
        verified.append(password)
        return bool(verify(hasher, text, password))

    monkeypatch.setattr(PasswordHasher, "verify", count)
    found = {
        (type(error), error.message, error.hint)
        for error in (refusal(own, name, "wrong") for name in ("alice", "nobody", "root", "bot", "", "x" * 100))
    }
    assert len(found) == 1
    assert len(verified) == 6  # Each of them takes the time of one computation.


def test_wrong_passwords_of_one_user_have_a_limit_that_refills(own: PasswordService, clock: FakeClock) -> None:
    for number in range(PER_USER.attempts):
        assert isinstance(refusal(own, "alice", "wrong", f"10.0.1.{number}"), NotAuthenticated)
    assert isinstance(refusal(own, "alice", GOOD, "10.0.2.1"), TooManyRequests)
    for number in range(PER_USER.attempts):
        refusal(own, "nobody", "wrong", f"10.0.3.{number}")
    assert isinstance(refusal(own, "nobody", "wrong", "10.0.2.1"), TooManyRequests)
    clock.advance(PER_USER.seconds / PER_USER.attempts + 1)
    assert own.authenticate("alice", GOOD, address="10.0.2.1") == "alice"


def test_wrong_passwords_from_one_address_have_a_limit(own: PasswordService) -> None:
    for number in range(PER_ADDRESS.attempts):
        assert isinstance(refusal(own, f"user{number}", "wrong"), NotAuthenticated)
    assert isinstance(refusal(own, "alice", GOOD), TooManyRequests)
    assert own.authenticate("alice", GOOD, address="10.0.0.2") == "alice"


def test_right_passwords_are_not_counted(own: PasswordService) -> None:
    for _ in range(2 * PER_ADDRESS.attempts):
        own.authenticate("alice", GOOD, address=HERE)


@pytest.mark.parametrize("password", ["", "short", "x" * 11, "aaaaaaaaaaaaaaaa", "alicealicealice", "alice-alice1"])
def test_a_password_that_is_easy_to_guess_is_refused(services: Services, password: str) -> None:
    with pytest.raises(InvalidValue):
        services.passwords.change(ALICE, "alice", PasswordRequest(password=password), reach="own")


def test_changing_an_own_password_needs_the_current_one_and_ends_other_sessions(
    services: Services, own: PasswordService
) -> None:
    kept = services.sessions.open("alice", SessionOrigin(method="password"))
    other = services.sessions.open("alice", SessionOrigin(method="password"))
    who = services.authenticator.authenticate_session(kept)
    for current in ("", "wrong"):
        with pytest.raises(NotAllowed):
            own.change(who, "alice", PasswordRequest(password=BETTER, current=current), reach="own")
    own.change(who, "alice", PasswordRequest(password=BETTER, current=GOOD), reach="own")
    assert services.authenticator.authenticate_session(kept).name == "alice"
    with pytest.raises(NotAuthenticated):
        services.authenticator.authenticate_session(other)
    assert own.authenticate("alice", BETTER, address=HERE) == "alice"
    assert isinstance(refusal(own, "alice", GOOD), NotAuthenticated)


def test_the_current_password_cannot_be_guessed_in_a_stolen_session(own: PasswordService) -> None:
    request = PasswordRequest(password=BETTER, current="wrong")
    for _ in range(PER_USER.attempts):
        with pytest.raises(NotAllowed):
            own.change(ALICE, "alice", request, reach="own")
    with pytest.raises(TooManyRequests):
        own.change(ALICE, "alice", request, reach="own")


@pytest.mark.parametrize(
    ("who", "name", "reach"),
    [
        (ALICE, "root", "own"),
        (ALICE, "nobody", "own"),
        (ROOT, "nobody", "all"),
        (ROOT, "bot", "all"),
        (Caller(name="root", role="admin", scopes=("tokens",)), "alice", "all"),
    ],
)
def test_others_passwords_services_and_scoped_tokens_are_refused(
    services: Services, who: Caller, name: str, reach: str
) -> None:
    with pytest.raises(ServerlessGpuError):
        services.passwords.change(who, name, PasswordRequest(password=GOOD), reach=reach)


def test_an_administrators_link_sets_a_password_once(services: Services, own: PasswordService) -> None:
    session = services.sessions.open("alice", SessionOrigin(method="password"))
    code = own.link(ROOT, "alice", reach="all").path.partition("code=")[2]
    assert own.user_of_link(code) == "alice"
    with pytest.raises(InvalidValue):
        own.reset(code, "short")
    assert own.reset(code, BETTER) == "alice"
    with pytest.raises(NotAuthenticated):
        services.authenticator.authenticate_session(session)
    with pytest.raises(NotFound):
        own.reset(code, GOOD)
    assert own.authenticate("alice", BETTER, address=HERE) == "alice"


def test_a_link_survives_a_restart_ends_after_a_day_and_gives_way_to_the_next(
    services: Services, database: Database, tmp_path: Path, clock: FakeClock
) -> None:
    first = services.passwords.link(ROOT, "alice", reach="all").path.partition("code=")[2]
    again = made_services(database, tmp_path, clock=clock).passwords
    assert again.user_of_link(first) == "alice"
    second = again.link(ROOT, "alice", reach="all").path.partition("code=")[2]
    with pytest.raises(NotFound):
        again.user_of_link(first)
    clock.advance(RESET_S + 1)
    with pytest.raises(NotFound):
        again.user_of_link(second)


def test_only_an_administrator_makes_links(services: Services) -> None:
    with pytest.raises(NotAllowed):
        services.passwords.link(ALICE, "alice", reach="own")


def test_a_removed_password_signs_in_no_longer(services: Services, own: PasswordService) -> None:
    own.remove(ALICE, "alice", reach="own")
    assert isinstance(refusal(own, "alice", GOOD), NotAuthenticated)
    assert not own.has_passwords()
    with pytest.raises(NotFound):
        own.remove(ALICE, "alice", reach="own")


@pytest.mark.parametrize("action", ["authenticate", "change", "link", "reset"])
def test_beside_an_identity_provider_there_are_no_passwords(
    own: PasswordService, database: Database, tmp_path: Path, clock: FakeClock, action: str
) -> None:
    oidc = OidcSettings(issuer="https://login.example", client_id="sgpu")
    off = made_services(database, tmp_path, clock=clock, oidc=oidc).passwords
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "authenticate": (("alice", GOOD), {"address": HERE}),
        "change": ((ALICE, "alice", PasswordRequest(password=BETTER, current=GOOD)), {"reach": "own"}),
        "link": ((ROOT, "alice"), {"reach": "all"}),
        "reset": (("code", GOOD), {}),
    }
    given, named = arguments[action]
    with pytest.raises(NotAllowed):
        getattr(off, action)(*given, **named)
    assert not off.has_passwords()
