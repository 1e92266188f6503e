"""Speaks to an identity provider: OpenID Connect, authorization code flow with PKCE.

    browser ─ GET /ui/sign-in/provider ─▶ cookie with state, nonce, verifier ─▶ provider: authorization endpoint
    browser ◀─ provider ─▶ GET /ui/sign-in/callback?code&state ─▶ `account`: code + verifier ─▶ ID token, verified

`OidcProvider` verifies an ID token's signature, issuer, audience, times and nonce with Authlib. It accepts only
signatures with public keys. It reads the provider's metadata and keys again after an hour, and the keys also if no
known key fits.

Failure cases:
* If the provider does not answer within ten seconds, the sign-in fails. Other ways to sign in work.
* If the provider has replaced its keys, the next sign-in reads the new keys, at most once every ten seconds.
* The clocks of both machines may differ by two minutes.
"""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
import msgspec
from authlib.common.urls import add_params_to_uri
from authlib.oauth2.auth import ClientAuth
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri, prepare_token_request
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import NotAuthenticated, ServerUnavailable, TooManyRequests
from serverless_gpu.json_codec import from_json
from serverless_gpu.server.core.settings import OidcSettings
from serverless_gpu.server.identity.login_state import LoginState
from serverless_gpu.server.identity.provider_accounts import Account, account_of, missing_claims

