"""What an identity provider says is checked: who it speaks to, for which sign-in, with which key, and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from joserfc.jwk import OctKey, RSAKey

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import NotAuthenticated, ServerlessGpuError, ServerUnavailable
from serverless_gpu.server.core.settings import OidcSettings
from serverless_gpu.server.identity import oidc_provider
from serverless_gpu.server.identity.login_state import LoginState
from serverless_gpu.server.identity.oidc_provider import OidcProvider
from serverless_gpu.server.identity.provider_accounts import Account
from serverless_gpu.testing import FakeClock
from tests.support.server.identity_provider import CLIENT, SECRET, SmallProvider, small_provider

BACK = "https://gpus.example/ui/sign-in/callback"


@pytest.fixture(scope="module")
def running() -> Iterator[SmallProvider]:
    with small_provider() as provider:
        yield provider


@pytest.fixture
def small(running: SmallProvider) -> Iterator[SmallProvider]:
    """Yield the provider of this file as it is at first."""
    key, known = running.key, running.known
    running.claims = {"sub": "42", "preferred_username": "ada", "email": "ada@lab.example"}
    yield running
    running.key, running.known, running.changes, running.userinfo, running.metadata = key, known, {}, None, {}
    running.algorithm, running.ahead_s, running.is_down, running.calls = "RS256", 0, False, []


def speaks_to(small: SmallProvider, **changes: Any) -> OidcProvider:
    settings = {"issuer": small.issuer, "client_id": CLIENT, "client_secret": SECRET, **changes}
    return OidcProvider(OidcSettings(**settings), clock=SystemClock())


def sign_in(provider: OidcProvider, small: SmallProvider, **changes: str) -> Account:
    """Sign in from the beginning to the account. `changes` are values of the callback that are not as sent."""
    login = LoginState.random(to="/", links=False, now_ns=SystemClock().wall_ns())
    callback = small.authorize(provider.authorization_url(login, redirect=BACK))
    code = callback.partition("code=")[2].partition("&")[0]
    said = {"code": code, "state": login.state, "issuer": "", "redirect": BACK, **changes}
    return provider.account(login, **said)


def test_an_account_is_its_issuer_and_subject(small: SmallProvider) -> None:
    found = sign_in(speaks_to(small), small)
    assert (found.issuer, found.subject, found.name, found.shown) == (small.issuer, "42", "ada", "ada@lab.example")


@pytest.mark.parametrize(
    "changes",
    [
        {"iss": "https://evil.example"},
        {"iss": None},
        {"aud": "another"},
        {"aud": None},
        {"aud": [CLIENT, "another"], "azp": "another"},
        {"aud": [CLIENT, "another"]},
        {"nonce": "another"},
        {"nonce": None},
        {"exp": 1},
        {"exp": None},
        {"exp": "soon"},
        {"iat": None},
        {"sub": None},
        {"at_hash": "another"},
    ],
)
def test_an_id_token_that_is_not_for_this_sign_in_is_refused(small: SmallProvider, changes: dict[str, Any]) -> None:
    small.changes = changes
    with pytest.raises(ServerlessGpuError) as caught:
        sign_in(speaks_to(small), small)
    assert caught.value.status in (401, 403)


def test_a_key_that_the_provider_does_not_name_signs_nothing(small: SmallProvider) -> None:
    small.key = RSAKey.generate_key(2048, auto_kid=True)
    with pytest.raises(NotAuthenticated):
        sign_in(speaks_to(small), small)


def test_a_shared_secret_signs_nothing(small: SmallProvider) -> None:
    secret = OctKey.import_key(SECRET * 8, {"kid": str(small.key.kid)})
    small.algorithm, small.key = "HS256", secret  # type: ignore[assignment]  # a wrong key on purpose
    with pytest.raises(NotAuthenticated):
        sign_in(speaks_to(small), small)


def test_new_keys_of_the_provider_are_read_at_the_next_sign_in(
    small: SmallProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = speaks_to(small)
    sign_in(provider, small)
    small.rotate()
    small.calls.clear()
    with pytest.raises(NotAuthenticated):  # The keys were read a moment ago.
        sign_in(provider, small)
    assert "/keys" not in small.calls
    monkeypatch.setattr(oidc_provider, "KEYS_S", 0.0)
    assert sign_in(provider, small).subject == "42"


@pytest.mark.parametrize(("ahead_s", "is_valid"), [(0, True), (100, True), (-390, True), (150, False), (-450, False)])
def test_clocks_may_differ_by_two_minutes(small: SmallProvider, ahead_s: int, is_valid: bool) -> None:
    small.ahead_s = ahead_s
    if is_valid:
        sign_in(speaks_to(small), small)
    else:
        with pytest.raises(NotAuthenticated):
            sign_in(speaks_to(small), small)


def test_a_callback_of_another_browser_is_refused(small: SmallProvider) -> None:
    provider = speaks_to(small)
    for changes in ({"state": "another"}, {"issuer": "https://evil.example"}, {"code": "another"}):
        with pytest.raises(NotAuthenticated):
            sign_in(provider, small, **changes)


def test_a_stolen_code_is_useless_without_the_verifier_of_its_browser(small: SmallProvider) -> None:
    provider = speaks_to(small)
    login = LoginState.random(to="/", links=False, now_ns=SystemClock().wall_ns())
    code = small.authorize(provider.authorization_url(login, redirect=BACK)).partition("code=")[2].partition("&")[0]
    thief = LoginState.random(to="/", links=False, now_ns=SystemClock().wall_ns())
    with pytest.raises(NotAuthenticated):
        provider.account(thief, code=code, state=thief.state, issuer="", redirect=BACK)


def test_a_sign_in_ends_after_ten_minutes(small: SmallProvider) -> None:
    clock = FakeClock()
    settings = OidcSettings(issuer=small.issuer, client_id=CLIENT, client_secret=SECRET)
    provider = OidcProvider(settings, clock=clock)
    login = LoginState.random(to="/", links=False, now_ns=clock.wall_ns())
    clock.advance(601)
    with pytest.raises(NotAuthenticated):
        provider.account(login, code="x", state=login.state, issuer="", redirect=BACK)


def test_a_provider_that_is_down_is_named_with_another_way(small: SmallProvider) -> None:
    provider = speaks_to(small)
    small.is_down = True
    with pytest.raises(ServerUnavailable) as caught:
        sign_in(provider, small)
    assert "sgpu web" in caught.value.hint
    with pytest.raises(ServerUnavailable):
        speaks_to(small, issuer="http://127.0.0.1:9").sign_out_url(back=BACK)


@pytest.mark.parametrize(
    "metadata",
    [
        {"issuer": "https://evil.example"},
        {"token_endpoint": "http://evil.example/token"},
        {"jwks_uri": "ftp://evil.example/keys"},
        {"authorization_endpoint": "javascript:alert(1)"},
        {"jwks_uri": 7},
        {"padding": "x" * (1 << 20)},
    ],
)
def test_metadata_of_somebody_else_is_refused(small: SmallProvider, metadata: dict[str, Any]) -> None:
    small.metadata = metadata
    with pytest.raises(ServerUnavailable):
        sign_in(speaks_to(small), small)


def test_what_the_token_does_not_say_the_user_information_does(small: SmallProvider) -> None:
    small.claims, small.userinfo = {"sub": "42"}, {"preferred_username": "ada"}
    assert sign_in(speaks_to(small), small).name == "ada"
    small.userinfo = {"sub": "43", "preferred_username": "ada"}
    with pytest.raises(NotAuthenticated):
        sign_in(speaks_to(small), small)


def test_a_wrong_secret_of_this_server_is_named(small: SmallProvider) -> None:
    with pytest.raises(NotAuthenticated) as caught:
        sign_in(speaks_to(small, client_secret="wrong"), small)
    assert "invalid_client" in caught.value.message


def test_secrets_are_not_in_what_is_printed(small: SmallProvider) -> None:
    login = LoginState.random(to="/", links=False, now_ns=0)
    printed = repr(login) + repr(OidcSettings(issuer="i", client_id="c", client_secret=SECRET))
    assert not any(secret in printed for secret in (SECRET, login.verifier, login.nonce))
    assert msgspec.json.decode(msgspec.json.encode(login), type=LoginState) == login
