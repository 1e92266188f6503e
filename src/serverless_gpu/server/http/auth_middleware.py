"""Authenticates and authorizes every HTTP request, including requests over loopback.

    request ─▶ header bounds ─▶ Host, Origin ─▶ public? ────────────────────────────────────────┐
                                     │             └▶ token ─▶ route ─▶ allowed?  ─▶ body bounds ─┴▶ route
                                  refused             401      404/405   403          413, 415

The order of the checks matters. The Host check refuses requests from foreign web pages, even with a valid token.
Callers without a token cannot learn which paths exist. The server reads a request body only after authorizing the
caller. The request body must have the route's content type and must not exceed the route's size limit.

`PUBLIC_ROUTES` and `PUBLIC_PAGES` list all routes that need no token. The server does not start if the lists differ
from the routes declared with `needs=PUBLIC`. The authentication middleware refuses WebSocket connections.

The authentication middleware stores the route and the caller in the request's ASGI scope. A route serves only requests
that the middleware admitted for exactly this route. If middleware and application parse a path differently, the server
therefore refuses the request.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import threading
from collections.abc import Callable, Collection, Sequence
from urllib.parse import urlsplit

import sqlalchemy as sa
from anyio import CapacityLimiter, to_thread
from starlette.requests import Request as HttpRequest
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import (
    InvalidValue,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    ServerlessGpuError,
    ServerProblem,
    TooLarge,
)
from serverless_gpu.model import access_control
from serverless_gpu.server.core import server_log
from serverless_gpu.server.core.caller import ANONYMOUS, Caller
from serverless_gpu.server.core.server_key import Keys
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import (
    ANY_CALLER,
    ATTEMPT,
    BASE,
    CALL,
    JSON_API,
    PROOF,
    PUBLIC,
    ROUTE,
    Call,
    Mount,
    Need,
    Route,
    writing,
)
from serverless_gpu.server.records import principals
from serverless_gpu.wire.base import API

PUBLIC_ROUTES = frozenset(
    {
        ("GET", f"{API}/health"),
        ("GET", f"{API}/version"),
        ("POST", f"{API}/device/codes"),
        ("POST", f"{API}/device/token"),
    }
)
PUBLIC_PAGES = frozenset(
    {
        ("GET", "/"),
        ("GET", "/ui/assets/{digest}/{name}"),
        ("GET", "/ui/sign-in"),
        ("POST", "/ui/sign-in"),
        ("POST", "/ui/sign-in/password"),
        ("GET", "/ui/sign-in/provider"),
        ("GET", "/ui/sign-in/callback"),
        ("GET", "/ui/sign-out/provider"),
        ("GET", "/ui/password"),
        ("POST", "/ui/password"),
    }
)
COOKIE = "sgpu_session"
"""Cookie with the secret of a session."""
HEADERS_MAX = 100
HEADER_BYTES_MAX = 32 << 10
PATH_BYTES_MAX = 4 << 10
TOKEN_CHARACTERS_MAX = 200
BODY_SILENCE_S = 60.0
"""Maximum seconds between two parts of a request body."""
AUTHENTICATING_MAX = 8
"""Maximum number of concurrent token checks, so that invalid tokens cannot occupy all threads."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_BEARER = "bearer "
_AGENT = writing("agents")

Authenticate = Callable[[str], Caller]
"""Returns the caller of a token, or raises `NotAuthenticated`."""
Reach = Callable[[Caller, Need], str]
"""Returns a caller's reach on a resource, such as "own" or "all"."""


_log = logging.getLogger(__name__)
_NOTED_MAX = 10_000


class WrongMethod(InvalidValue):
    """Signals that a path does not support the request's method."""

    status = 405

    def __init__(self, method: str, possible: Collection[str]) -> None:
        self.possible = ", ".join(possible)
        super().__init__(f"this path does not support {method[:20]}", hint=f"possible: {self.possible}")


class WrongContent(InvalidValue):
    """Signals that a request body has the wrong content type."""

    status = 415