ANSWER_S = 10.0
ANSWER_BYTES_MAX = 1 << 20
METADATA_S = 3600.0
KEYS_S = 10.0
"""Minimum seconds between two reads of the keys."""
SKEW_S = 120
ASKING_MAX = 4
"""Maximum number of concurrent requests to the provider, so that a slow provider does not occupy all threads."""
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
"""Signatures with public keys. A shared secret (HS256) or no signature is not enough."""
_HOSTS = ("127.0.0.1", "localhost", "::1")
T = TypeVar("T")


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """The provider's metadata (OpenID Connect Discovery 1.0), as far as the server uses it."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    userinfo_endpoint: str = ""
    end_session_endpoint: str = ""
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)


class OidcProvider:
    """An identity provider. Thread-safe; the methods block."""

    def __init__(self, settings: OidcSettings, *, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._asking = threading.BoundedSemaphore(ASKING_MAX)
        self._metadata: tuple[Metadata, int] | None = None
        self._keys: tuple[KeySet, int] | None = None

    def authorization_url(self, login: LoginState, *, redirect: str) -> str:
        """Return the provider's address that the browser opens for a sign-in."""
        return str(
            prepare_grant_uri(
                self._read_metadata().authorization_endpoint,
                client_id=self._settings.client_id,
                response_type="code",
                redirect_uri=redirect,
                scope=" ".join(self._settings.scopes),
                state=login.state,
                nonce=login.nonce,
                code_challenge=create_s256_code_challenge(login.verifier),
                code_challenge_method="S256",
                prompt="select_account" if login.links else None,
            )
        )

    def account(self, login: LoginState, *, code: str, state: str, issuer: str, redirect: str) -> Account:
        """Return the account of a callback.

        Args:
            login: values of the browser's cookie.
            code: authorization code of the callback.
            state: state of the callback.
            issuer: issuer of the callback (RFC 9207), or "".
            redirect: address of the callback, as in the request.

        Raises:
            NotAuthenticated: the callback does not belong to the browser, or the ID token is not valid.
            NotAllowed: the account may not sign in.
            ServerUnavailable: the provider does not answer.
        """
        if not hmac.compare_digest(state.encode(), login.state.encode()):
            raise NotAuthenticated("the sign-in did not begin in this browser", hint="begin again")
        if login.until_s * 1_000_000_000 < self._clock.wall_ns():
            raise NotAuthenticated("the sign-in took longer than ten minutes", hint="begin again")
        metadata = self._read_metadata()
        if issuer and issuer != metadata.issuer:
            raise NotAuthenticated("another identity provider answered", hint="begin again")
        tokens = self._exchange(metadata, login, code, redirect)
        text, access_token = tokens.get("id_token"), tokens.get("access_token")
        if not isinstance(text, str):
            raise NotAuthenticated("the identity provider sent no ID token", hint=_REGISTRATION)
        claims = self._verified(metadata, text, login.nonce, access_token)
        if metadata.userinfo_endpoint and isinstance(access_token, str) and missing_claims(self._settings, claims):
            headers = {"Authorization": f"Bearer {access_token}"}
            said = self._ask("GET", metadata.userinfo_endpoint, dict[str, Any], headers=headers)
            if said.get("sub") != claims.get("sub"):
                raise NotAuthenticated("the identity provider named two accounts", hint="begin again")
            claims = {**said, **claims}
        return account_of(self._settings, claims, issuer=metadata.issuer)

    def sign_out_url(self, *, back: str) -> str:
        """Return the provider's address that ends the browser's session there, or "" without support."""
        endpoint = self._read_metadata().end_session_endpoint
        parameters = [("client_id", self._settings.client_id), ("post_logout_redirect_uri", back)]
        return str(add_params_to_uri(endpoint, parameters)) if endpoint else ""

    def _exchange(self, metadata: Metadata, login: LoginState, code: str, redirect: str) -> dict[str, Any]:
        body = prepare_token_request(
            "authorization_code", redirect_uri=redirect, code=code, code_verifier=login.verifier
        )
        method = "none"
        if self._settings.client_secret:
            offered = metadata.token_endpoint_auth_methods_supported
            is_post = "client_secret_basic" not in offered and "client_secret_post" in offered
            method = "client_secret_post" if is_post else "client_secret_basic"
        client = ClientAuth(self._settings.client_id, self._settings.client_secret, method)
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        url, headers, body = client.prepare("POST", metadata.token_endpoint, headers, body)
        return self._ask("POST", url, dict[str, Any], headers=headers, content=body)

    def _verified(self, metadata: Metadata, text: str, nonce: str, access_token: object) -> dict[str, Any]:
        """Return the claims of an ID token with a valid signature for this server and this sign-in."""
        try:
            try:
                token = jwt.decode(text, self._read_keys(metadata), algorithms=ALGORITHMS)
            except (JoseError, ValueError):
                # The provider may have replaced its keys.
                token = jwt.decode(text, self._read_keys(metadata, again=True), algorithms=ALGORITHMS)
            claims = CodeIDToken(
                token.claims,
                token.header,
                options={
                    "iss": {"essential": True, "value": metadata.issuer},
                    "aud": {"essential": True, "value": self._settings.client_id},
                },
                params={"nonce": nonce, "client_id": self._settings.client_id, "access_token": access_token},
            )
            claims.validate(now=self._clock.wall_ns() // 1_000_000_000, leeway=SKEW_S)
        except (JoseError, ValueError, TypeError) as error:
            reason = getattr(error, "error", "") or type(error).__name__
            raise NotAuthenticated(
                f"the ID token of the identity provider is not valid: {reason}",
                hint="begin again. If the error repeats, compare the clocks of both machines",
            ) from error
        return dict(claims)

    def _read_metadata(self) -> Metadata:
        now_ns = self._clock.boottime_ns()
        with self._lock:
            known = self._metadata
        if known is not None and now_ns - known[1] < METADATA_S * 1e9:
            return known[0]
        url = self._settings.issuer.rstrip("/") + "/.well-known/openid-configuration"
        try:
            found = self._ask("GET", url, Metadata)
        except ServerUnavailable:
            if known is None:
                raise
            return known[0]  # The provider may answer its other endpoints.
        if found.issuer.rstrip("/") != self._settings.issuer.rstrip("/"):
            raise ServerUnavailable(
                f"the identity provider calls itself {found.issuer[:200]!r}", hint="correct the setting oidc_issuer"
            )
        endpoints = (found.authorization_endpoint, found.token_endpoint, found.jwks_uri)
        for endpoint in (*endpoints, found.userinfo_endpoint, found.end_session_endpoint):
            _check_endpoint(endpoint)
        with self._lock:
            self._metadata = (found, now_ns)
        return found

    def _read_keys(self, metadata: Metadata, *, again: bool = False) -> KeySet:
        now_ns = self._clock.boottime_ns()
        with self._lock:
            known = self._keys
        limit_s = KEYS_S if again else METADATA_S
        if known is not None and now_ns - known[1] < limit_s * 1e9:
            return known[0]
        found = self._ask("GET", metadata.jwks_uri, dict[str, Any])
        keys = KeySet.import_key_set(found)  # type: ignore[arg-type] # joserfc checks the content
        with self._lock:
            self._keys = (keys, now_ns)
        return keys

    def _ask(
        self, method: str, url: str, answer: type[T], *, headers: Mapping[str, str] | None = None, content: str = ""
    ) -> T:
        """Return the JSON answer of an endpoint."""
        host = urlsplit(url).netloc
        if not self._asking.acquire(blocking=False):
            raise TooManyRequests("too many users sign in at this moment", hint="try again in a few seconds")
        try:
            with (
                httpx2.Client(timeout=ANSWER_S, follow_redirects=False) as client,
                client.stream(
                    method, url, headers={"Accept": "application/json", **(headers or {})}, content=content or None
                ) as response,
            ):
                data = b""
                for piece in response.iter_bytes():
                    data += piece
                    if len(data) > ANSWER_BYTES_MAX:
                        raise ServerUnavailable(f"the answer of {host} is too long", hint=_OTHER_WAY)
                status = response.status_code
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise ServerUnavailable(
                f"the identity provider {host} does not answer: {type(error).__name__}", hint=_OTHER_WAY
            ) from error
        finally:
            self._asking.release()
        if status >= 500:
            raise ServerUnavailable(f"the identity provider {host} answered with status {status}", hint=_OTHER_WAY)
        if status >= 400:
            raise NotAuthenticated(
                f"the identity provider {host} refused the sign-in: {_error_of(data)}", hint=_REGISTRATION
            )
        try:
            return from_json(data, answer)
        except msgspec.MsgspecError as error:
            raise ServerUnavailable(f"the answer of {host} cannot be understood", hint=_OTHER_WAY) from error


_OTHER_WAY = "try again, or sign in in another way, for example with `sgpu web` on the server's machine"
_REGISTRATION = "begin again. If the error repeats, compare the registration of this server at the provider"


def _check_endpoint(url: str) -> None:
    parts = urlsplit(url)
    is_safe = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _HOSTS)
    if url and not is_safe:
        raise ServerUnavailable(
            "the identity provider names an endpoint without TLS", hint="ask the administrator of the provider"
        )


def _error_of(data: bytes) -> str:
    try:
        found = json.loads(data)
    except ValueError:
        return "no reason given"
    error = found.get("error") if isinstance(found, dict) else None
    return "".join(filter(str.isprintable, str(error)))[:100] if error else "no reason given"
