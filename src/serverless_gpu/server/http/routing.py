"""Declares HTTP routes, whose handlers call one service or query each.

    routes = Routes("runs")                                    # one per noun; `composition.py` lists them

    class RunsQuery(Query, frozen=True, kw_only=True):         # parameters after the "?"; every field is optional
        state: str = ""
        limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = PAGE_DEFAULT

    @routes.get("/runs", needs=reading("runs"))
    def list_runs(call: Call, queries: RunQueries, query: RunsQuery) -> RunPage:
        return queries.page(call.who, ...)                     # a plain function runs in a thread, and may block

    @routes.post("/runs/{run}/stop", needs=writing("runs"))
    def stop(call: Call, stops: StopService, run: str, body: StopRequest) -> RunView: ...

    @routes.get("/runs/{run}/events", needs=reading("runs"))   # an async function runs in the loop, must not block,
    async def watch(call: Call, run: str) -> Stream[StreamMessage]:      # and uses `await call.in_thread(function)`
        return Stream(watching.messages(...))                  # an async iterator; None keeps the connection alive

Parameters of a handler:

* The first parameter is the `Call` with the caller (`call.who`) and the caller's reach (`call.reach`).

* `query` is a `Query`. The server refuses unknown query parameters.

* `body` is a `wire` struct, which the server decodes from at most `limit` bytes of JSON (8 MiB by default).
  Alternatively, `body` is `bytes` for a binary body. Async handlers can use `Incoming` for a stream of bytes.

* A parameter with a name from the path receives that path part as `str` or `int`. The pattern "{name:path}" also
  matches slashes.

* Every other parameter receives the application's service of the annotated class. `composition.py` refuses a route with
  an unknown service class.

A handler returns a `wire` struct (200), `None` (204), `Stream` (server-sent events), `Bytes` or another Starlette
response. Exceptions of `errors.py` become a `wire.base.Problem` with the status of their class. The server logs any
other exception and answers with status 500. Raise `NotFound` for objects that the caller may not see.

A `Mount` groups routes with one path prefix: the JSON API below `/api/v1`, and the web pages below `/ui`. The mount
decides how a caller proves its identity and in which form the caller receives errors. A web page's handler returns a
`Renders` object, and takes a `Form` as its body:

    routes = Routes("web", mount=WEB)

    class CancelForm(Form, frozen=True, kw_only=True):
        reason: str = ""

    @routes.post("/runs/{run}/cancel", needs=writing("runs"))
    def cancel(call: Call, api: ApiCalls, run: str, body: CancelForm) -> Redirect: ...

`needs` names the access requirement that `AuthMiddleware` checks before reading the body:

    reading(noun), writing(noun)   access to a resource of `model.access_control`
    ANY_CALLER                     any valid token
    ATTEMPT                        the attempt's own token; the path has {run} and {fence}
    PROOF                          a node's own token, with which the node proves its key
    PUBLIC                         no token; the route must also be in the list `PUBLIC_ROUTES`

The handler itself must check that the requested object is within the caller's reach.

`range_response` answers requests with a `Range` header.
"""

from __future__ import annotations

import hmac
import inspect
import itertools
import logging
import re
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl

import msgspec
from anyio import to_thread
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Scope

from serverless_gpu.ambient import Clock, created_wall_ns
from serverless_gpu.errors import (
    InvalidValue,
    NoSuitableNode,
    NotAllowed,
    NotAuthenticated,
    ServerlessGpuError,
    ServerProblem,
    TooLarge,
)
from serverless_gpu.json_codec import from_builtins, from_json
from serverless_gpu.server.core import server_log
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.wire.base import API, BODY_BYTES_MAX, PROTOCOL, Problem, ShortageView

RETRY_AFTER_S = 1


T = TypeVar("T")
_logger = logging.getLogger(__name__)
CALL = "sgpu.call"
"""ASGI scope key under which `AuthMiddleware` stores the `Call`."""
ROUTE = "sgpu.route"
"""ASGI scope key of the requested route, set after the caller's authentication."""
BASE = "sgpu.base"
"""ASGI scope key of the path prefix under which a proxy serves this server, or ""."""
JSON = "application/json"
BYTES = "application/octet-stream"
FORM_FIELDS_MAX = 200
FORM_BYTES_MAX = 256 << 10
LOOP_BYTES_MAX = 64 << 10
"""Maximum body size in bytes that the event loop decodes without a thread."""
CHECKED_S = 10.0
"""Seconds between two authorizations of a stream's reader."""
EVENTS = "text/event-stream"
FORM = "application/x-www-form-urlencoded"
CSRF = "csrf"
"""Field of a form, and suffix of a header, that contains the session's CSRF token."""
_PART_NAME = re.compile(r"{(\w+)(?::\w+)?}")
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})", re.ASCII)
Reader = Callable[[int, int], Iterator[bytes]]
"""Yields a given number of bytes from a given offset, with blocking reads."""