class AuthMiddleware:
    """Admits a request to exactly one route, or refuses the request."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        clock: Clock,
        measures: ServerMetrics,
        routes: Sequence[Route],
        hosts: Sequence[str],
        authenticate: Authenticate,
        reach: Reach,
        authenticate_session: Authenticate | None = None,
        base: str = "",
    ) -> None:
        public = {(route.method, route.full_path) for route in routes if route.needs == PUBLIC}
        if not PUBLIC_ROUTES <= public <= PUBLIC_ROUTES | PUBLIC_PAGES:
            named = sorted((public | PUBLIC_ROUTES) - (public & (PUBLIC_ROUTES | PUBLIC_PAGES)))
            raise ServerProblem(f"the declared public routes differ from PUBLIC_ROUTES: {named}")
        self._app = app
        self._clock = clock
        self._measures = measures
        self._hosts = frozenset(host.lower() for host in hosts)
        self._authenticate = authenticate
        self._authenticate_session = authenticate_session or _refuse_session
        self._reach = reach
        self._base = base
        self._mounts = sorted({route.mount for route in routes}, key=lambda mount: len(mount.prefix), reverse=True)
        self._table = _Table(routes)
        self._asking = CapacityLimiter(AUTHENTICATING_MAX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit or refuse a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "the server does not support WebSockets"})
        else:
            await self._http(scope, receive, send)

    def _call(self, route: Route, who: Caller, reach: str) -> Call:
        return Call(route, who, reach, clock=self._clock, measures=self._measures)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[BASE] = self._base
        if self._base and scope["path"].startswith(f"{self._base}/"):
            scope["path"] = scope["path"][len(self._base) :]
        mount = self._mount_of(scope["path"])
        try:
            call = await self._admitted(scope, mount)
        except ServerlessGpuError as error:
            answer = mount.respond(error, scope, _has_body(scope))
            if isinstance(error, WrongMethod):
                answer.headers["Allow"] = error.possible
            await answer(scope, receive, send)
            return
        scope[CALL] = call
        await self._app(scope, _Bounded(receive, call.route.limit).receive, send)

    def _mount_of(self, path: str) -> Mount:
        matching = (mount for mount in self._mounts if path == mount.prefix or path.startswith(f"{mount.prefix}/"))
        return next((mount for mount in matching if mount.prefix), JSON_API)

    async def _admitted(self, scope: Scope, mount: Mount) -> Call:
        request = HttpRequest(scope)
        _check_bounds(scope)
        self._check_host(request)
        if mount.session and scope["method"] != "GET" and not request.headers.get("origin"):
            # All browsers send the header with a form. It shows that a page of this server contains the form.
            raise NotAllowed("the request does not name the page that sent it", hint="use a current browser")
        routes = self._table.find(scope["path"])
        route = routes.get(scope["method"])
        if route is not None and route.needs == PUBLIC:
            _check_body(request, route)
            return self._call(route, ANONYMOUS, "none")
        token = _session(request) if mount.session else _token(request)
        authenticate = self._authenticate_session if mount.session else self._authenticate
        who = await to_thread.run_sync(authenticate, token, limiter=self._asking)
        server_log.note(principal=who.name)
        if not routes:
            raise NotFound(
                f"no route has the path {scope['path'][:200]!r}", hint="choose a route from docs/openapi.json"
            )
        if route is None:
            raise WrongMethod(scope["method"], routes)
        scope[ROUTE] = route  # The access log needs the route even if the middleware refuses the caller.
        call = self._call(route, who, self._reach_of(who, route, scope["path"]))
        call.csrf = csrf_token(token) if mount.session else ""

        def admit_again() -> None:
            call.who = authenticate(token)
            call.reach = self._reach_of(call.who, route, scope["path"])

        call.again = admit_again
        _check_body(request, route)
        return call

    def _reach_of(self, who: Caller, route: Route, path: str) -> str:
        if who.attempt is not None:
            own = self._table.attempt_of(route, path) if route.needs == ATTEMPT else None
            if own == who.attempt[:2] or (own is None and route.needs.attempts and not who.late):
                return "own"
            if own is None and route.needs.attempts:
                raise NotAllowed("the server has abandoned this attempt and accepts only its final reports")
            raise NotAllowed("an attempt token gives access only to its attempt")
        if who.needs_key and route.needs != PROOF:
            raise NotAuthenticated(
                f"the token {who.token_id} belongs to a node with a key, and is not valid without the key",
                hint="the agent of the node opens a session with its key",
            )
        if route.needs == ANY_CALLER:
            return "own"
        needs = _AGENT if route.needs == PROOF else route.needs
        reach = "none" if needs == ATTEMPT else self._reach(who, needs)
        if reach == "none":
            verb = "change" if needs.write else "see"
            raise NotAllowed(
                f"{who.name or 'this token'} may not {verb} {needs.noun}",
                hint="ask an administrator for another role or a token with other scopes",
            )
        return reach

    def _check_host(self, request: HttpRequest) -> None:
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or _name(hosts[0]) not in self._hosts:
            shown = ", ".join(host[:100] for host in hosts) or "no name"
            raise NotAllowed(
                f"the server does not accept the host name {shown!r}",
                hint="add the name with `sgpu up --allow-host NAME`",
            )
        for origin in request.headers.getlist("origin"):
            if urlsplit(origin).netloc.lower() != hosts[0].lower():
                raise NotAllowed("the server refuses requests from other web sites")


class _Table:
    """Finds routes by path, with the application's own path patterns."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._fixed: dict[str, dict[str, Route]] = {}
        patterns: dict[str, tuple[re.Pattern[str], dict[str, Route]]] = {}
        for route in routes:
            path = route.full_path
            if "{" not in path:
                self._fixed.setdefault(path, {})[route.method] = route
                continue
            patterns.setdefault(path, (compile_path(path)[0], {}))[1][route.method] = route
        self._patterns = list(patterns.values())

    def find(self, path: str) -> dict[str, Route]:
        """Return the routes of a path by method."""
        if path in self._fixed:
            return self._fixed[path]
        found: dict[str, Route] = {}
        for pattern, routes in self._patterns:
            if pattern.match(path):
                found = {**routes, **found}
        return found

    def attempt_of(self, route: Route, path: str) -> tuple[str, int] | None:
        """Return the run and fence in a request path, or None."""
        for pattern, routes in self._patterns:
            match = pattern.match(path)
            if match and routes.get(route.method) is route:
                parts = match.groupdict()
                fence = parts.get("fence", "")
                return (parts["run"], int(fence)) if "run" in parts and fence.isascii() and fence.isdigit() else None
        return None


