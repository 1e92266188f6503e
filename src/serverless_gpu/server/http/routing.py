"""How routes are written. A route parses, calls one service or query, and returns: at most fifteen lines.

    routes = Routes("runs")                                    # one per noun; `composition.py` lists them

    class RunsQuery(Query, frozen=True, kw_only=True):         # what may stand behind the "?"; every field optional
        state: str = ""
        limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = PAGE_DEFAULT

    @routes.get("/runs", needs=reading("runs"))
    def list_runs(call: Call, queries: RunQueries, query: RunsQuery) -> RunPage:
        return queries.page(call.who, ...)                     # a plain function runs in a thread: it may block

    @routes.post("/runs/{run}/stop", needs=writing("runs"))
    def stop(call: Call, stops: StopService, run: str, body: StopRequest) -> RunView: ...

    @routes.get("/runs/{run}/events", needs=reading("runs"))   # an async function runs in the loop: it must not block,
    async def watch(call: Call, run: str) -> Stream[StreamMessage]:      # and uses `await call.in_thread(function)`
        return Stream(watching.messages(...))                  # an async iterator; None from it keeps the line alive

Parameters of a handler:
- the first one is the `Call`: the caller (`call.who`), and how far the caller may reach (`call.reach`);
- `query`: a `Query`; a parameter that it does not know is refused;
- `body`: a `wire` struct (JSON, `application/json`, up to `limit` bytes, 8 MiB unless said), or `bytes`
  (`application/octet-stream`, read whole up to `limit`), or `Incoming` (the same as a stream; async functions only);
- a parameter whose name stands in the path is that part of it, `str` or `int`. "{name:path}" takes slashes, too;
- every other parameter is a service, found by its annotated class among those that the application provides.
  `composition.py` refuses a route that names a class without a provider.

What a route returns: a `wire` struct (200), `None` (204), `Stream` (server-sent events), `Bytes`, or another Starlette
response (say `-> Health | Response`). What it raises: exceptions of `errors.py` become a `wire.base.Problem` with their
status; anything else is logged and becomes a 500 that says nothing. Raise `NotFound` for what the caller may not see.

`needs` is what `AuthMiddleware` checks before the body is read: `reading(noun)`, `writing(noun)` of
`model.access_control`, `ANYBODY` with a valid token, `ATTEMPT` (the attempt's own token, whose run and fence stand in
the path as {run} and {fence}), or `PUBLIC`, which has to stand in the list `PUBLIC_ROUTES`, too. A route checks what
only it can know: whether *this* run is in reach.

What is answered when something is refused or went wrong: `wire.base.Problem`, with the status of its class.

Bytes with `Range`: the whole of something, or one range of it, as HTTP has it.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import re
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec
from anyio import to_thread
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from serverless_gpu.ambient import Clock, created_wall_ns
from serverless_gpu.errors import (
    InvalidValue,
    NoSuitableNode,
    NotAuthenticated,
    ServerlessGpuError,
    ServerProblem,
    TooLarge,
)
from serverless_gpu.json_codec import from_builtins, from_json
from serverless_gpu.server.core import server_log
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.wire.base import BODY_BYTES_MAX, PROTOCOL, Problem, ShortageView

RETRY_AFTER_S = 1


T = TypeVar("T")
_logger = logging.getLogger(__name__)
CALL = "sgpu.call"
"""Key of the ASGI scope under which `AuthMiddleware` leaves the `Call`."""
ROUTE = "sgpu.route"
"""And the route that was asked for, as soon as it is known who asks."""
JSON = "application/json"
BYTES = "application/octet-stream"
LOOP_BYTES_MAX = 64 << 10
"""A longer body of an async route is decoded in a thread: 64 KiB take the event loop less than a millisecond."""
CHECKED_S = 10.0
"""How often the reader of a stream is authorized again."""
EVENTS = "text/event-stream"
_PART_NAME = re.compile(r"{(\w+)(?::\w+)?}")
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})", re.ASCII)
Reader = Callable[[int, int], Iterator[bytes]]
"""Yields so many bytes from one on; called, and read, in a thread."""


def problem_response(error: ServerlessGpuError, *, close: bool = False) -> Response:
    """Return the answer for an error.

    Args:
        error: what is answered.
        close: whether a body may still be coming that is not read, so that the connection has to end.
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
    """What a caller needs to use a route.

    Attributes:
        noun: a resource of `model.access_control`, or one of "anybody", "attempt", "public".
        write: whether it changes something.
        attempts: whether the token of any attempt will do, too.
    """

    noun: str
    write: bool = False
    attempts: bool = False