def problem_response(error: ServerlessGpuError, *, close: bool = False) -> Response:
    """Return the HTTP response for an error.

    Args:
        error: the error to report.
        close: True if an unread body may still arrive, so that the connection must end.
    """
    shortage = None
    if isinstance(error, NoSuitableNode):
        choices = tuple(dict(choice) for choice in error.choices)
        shortage = ShortageView(gpus=error.gpus, gpu_type=error.gpu_type, pool=error.pool, choices=choices)
    body = Problem(
        code=error.code,
        message=error.message,
        hint=error.hint,
        run_id=str(getattr(error, "run_id", "") or ""),
        shortage=shortage,
    )
    headers = {"Cache-Control": "no-store"}
    if isinstance(error, NotAuthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    if error.retryable:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if close or isinstance(error, TooLarge):
        headers["Connection"] = "close"
    return Response(msgspec.json.encode(body), status_code=error.status, headers=headers, media_type="application/json")


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Access requirement of a route.

    Attributes:
        noun: a resource of `model.access_control`, or the fixed noun of a constant below.
        write: True if the route changes something.
        attempts: True if the token of any attempt is also enough.
    """

    noun: str
    write: bool = False
    attempts: bool = False


ANY_CALLER = Need(noun="anybody")
ATTEMPT = Need(noun="attempt", write=True)
PUBLIC = Need(noun="public")
PROOF = Need(noun="proof", write=True)


def reading(noun: str, *, attempts: bool = False) -> Need:
    """Return the access requirement for reading a resource of `model.access_control`."""
    return Need(noun=noun, attempts=attempts)


def writing(noun: str, *, attempts: bool = False) -> Need:
    """Return the access requirement for creating or changing a resource of `model.access_control`."""
    return Need(noun=noun, write=True, attempts=attempts)


class Query(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of query parameters. A field with a tuple type accepts repeated names."""


class Form(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of the bodies that HTML forms send. A field with a tuple type accepts repeated names."""


Respond = Callable[[ServerlessGpuError, Scope, bool], Response]
"""Returns the response for an error to a request. The last argument is True if the connection must end."""


class Mount(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A group of routes with one path prefix.

    Attributes:
        prefix: path prefix of the routes.
        session: True if a cookie with a session identifies callers, False if a token in a header does.
        respond: returns the response for an error.
        headers: headers that the server adds to every response.
    """

    prefix: str
    session: bool = False
    respond: Respond
    headers: typing.Mapping[str, str] = {}


JSON_API = Mount(prefix=API, respond=lambda error, _scope, close: problem_response(error, close=close))


class Renders(typing.Protocol):
    """A handler's result that makes its response from the call, such as a stream or a web page."""

    def response(self, call: Call) -> Response:
        """Return the HTTP response."""
        ...


class Call:
    """An admitted request.

    Attributes:
        who: the caller that the token belongs to.
        reach: reach of `who` on the route's resource: "none", "own", "team", "all".
        clock: clock for streams.
        measures: metrics that count streams.
        again: authorizes the caller again and updates `who` and `reach`. Blocks, and can raise `NotAuthenticated` or
            `NotAllowed`.
        look: check that the server repeats during a stream. Raises `NotFound` once the caller may not see the object.
        scope: ASGI scope of the request.
        csrf: token that forms of the caller's session must contain; "" without a session.
        again_answer: calls the handler with the same arguments again, for a live page.
    """

    def __init__(self, route: Route, who: Caller, reach: str, *, clock: Clock, measures: ServerMetrics) -> None:
        self.route = route
        self.who = who
        self.reach = reach
        self.clock = clock
        self.measures = measures
        self.headers: typing.Mapping[str, str] = {}
        self.again: Callable[[], object] = lambda: None
        self.look: Callable[[], object] = lambda: None
        self.scope: Scope = {}
        self.csrf = ""
        self.again_answer: Callable[[], object] = lambda: None

    @property
    def address(self) -> str:
        """Return the client's network address, or "" if it is unknown."""
        return str((self.scope.get("client") or ("",))[0])

    def check(self) -> None:
        """Authorize the caller again, and raise an error if the caller has lost access."""
        self.again()
        self.look()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run a blocking function in a thread, and return its result."""
        return await to_thread.run_sync(work)


class Bytes(Response):
    """A response of bytes."""

    media_type = BYTES


class Incoming:
    """Request body as a stream of bytes."""

    def __init__(self, request: HttpRequest, size: int | None) -> None:
        self._request = request
        self.size = size

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield received bytes, or raise `TooLarge` if the body exceeds the route's limit."""
        async for piece in self._request.stream():
            if piece:
                yield piece


class Stream(Generic[T]):
    """HTTP response with server-sent events, which contain one JSON object each, or text from another `encode`.

    `source` yields messages, and None as a keep-alive. `source` must end soon after the hub is closed. The server
    closes `source` when the reader disconnects or loses access. The server checks the reader's access every ten
    seconds.
    """

    def __init__(
        self, source: AsyncIterator[T | None], *, encode: Callable[[T], bytes] = msgspec.json.encode, idle: bytes = b":"
    ) -> None:
        self._source = source
        self._encode = encode
        self._idle = idle + b"\n\n"

    def response(self, call: Call) -> Response:
        """Return the event stream as an ASGI response."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._lines(call), media_type=EVENTS, headers=headers)

    async def _lines(self, call: Call) -> AsyncIterator[bytes]:
        yield b":\n\n"  # Send the response headers before the first message.
        clock = call.clock
        checked_ns = clock.boottime_ns()
        streams = call.measures.streams
        streams.inc()
        try:
            async for message in self._source:
                if clock.boottime_ns() - checked_ns > CHECKED_S * 1e9:
                    await call.in_thread(call.check)
                    checked_ns = clock.boottime_ns()
                yield self._idle if message is None else b"data: " + self._encode(message) + b"\n\n"
        except ServerProblem as error:
            # The caller has lost access, or the database is unreachable. The reader receives the error only after a
            # reconnect, because the server has already sent the status.
            _logger.warning("a stream ends: %s", error.message)
        finally:
            streams.dec()


class Route(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One declared route.

    Attributes:
        mount: group of the route.
        services: classes of the services that the handler needs, by parameter.
        arguments: the services themselves, once the route is bound to an application.
    """

    method: str
    mount: Mount = JSON_API
    path: str
    needs: Need
    tag: str
    handler: Callable[..., Any]
    limit: int
    body: Any = None
    query: Any = None
    parts: dict[str, type] = msgspec.field(default_factory=dict)
    services: dict[str, type] = msgspec.field(default_factory=dict)
    arguments: dict[str, object] = msgspec.field(default_factory=dict)
    answer: Any = None

    @property
    def full_path(self) -> str:
        """Return the path with the prefix of the mount."""
        return self.mount.prefix + self.path

    @property
    def is_form(self) -> bool:
        """Return True if an HTML form sends the body."""
        return inspect.isclass(self.body) and issubclass(self.body, Form)

    @property
    def content_type(self) -> str:
        """Return the body's required content type, or "" for a route without a body."""
        if self.body is None:
            return ""
        if self.is_form:
            return FORM
        return BYTES if self.body in (bytes, Incoming) else JSON

    def bound(self, provided: typing.Mapping[type, object]) -> Route:
        """Return a copy of the route with its handler's services."""
        for kind in self.services.values():
            if kind not in provided:
                raise RuntimeError(
                    f"route {self.method} {self.path} needs {kind.__name__}, which the application does not provide"
                )
        arguments = {name: provided[kind] for name, kind in self.services.items()}
        return msgspec.structs.replace(self, arguments=arguments)

    async def serve(self, request: HttpRequest) -> Response:
        """Answer a request that `AuthMiddleware` has admitted to this route."""
        response = await self._answer(request)
        response.headers.update({name: value for name, value in self.mount.headers.items()})
        return response

    async def _answer(self, request: HttpRequest) -> Response:
        try:
            return await self._serve(request)
        except ServerlessGpuError as error:
            return self.mount.respond(error, request.scope, False)
        except ClientDisconnect:
            return Response(status_code=499)  # The client has closed the connection.
        except Exception:  # Hide the details of server bugs from clients.
            _logger.exception("%s %s failed", self.method, self.path)
            found = server_log.current().get("request_id", "")
            hint = f"search the server's log for request {found}" if found else "read the server's log"
            problem = ServerProblem("an internal error occurred in the server", hint=hint)
            return self.mount.respond(problem, request.scope, False)

    async def _serve(self, request: HttpRequest) -> Response:
        call = request.scope.get(CALL)
        if not isinstance(call, Call) or call.route is not self:
            raise RuntimeError(f"AuthMiddleware did not admit this request to {self.method} {self.full_path}")
        call.headers = request.headers
        call.scope = request.scope
        server_log.note(**_identified(request.path_params))
        arguments = dict(self.arguments)
        arguments |= {name: _part(request.path_params[name], kind, name) for name, kind in self.parts.items()}
        if self.query is None and request.scope["query_string"]:
            raise InvalidValue(
                "this route accepts no query parameters", hint="read the route's parameters in docs/openapi.json"
            )
        if self.query is not None:
            arguments["query"] = _decoded(lambda: _query(request, self.query))
        if self.body is Incoming:
            length = request.headers.get("content-length")
            arguments["body"] = Incoming(request, int(length) if length else None)
        data = b"" if self.body in (None, Incoming) else await request.body()

        def answer() -> Response:
            # This thread also decodes and encodes JSON, because large JSON bodies would block the event loop.
            if self.method == "GET":
                call.again_answer = lambda: self.handler(call, **arguments)
            return make_response(call, self.handler(call, **arguments, **self._body(request, data)))

        if not inspect.iscoroutinefunction(self.handler):
            return await to_thread.run_sync(answer)
        if len(data) > LOOP_BYTES_MAX:
            body = await to_thread.run_sync(lambda: self._body(request, data))
        else:
            body = self._body(request, data)
        return make_response(call, await self.handler(call, **arguments, **body))

    def _body(self, request: HttpRequest, data: bytes) -> dict[str, object]:
        """Return the decoded body as the handler's `body` argument, or no argument."""
        if self.body in (None, Incoming):
            return {}
        if self.body is bytes:
            return {"body": data}
        if self.is_form:
            return {"body": _decoded(lambda: _form(request, data, self.body))}
        try:
            return {"body": _decoded(lambda: from_json(data, self.body))}
        except InvalidValue as error:
            raise _newer(request.headers.get("sgpu-protocol", ""), error) from None


class Routes:
    """Routes of one module."""

    def __init__(self, tag: str, *, mount: Mount = JSON_API) -> None:
        self._tag = tag
        self._mount = mount
        self.all: list[Route] = []

    def get(self, path: str, *, needs: Need) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Declare a route that reads an object."""
        return self._declare("GET", path, needs, 0)

    def post(
        self, path: str, *, needs: Need, limit: int = BODY_BYTES_MAX
    ) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Declare a route that creates an object or starts an action, with a body of at most `limit` bytes."""
        return self._declare("POST", path, needs, limit)

    def put(
        self, path: str, *, needs: Need, limit: int = BODY_BYTES_MAX
    ) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Declare a route that creates or replaces a named object, with a body of at most `limit` bytes."""
        return self._declare("PUT", path, needs, limit)

    def patch(
        self, path: str, *, needs: Need, limit: int = BODY_BYTES_MAX
    ) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Declare a route that changes an object, with a body of at most `limit` bytes."""
        return self._declare("PATCH", path, needs, limit)

    def delete(self, path: str, *, needs: Need) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Declare a route that deletes an object."""
        return self._declare("DELETE", path, needs, 0)

    def _declare(
        self, method: str, path: str, needs: Need, limit: int
    ) -> Callable[[Callable[..., T]], Callable[..., T]]:
        def declare(handler: Callable[..., T]) -> Callable[..., T]:
            hints = typing.get_type_hints(handler)
            names = list(inspect.signature(handler).parameters)[1:]
            in_path = set(_PART_NAME.findall(path))
            others = [name for name in names if name not in ("body", "query")]
            self.all.append(
                Route(
                    method=method,
                    mount=self._mount,
                    path=path,
                    needs=needs,
                    tag=self._tag,
                    handler=handler,
                    limit=limit,
                    body=hints.get("body") if "body" in names else None,
                    query=hints.get("query") if "query" in names else None,
                    parts={name: hints[name] for name in others if name in in_path},
                    services={name: hints[name] for name in others if name not in in_path},
                    answer=hints.get("return"),
                )
            )
            return handler

        return declare


def _newer(protocol: str, error: InvalidValue) -> InvalidValue:
    """Return the error for an invalid body, with an upgrade hint for newer clients."""
    if not (protocol.isascii() and protocol.isdigit() and len(protocol) < 6) or int(protocol) <= PROTOCOL:
        return error
    return InvalidValue(
        f"the client uses protocol {protocol}, but this server supports at most {PROTOCOL}: {error.message}",
        hint="upgrade serverless-gpu on the server first",
    )


def _decoded(decode: Callable[[], T]) -> T:
    try:
        return decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidValue(str(error)[:500], hint="read the description of this route in docs/openapi.json") from error


def _query(request: HttpRequest, kind: Any) -> object:
    given: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        given.setdefault(name, []).append(value)
    return from_builtins(_single_values(given, kind, "the query parameter {!r} occurs twice"), kind, strict=False)


def _single_values(given: typing.Mapping[str, list[str]], kind: type, twice: str) -> dict[str, object]:
    """Return one value by name, and all values of the fields with a tuple type."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    values: dict[str, object] = {}
    for name, several in given.items():
        is_list = name in fields and typing.get_origin(fields[name].type) is tuple
        if len(several) > 1 and not is_list:
            raise InvalidValue(twice.format(name[:64]))
        values[name] = several if is_list else several[0]
    return values


def _form(request: HttpRequest, data: bytes, kind: type[Form]) -> Form:
    """Return a decoded HTML form, whose CSRF token must be the session's."""
    given: dict[str, list[str]] = {}
    try:
        pairs = parse_qsl(data.decode(), keep_blank_values=True, max_num_fields=FORM_FIELDS_MAX, errors="strict")
    except ValueError as error:
        raise InvalidValue(f"the form is not readable: {error}") from error
    for name, value in pairs:
        given.setdefault(name, []).append(value.replace("\r\n", "\n"))
    call = request.scope[CALL]
    token = [*given.pop(CSRF, ()), *request.headers.getlist(f"x-{CSRF}")]
    if call.csrf and not (token and all(hmac.compare_digest(one, call.csrf) for one in token)):
        raise NotAllowed("the form does not belong to your session", hint="load the page again, and repeat the action")
    return from_builtins(_single_values(given, kind, "the form contains {!r} twice"), kind, strict=False)


def _identified(parts: typing.Mapping[str, object]) -> dict[str, object]:
    """Return the path's run, node and attempt identifiers for the log."""
    named = {
        name: str(parts[name]) for name in ("run", "node") if created_wall_ns(str(parts.get(name, ""))) is not None
    }
    fence = str(parts.get("fence", ""))
    return {**named, "attempt": int(fence)} if fence.isascii() and fence.isdigit() else dict(named)


def _part(value: object, kind: type, name: str) -> object:
    if kind is not int:
        return value
    text = str(value)
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise InvalidValue(f"{name} is not a number", hint="write a number in this part of the request path")
    return int(text)


def make_response(call: Call, answer: object) -> Response:
    """Return the HTTP response for a handler's result."""
    if isinstance(answer, Response):
        return answer
    if hasattr(answer, "response"):
        return typing.cast("Renders", answer).response(call)
    if answer is None:
        return Response(status_code=204)
    return Response(msgspec.json.encode(answer), media_type=JSON)


def range_response(read: Reader, size: int, asked: str) -> Response:
    """Return the HTTP response with the requested byte range.

    Args:
        read: source of the bytes.
        size: total number of bytes.
        asked: the request's `Range` header; any value except a single simple range selects all bytes, as in HTTP.
    """
    headers = {"Accept-Ranges": "bytes", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    match = _RANGE.fullmatch(asked.strip())
    if match is None:
        return _answer(read, 0, size, 200, headers)
    start = int(match[1])
    end = min(size, int(match[2]) + 1 if match[2] else size)
    if start >= size or start >= end:
        return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{size}"})
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return _answer(read, start, end - start, 206, headers)


def _answer(read: Reader, start: int, length: int, status: int, headers: dict[str, str]) -> Response:
    headers["Content-Length"] = str(length)
    pieces = read(start, length)
    # Read the first bytes before sending the status, so that a missing object still causes an error response.
    first = next(pieces, b"")
    following = itertools.chain((first,), pieces)
    return StreamingResponse(following, status_code=status, headers=headers, media_type=BYTES)