class _Bounded:
    """Limits a request body's size and the pauses between its parts."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._taken = 0
        self._complete = False

    async def receive(self) -> Message:
        """Return the next body message, or raise `TooLarge`."""
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout(BODY_SILENCE_S):
                message = await self._receive()
        except TimeoutError:
            raise InvalidValue(f"the client sent no part of the request body for {BODY_SILENCE_S:.0f} s") from None
        self._taken += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._taken > self._limit:
            raise TooLarge(f"the request body is larger than {self._limit} bytes")
        return message


def _check_bounds(scope: Scope) -> None:
    headers = scope["headers"]
    if len(headers) > HEADERS_MAX or sum(len(name) + len(value) for name, value in headers) > HEADER_BYTES_MAX:
        raise TooLarge(f"the request headers exceed {HEADERS_MAX} lines or {HEADER_BYTES_MAX} bytes")
    if len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) > PATH_BYTES_MAX:
        raise TooLarge(f"the request's path and query exceed {PATH_BYTES_MAX} bytes")
    if "\0" in scope["path"]:
        raise InvalidValue("the request path contains a zero byte")


def _token(request: HttpRequest) -> str:
    given = request.headers.getlist("authorization")
    if len(given) != 1 or not given[0].lower().startswith(_BEARER):
        raise NotAuthenticated(hint="send `Authorization: Bearer <token>`; `sgpu login` stores a token")
    token = given[0][len(_BEARER) :].strip()
    if not token or len(token) > TOKEN_CHARACTERS_MAX or not token.isascii():
        raise NotAuthenticated("the Authorization header contains no valid token", hint="log in with `sgpu login`")
    return token


def _session(request: HttpRequest) -> str:
    secret = request.cookies.get(COOKIE, "")
    if not secret or len(secret) > TOKEN_CHARACTERS_MAX or not secret.isascii():
        raise NotAuthenticated("you are not signed in", hint="sign in")
    return secret


def _refuse_session(_secret: str) -> Caller:
    raise NotAuthenticated("this server has no web pages")


def csrf_token(secret: str) -> str:
    """Return the token that forms of a session must contain. Other sites cannot compute the token."""
    return hashlib.sha256(f"csrf {secret}".encode()).hexdigest()


def _check_body(request: HttpRequest, route: Route) -> None:
    if not route.content_type:
        if _has_body(request.scope):
            raise TooLarge("this route accepts no body")
        return
    kinds = [kind.partition(";")[0].strip().lower() for kind in request.headers.getlist("content-type")]
    if kinds != [route.content_type]:
        raise WrongContent(f"this route accepts {route.content_type}")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise WrongContent("the server accepts only uncompressed bodies")
    lengths = request.headers.getlist("content-length")
    if len(lengths) > 1 or not all(length.isascii() and length.isdigit() for length in lengths):
        raise InvalidValue("the Content-Length header must be one number")
    if lengths and int(lengths[0]) > route.limit:
        raise TooLarge(f"the request body has {int(lengths[0])} bytes; the limit of this route is {route.limit}")


def _has_body(scope: Scope) -> bool:
    given = {name: value for name, value in scope["headers"] if name in (b"content-length", b"transfer-encoding")}
    return given.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in given


def _name(host: str) -> str:
    """Return a Host header's name without the port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