ANYBODY = Need(noun="anybody")
ATTEMPT = Need(noun="attempt", write=True)
PUBLIC = Need(noun="public")


def reading(noun: str, *, attempts: bool = False) -> Need:
    """Return what is needed to look at a resource of `model.access_control`."""
    return Need(noun=noun, attempts=attempts)


def writing(noun: str, *, attempts: bool = False) -> Need:
    """Return what is needed to make or change a resource of `model.access_control`."""
    return Need(noun=noun, write=True, attempts=attempts)


class Query(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what may stand behind the "?"."""


class Call:
    """One request on its way through a route.

    Attributes:
        who: whose token it is.
        reach: how far `who` may reach on the route's resource: "none", "own", "team", "all".
        clock: times streams.
        measures: count streams.
        again: raises `NotAuthenticated` or `NotAllowed` once that is not so any more, else says it anew; called in a
            thread.
        look: what the route asks for as long as it streams: raises `NotFound` once the thing is out of reach.
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

    def check(self) -> None:
        """Raise what the request would be answered with now; blocks."""
        self.again()
        self.look()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Return what blocking work returns, from a thread: for async routes."""
        return await to_thread.run_sync(work)


class Bytes(Response):
    """An answer of bytes."""

    media_type = BYTES


class Incoming:
    """The bytes of a request as they arrive."""

    def __init__(self, request: HttpRequest, size: int | None) -> None:
        self._request = request
        self.size = size

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield what arrives; more than the route's limit raises `TooLarge`."""
        async for piece in self._request.stream():
            if piece:
                yield piece


class Stream(Generic[T]):
    """An answer of server-sent events, one JSON object each; ends when `source` does.

    `source` yields messages, and None when there was nothing to say for a while. It ends by itself soon after the hub
    was closed. It is pulled at the reader's pace, and closed when the reader is gone or not let in any more: a token
    that is revoked, or a team that was left, ends its streams within some seconds.
    """

    def __init__(self, source: AsyncIterator[T | None]) -> None:
        self._source = source

    def response(self, call: Call) -> Response:
        """Return it as ASGI can send it."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._lines(call), media_type=EVENTS, headers=headers)

    async def _lines(self, call: Call) -> AsyncIterator[bytes]:
        yield b":\n\n"  # the headers go out now, also when there is nothing to say yet
        clock = call.clock
        checked_ns = clock.boottime_ns()
        streams = call.measures.streams
        streams.inc()
        try:
            async for message in self._source:
                if clock.boottime_ns() - checked_ns > CHECKED_S * 1e9:
                    await call.in_thread(call.check)
                    checked_ns = clock.boottime_ns()
                yield b":\n\n" if message is None else b"data: " + msgspec.json.encode(message) + b"\n\n"
        except ServerProblem as error:
            # Not let in any more, or the database is away: the status has been sent, so the line ends, and the reader
            # comes again and learns it.
            _logger.warning("a stream ends: %s", error.message)
        finally:
            streams.dec()


class Route(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One route as it was declared.

    Attributes:
        services: classes that the handler takes, by parameter.
        arguments: the services themselves, once the route is bound to an application.
    """

    method: str
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
    def content_type(self) -> str:
        """Return the content type its body has to have, or "" without a body."""
        if self.body is None:
            return ""
        return BYTES if self.body in (bytes, Incoming) else JSON

    def bound(self, provided: typing.Mapping[type, object]) -> Route:
        """Return the route with the services that its handler takes."""
        for kind in self.services.values():
            if kind not in provided:
                raise RuntimeError(
                    f"{self.method} {self.path} takes {kind.__name__}, which the application does not provide"
                )
        arguments = {name: provided[kind] for name, kind in self.services.items()}
        return msgspec.structs.replace(self, arguments=arguments)

    async def serve(self, request: HttpRequest) -> Response:
        """Answer a request that `AuthMiddleware` let in for this route, and for no other; errors become problems."""
        try:
            return await self._serve(request)
        except ServerlessGpuError as error:
            return problem_response(error)
        except ClientDisconnect:
            return Response(status_code=499)  # the client is gone
        except Exception:  # a bug of a route must not end the server, and says nothing to the outside
            _logger.exception("%s %s failed", self.method, self.path)
            found = server_log.current().get("request_id", "")
            hint = f"its log says what: request {found}" if found else "its log says what"
            return problem_response(ServerProblem("something went wrong in the server", hint=hint))

    async def _serve(self, request: HttpRequest) -> Response:
        call = request.scope.get(CALL)
        if not isinstance(call, Call) or call.route is not self:
            raise RuntimeError(f"{self.method} {self.path} was reached without the gate")
        call.headers = request.headers
        server_log.note(**_identified(request.path_params))
        arguments = dict(self.arguments)
        arguments |= {name: _part(request.path_params[name], kind, name) for name, kind in self.parts.items()}
        if self.query is None and request.scope["query_string"]:
            raise InvalidValue("this route takes no parameters", hint="docs/openapi.json says what it takes")
        if self.query is not None:
            arguments["query"] = _decoded(lambda: _query(request, self.query))
        if self.body is Incoming:
            length = request.headers.get("content-length")
            arguments["body"] = Incoming(request, int(length) if length else None)
        data = b"" if self.body in (None, Incoming) else await request.body()

        def answer() -> Response:
            # The thread also reads and writes the JSON, which may be megabytes: the event loop goes on.
            return make_response(call, self.handler(call, **arguments, **self._body(request, data)))

        if not inspect.iscoroutinefunction(self.handler):
            return await to_thread.run_sync(answer)
        if len(data) > LOOP_BYTES_MAX:
            body = await to_thread.run_sync(lambda: self._body(request, data))
        else:
            body = self._body(request, data)
        return make_response(call, await self.handler(call, **arguments, **body))

    def _body(self, request: HttpRequest, data: bytes) -> dict[str, object]:
        """Return the argument for a body that was read whole; none where the route takes none, or a stream."""
        if self.body in (None, Incoming):
            return {}
        if self.body is bytes:
            return {"body": data}
        try:
            return {"body": _decoded(lambda: from_json(data, self.body))}
        except InvalidValue as error:
            raise _newer(request.headers.get("sgpu-protocol", ""), error) from None


class Routes:
    """The routes of one module."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self.all: list[Route] = []

    def get(self, path: str, *, needs: Need) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Declare how something is read."""
        return self._declare("GET", path, needs, 0)

    def post(
        self, path: str, *, needs: Need, limit: int = BODY_BYTES_MAX
    ) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Declare how something is made or done; `limit` of the body in bytes."""
        return self._declare("POST", path, needs, limit)

    def put(
        self, path: str, *, needs: Need, limit: int = BODY_BYTES_MAX
    ) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Declare how something of a given name is made; `limit` of the body in bytes."""
        return self._declare("PUT", path, needs, limit)

    def patch(
        self, path: str, *, needs: Need, limit: int = BODY_BYTES_MAX
    ) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Declare how something is changed; `limit` of the body in bytes."""
        return self._declare("PATCH", path, needs, limit)

    def delete(self, path: str, *, needs: Need) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Declare how something is taken away."""
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
    """Return what is wrong with a body that is not understood: who sent it may speak what comes after this version."""
    if not (protocol.isascii() and protocol.isdigit() and len(protocol) < 6) or int(protocol) <= PROTOCOL:
        return error
    return InvalidValue(
        f"you speak protocol {protocol}, this server speaks {PROTOCOL}: {error.message}",
        hint="upgrade serverless-gpu on the server: it is upgraded first",
    )


def _decoded(decode: Callable[[], T]) -> T:
    try:
        return decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidValue(str(error)[:500], hint="docs/openapi.json says what this route takes") from error


def _query(request: HttpRequest, kind: Any) -> object:
    asked: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in asked:
            raise InvalidValue(f"the parameter {name[:64]!r} is there twice")
        asked[name] = value
    return from_builtins(asked, kind, strict=False)


def _identified(parts: typing.Mapping[str, object]) -> dict[str, object]:
    """Return what of a path the log may have: identifiers, and no other text of the caller."""
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
        raise InvalidValue(f"{name} is not a number", hint="it is a part of the path")
    return int(text)


def make_response(call: Call, answer: object) -> Response:
    """Return the response that carries an answer."""
    if isinstance(answer, Response):
        return answer
    if isinstance(answer, Stream):
        return answer.response(call)
    if answer is None:
        return Response(status_code=204)
    return Response(msgspec.json.encode(answer), media_type=JSON)


def range_response(read: Reader, size: int, asked: str) -> Response:
    """Return the bytes that a request asks for.

    Args:
        read: where they come from.
        size: of the whole.
        asked: the request's `Range`; one that is not a single simple range means everything, as HTTP says.
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
    first = next(pieces, b"")  # now: what is not there is a problem that can still be said
    following = itertools.chain((first,), pieces)
    return StreamingResponse(following, status_code=status, headers=headers, media_type=BYTES)
