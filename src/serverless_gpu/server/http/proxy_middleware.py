"""Proxies and shutdown: where requests come from, and whether any more are taken.

    this machine ────────────────┐
    the declared proxy ─ says who ┴─▶ stopping? ── no ─▶ auth
    anybody else, where a proxy is declared ─▶ 403        └─ yes ─▶ 503, "again in a second"; what goes on is counted

Behind a proxy tokens cross the network between it and this server as they are: a client that comes past it would send
its token in the clear, too, and could claim whatever a proxy may claim. So beyond loopback no other peer is answered,
and what a proxy says is believed from its own address only. It has to say that it was reached by TLS; a proxy of this
machine has an address that others here have, too: who says nothing there of having been passed on is this machine's.

A server that is to stop takes no new requests and finishes those that it has (`Running.shutdown`). `/health` and
`/version` go on: they say so.
"""

from __future__ import annotations

import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from serverless_gpu.errors import NotAllowed, ServerlessGpuError, ServerUnavailable
from serverless_gpu.server.core.hub import Hub
from serverless_gpu.server.http.auth_middleware import PUBLIC_ROUTES
from serverless_gpu.server.http.routing import problem_response

_PUBLIC = frozenset(path for _method, path in PUBLIC_ROUTES)
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class ProxyMiddleware:
    """Counts requests, refuses those that come too late or past the proxy.

    Attributes:
        busy: requests that go on.
    """

    def __init__(self, app: ASGIApp, *, hub: Hub, proxies: tuple[str, ...] = ()) -> None:
        self._app = app
        self._hub = hub
        self._networks = tuple(ipaddress.ip_network(text) for text in proxies)
        self._proxied = ProxyHeadersMiddleware(app, trusted_hosts=list(proxies)) if proxies else app  # type: ignore[arg-type] # uvicorn's own names for the same types
        self.busy = 0

    def close(self) -> None:
        """Take no more requests, and end streams, which would go on for ever."""
        self._hub.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            app = self._through(scope) if self._networks else self._app
            if self._hub.closed and scope["path"] not in _PUBLIC:
                raise ServerUnavailable("the server is stopping", hint="ask again: it is started again, or another is")
        except ServerlessGpuError as error:
            await problem_response(error, close=True)(scope, receive, send)
            return
        self.busy += 1
        try:
            await app(scope, receive, send)
        finally:
            self.busy -= 1

    def _through(self, scope: Scope) -> ASGIApp:
        """Return where a request goes on, by the address it comes from."""
        peer = _address(scope)
        if peer is not None and any(peer in network for network in self._networks):
            scope["client"] = (str(peer), scope["client"][1])
            headers = (name for name, _ in scope["headers"])
            is_passed_on = any(name.startswith(b"x-forwarded-") or name == b"forwarded" for name in headers)
            if is_passed_on or not peer.is_loopback:
                _check_tls(scope)
            return self._proxied  # type: ignore[return-value] # as above
        if peer is not None and peer.is_loopback:
            return self._app
        raise NotAllowed("this server is reached through its proxy", hint="use the proxy's address")


def _check_tls(scope: Scope) -> None:
    """Refuse what did not reach the proxy by TLS, or not on all of its way, as far as proxies say so."""
    said = [value for name, values in scope["headers"] if name == b"x-forwarded-proto" for value in values.split(b",")]
    if not said:
        raise NotAllowed(
            "the proxy does not say that it was reached by TLS",
            hint="have it set X-Forwarded-Proto (see the how-to)",
        )
    if any(value.strip().lower() != b"https" for value in said):
        raise NotAllowed("the proxy was reached without TLS", hint="use https://")


def _address(scope: Scope) -> _Address | None:
    try:
        found = ipaddress.ip_address((scope.get("client") or ("",))[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