class Authenticator:
    """Determines a token's caller and the caller's reach."""

    def __init__(self, database: Transactions, *, clock: Clock, keys: Keys | None = None) -> None:
        self._database = database
        self._keys = keys
        self._clock = clock
        self._lock = threading.Lock()
        self._noted: dict[str, int] = {}

    def authenticate(self, secret: str) -> Caller:
        """Return the caller of a token (blocking)."""
        return self._noted_caller(
            lambda connection, now_ns: principals.authenticate(connection, secret, now_ns=now_ns, keys=self._keys)
        )

    def authenticate_session(self, secret: str) -> Caller:
        """Return the caller of a browser's session (blocking)."""
        return self._noted_caller(
            lambda connection, now_ns: principals.authenticate_session(connection, secret, now_ns=now_ns)
        )

    def _noted_caller(self, find: Callable[[sa.Connection, int], Caller]) -> Caller:
        now_ns = self._clock.wall_ns()
        who = self._database.read(lambda connection: find(connection, now_ns))
        if who.token_id and self._is_due(who.token_id):
            try:
                self._database.write(lambda connection: principals.note_use(connection, [who.token_id], now_ns=now_ns))
            except ServerProblem as error:
                # Read-only requests must work even if the disk is full.
                _log.warning("the server could not record the use of token %s: %s", who.token_id, error.message)
        return who

    def reach(self, who: Caller, need: Need) -> str:
        """Return a caller's reach on a resource, such as "own" or "all"."""
        return access_control.reach(who.role, need.noun, write=need.write, scopes=who.scopes).value

    def _is_due(self, token_id: str) -> bool:
        now_ns = self._clock.boottime_ns()
        with self._lock:
            noted_ns = self._noted.get(token_id)
            if noted_ns is not None and now_ns - noted_ns < principals.USED_EVERY_NS:
                return False
            if len(self._noted) >= _NOTED_MAX:
                self._noted.clear()
            self._noted[token_id] = now_ns
            return True
