"""Checks each request's proxy, counts running requests, and refuses requests during shutdown.

    this machine ────────────────────────┐
    the declared proxy ─ names the client ┴─▶ stopping? ── no ─▶ auth; the request is counted
    another peer, if a proxy is declared ─▶ 403   └─ yes ─▶ 503, "again in a second"

Tokens travel unencrypted between the proxy and this server. A client that bypasses the proxy would also send its token
unencrypted and could forge the proxy's headers. The server therefore answers only the proxy and loopback clients, and
trusts only the proxy's headers.

The proxy must report that its client used TLS. A local proxy has the same address as other local processes. The proxy
middleware therefore treats a loopback request without forwarding headers as local.

A stopping server refuses new requests and finishes running requests (`Running.shutdown`). The routes `/health` and
`/version` continue to answer.
"""

from __future__ import annotations

import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from serverless_gpu.errors import NotAllowed, ServerlessGpuError, ServerUnavailable
from serverless_gpu.server.core.hub import Hub
from serverless_gpu.server.http.auth_middleware import PUBLIC_ROUTES
from serverless_gpu.server.http.routing import problem_response

_PUBLIC = frozenset(path for method, path in PUBLIC_ROUTES if method == "GET")
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class ProxyMiddleware:
    """Counts running requests, and refuses requests that bypass the proxy or arrive during shutdown.

    Attributes:
        busy: number of running requests.
    """

    def __init__(self, app: ASGIApp, *, hub: Hub, proxies: tuple[str, ...] = ()) -> None:
        self._app = app
        self._hub = hub
        self._networks = tuple(ipaddress.ip_network(text) for text in proxies)
        self._proxied = ProxyHeadersMiddleware(app, trusted_hosts=list(proxies)) if proxies else app  # type: ignore[arg-type] # uvicorn's ASGI types
        self.busy = 0

    def close(self) -> None:
        """Refuse new requests, and end event streams."""
        self._hub.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to the authentication middleware, or refuse the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            app = self._through(scope) if self._networks else self._app
            if self._hub.closed and scope["path"] not in _PUBLIC:
                raise ServerUnavailable(
                    "the server is stopping",
                    hint="send the request again after the server's restart",
                )
        except ServerlessGpuError as error:
            await problem_response(error, close=True)(scope, receive, send)
            return
        self.busy += 1
        try:
            await app(scope, receive, send)
        finally:
            self.busy -= 1

    def _through(self, scope: Scope) -> ASGIApp:
        """Return the next ASGI application for a request, depending on the peer's address."""
        peer = _address(scope)
        if peer is not None and any(peer in network for network in self._networks):
            scope["client"] = (str(peer), scope["client"][1])
            headers = (name for name, _ in scope["headers"])
            is_passed_on = any(name.startswith(b"x-forwarded-") or name == b"forwarded" for name in headers)
            if is_passed_on or not peer.is_loopback:
                _check_tls(scope)
            return self._proxied  # type: ignore[return-value] # uvicorn's ASGI types
        if peer is not None and peer.is_loopback:
            return self._app
        raise NotAllowed(
            "clients reach this server only through its proxy", hint="set the proxy's address as the server address"
        )


def _check_tls(scope: Scope) -> None:
    """Refuse a request unless every proxy in the chain reports TLS."""
    said = [value for name, values in scope["headers"] if name == b"x-forwarded-proto" for value in values.split(b",")]
    if not said:
        raise NotAllowed(
            "the proxy does not report that its client used TLS",
            hint="configure the proxy to set X-Forwarded-Proto (see docs/how-to/operating-a-server.md)",
        )
    if any(value.strip().lower() != b"https" for value in said):
        raise NotAllowed("the client reached the proxy without TLS", hint="use https://")


def _address(scope: Scope) -> _Address | None:
    try:
        found = ipaddress.ip_address((scope.get("client") or ("",))[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
