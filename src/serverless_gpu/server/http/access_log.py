"""Counts and logs every HTTP request.

    request ─▶ an identifier, bound for every log line of the request ─▶ proxy ─▶ authentication ─▶ route
                └─ response: header SGPU-Request ─▶ histogram by method, route, class of status ─▶ one line

An access log line contains the declared route instead of the path, and no request data. The access log contains each
failed or slow request, but only every hundredth frequent request such as a heartbeat. Unauthenticated requests could
fill the access log. The middleware therefore limits the number of log lines per second for refused requests. The next
log line reports the number of dropped lines.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter

from starlette.types import Message, Receive, Scope, Send

from serverless_gpu.ambient import Clock
from serverless_gpu.server.core import server_log
from serverless_gpu.server.core.server_log import ACCESS
from serverless_gpu.server.core.server_metrics import OTHER, ServerMetrics
from serverless_gpu.server.http.proxy_middleware import ProxyMiddleware
from serverless_gpu.server.http.routing import CALL, JSON_API, ROUTE, Call, Route

HEADER = b"sgpu-request"
QUIET = frozenset(
    {
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("POST", "/agents/{node}/heartbeat"),
        ("POST", "/attempts/{run}/{fence}/report"),
    }
)
"""Frequent requests. The access log contains a line for every `QUIET_EVERY`-th frequent request."""
QUIET_EVERY = 100
SLOW_S = 1.0
REFUSED_PER_S = 20
METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_log = logging.getLogger(ACCESS)


class AccessLogMiddleware:
    """Outermost middleware, which counts and logs requests."""

    def __init__(self, proxy: ProxyMiddleware, *, measures: ServerMetrics, clock: Clock) -> None:
        self.proxy = proxy
        self._measures, self._clock = measures, clock
        self._quiet: Counter[tuple[str, str]] = Counter()
        self._refused = LineBudget(clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to the proxy middleware, and log the result."""
        if scope["type"] != "http":
            await self.proxy(scope, receive, send)
            return
        request = _Request(scope, send, self._clock)
        with server_log.bound(request_id=request.id, method=request.method):
            try:
                await self.proxy(scope, receive, request.send)
            finally:
                self._note(request)

    def _note(self, request: _Request) -> None:
        route = request.route
        seconds = (request.answered_ns or self._clock.boottime_ns()) - request.began_ns
        status = f"{request.status // 100}xx" if request.status else "none"
        self._measures.requests.labels(request.method, route, status).observe(seconds / 1e9)
        known = server_log.current()
        key = (request.method, route)
        left_out: int | None = 0
        if request.status >= 400 and not known.get("principal") and "run" not in known:
            left_out = self._refused.spend()
            if left_out is None:
                return
        elif 0 < request.status < 400 and seconds < SLOW_S * 1e9 and key in QUIET:
            self._quiet[key] += 1
            if self._quiet[key] % QUIET_EVERY != 1:
                return
        total_ns = self._clock.boottime_ns() - request.began_ns
        server_log.note(
            route=route,
            status=request.status,
            ms=round(seconds / 1e6, 1),
            total_ms=round(total_ns / 1e6, 1),
            peer=request.peer,
            more=left_out or None,
        )
        _log.info("%s %s", request.method, route, extra={"sgpu": dict(server_log.current())})


class _Request:
    """An HTTP request with its response."""

    def __init__(self, scope: Scope, send: Send, clock: Clock) -> None:
        self.id = secrets.token_hex(6)
        self.method = scope["method"] if scope["method"] in METHODS else OTHER
        self.began_ns = clock.boottime_ns()
        self.answered_ns = 0
        self.status = 0
        self._scope, self._send, self._clock = scope, send, clock

    @property
    def peer(self) -> str:
        """Return the client's network address."""
        return str((self._scope.get("client") or ("",))[0])

    @property
    def route(self) -> str:
        """Return the declared route, or "other" for unknown or unauthenticated requests."""
        call = self._scope.get(CALL)
        route = call.route if isinstance(call, Call) else self._scope.get(ROUTE)
        if not isinstance(route, Route):
            return OTHER
        return route.path if route.mount is JSON_API else route.full_path

    async def send(self, message: Message) -> None:
        """Send a part of the HTTP response."""
        if message["type"] == "http.response.start":
            self.answered_ns, self.status = self._clock.boottime_ns(), message["status"]
            message = {**message, "headers": [*message.get("headers", ()), (HEADER, self.id.encode())]}
        await self._send(message)


class LineBudget:
    """Limits the number of log lines per second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._second = 0
        self._spent = 0
        self._left_out = 0

    def spend(self) -> int | None:
        """Return the number of previously dropped log lines, or None to drop the current line."""
        second = self._clock.boottime_ns() // 1_000_000_000
        if second != self._second:
            self._second, self._spent = second, 0
        if self._spent >= REFUSED_PER_S:
            self._left_out += 1
            return None
        self._spent += 1
        left_out, self._left_out = self._left_out, 0
        return left_out
