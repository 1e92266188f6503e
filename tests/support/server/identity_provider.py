"""Identity providers for tests: a small one whose answers a test decides, and `oidc-provider-mock` as a process.

with small_provider() as provider:
    provider.claims = {"sub": "42", "email": "ada@lab.example"}
    with served(home, oidc_issuer=provider.issuer, oidc_client_id="sgpu"): …

The small provider checks the redirect address and PKCE as a real one does.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx2
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey

from tests.support.ports import own_port

CLIENT = "sgpu"
SECRET = "s3cret"


class SmallProvider:
    """A provider in a thread.

    Attributes:
        claims: of the account that signs in next.
        changes: claims of the ID token that are not as they should be; None leaves a claim out.
        userinfo: what the user information says beside `sub`; None for no such endpoint.
        metadata: changes of the metadata.
        key: that signs.
        known: the keys at the address of keys.
        algorithm: of the signature.
        ahead_s: how far the clock is ahead.
        is_down: every answer has the status 503.
        calls: paths that were asked for.
    """

    def __init__(self) -> None:
        self.claims: dict[str, Any] = {"sub": "1"}
        self.changes: dict[str, Any] = {}
        self.userinfo: dict[str, Any] | None = None
        self.metadata: dict[str, Any] = {}
        self.key = RSAKey.generate_key(2048, auto_kid=True)
        self.known: list[Any] = [self.key]
        self.algorithm = "RS256"
        self.ahead_s = 0
        self.is_down = False
        self.calls: list[str] = []
        self.codes: dict[str, dict[str, str]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def issuer(self) -> str:
        """Return the address."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """Answer no longer."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def rotate(self) -> None:
        """Sign with another key, and forget the one from before."""
        self.key = RSAKey.generate_key(2048, auto_kid=True)
        self.known = [self.key]

    def authorize(self, url: str) -> str:
        """Sign the account in, as a user who opened `url` does; return the address of the callback."""
        asked = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        assert asked["code_challenge_method"] == "S256"
        assert asked["response_type"] == "code"
        code = f"code-{len(self.codes)}"
        self.codes[code] = asked
        return f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state'], 'session_state': 'x'})}"

    def token(self, form: dict[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        """Return the answer of the token endpoint."""
        asked = self.codes.pop(form.get("code", ""), None)
        basic = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        if authorization != f"Basic {basic}":
            return 401, {"error": "invalid_client"}
        if asked is None or form["redirect_uri"] != asked["redirect_uri"]:
            return 400, {"error": "invalid_grant"}
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        if base64.urlsafe_b64encode(digest).decode().rstrip("=") != asked["code_challenge"]:
            return 400, {"error": "invalid_grant"}
        now = int(time.time()) + self.ahead_s
        times = {"iat": now, "exp": now + 300}
        claims = {"iss": self.issuer, "aud": CLIENT, "nonce": asked["nonce"], **times, **self.claims, **self.changes}
        claims = {name: value for name, value in claims.items() if value is not None}
        header = {"alg": self.algorithm, "kid": self.key.kid}
        key: Any = self.key
        return 200, {
            "access_token": "access",
            "token_type": "Bearer",
            "id_token": jwt.encode(header, claims, key, algorithms=[self.algorithm]),
        }

    def found(self) -> dict[str, Any]:
        """Return the metadata."""
        said = {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/keys",
            "end_session_endpoint": f"{self.issuer}/end",
            "response_types_supported": ["code"],
        }
        if self.userinfo is not None:
            said["userinfo_endpoint"] = f"{self.issuer}/userinfo"
        return {**said, **self.metadata}


def _handler(provider: SmallProvider) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            provider.calls.append(path)
            if path == "/keys":
                keys = KeySet(provider.known).as_dict(private=False)
                self._answer(200, keys)
            elif path == "/userinfo":
                sub = provider.claims.get("sub")
                self._answer(200, {"sub": sub, **(provider.userinfo or {})})
            else:
                self._answer(200, provider.found())

        def do_POST(self) -> None:
            provider.calls.append(self.path)
            data = self.rfile.read(int(self.headers["content-length"])).decode()
            form = {name: values[0] for name, values in parse_qs(data).items()}
            self._answer(*provider.token(form, self.headers.get("authorization", "")))

        def _answer(self, status: int, said: Any) -> None:
            data = json.dumps(said).encode()
            self.send_response(503 if provider.is_down else status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_said: object) -> None:
            """Say nothing."""

    return Handler


@contextlib.contextmanager
def small_provider() -> Iterator[SmallProvider]:
    """Run a provider whose answers the test decides."""
    provider = SmallProvider()
    provider.start()
    try:
        yield provider
    finally:
        provider.close()


@contextlib.contextmanager
def mock_provider(*claims: dict[str, Any]) -> Iterator[str]:
    """Run `oidc-provider-mock` as a process with accounts; yield its address."""
    port = own_port()
    users = [part for one in claims for part in ("--user-claims", json.dumps(one))]
    command = [sys.executable, "-m", "oidc_provider_mock", "--port", str(port), *users]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://localhost:{port}"  # Another site than a server at 127.0.0.1, for cookies.
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx2.get(f"{url}/.well-known/openid-configuration").raise_for_status()
                break
            except httpx2.HTTPError:
                assert process.poll() is None and time.monotonic() < deadline, "the provider did not start"
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(20)
