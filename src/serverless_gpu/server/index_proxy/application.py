"""Serves the index proxy: project pages and files of the configured indexes.

    GET /<index>/simple/<project>/           page of a project, in HTML or JSON as the client asks
    GET /<index>/files/<signature>/…         a file, or the metadata of a wheel

    request ─▶ GET or HEAD? ─▶ token ─▶ limits of the client ─▶ index, project, signature ─▶ upstream ─▶ client
                  405           401         429, 503                 404                     502, 504

The proxy holds a page in memory, and streams a file. If a page named the hash of a file, the proxy holds back the last
piece of the file until the hash is right. Otherwise the client sees an incomplete file.

Failure cases:

- The index is unreachable, slow, or ends its answer early. The client receives 502 or 504 with the reason. After the
  first bytes of a file, the proxy ends the connection, so that the client sees an incomplete file.

- The client disconnects, or reads nothing for `SEND_S`. The proxy ends the request to the index.

- A secret of a private index is missing or refused. The client receives 502, and the log names the secret.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import logging
import re
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple, NoReturn

from anyio import to_thread
from starlette.types import Message, Receive, Scope, Send

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import NotAuthenticated, ServerlessGpuError
from serverless_gpu.server.core.server_key import Keys
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.http.access_log import METHODS
from serverless_gpu.server.index_proxy import links, pages
from serverless_gpu.server.index_proxy.client_limits import ClientLimits, LimitReached
from serverless_gpu.server.index_proxy.definition import normalized
from serverless_gpu.server.index_proxy.index_catalog import IndexCatalog, ServedIndex
from serverless_gpu.server.index_proxy.index_tokens import IndexTokens
from serverless_gpu.server.index_proxy.links import FileLink
from serverless_gpu.server.index_proxy.request_log import IndexRequestLog
from serverless_gpu.server.index_proxy.upstream import Upstream, UpstreamProblem, UpstreamResponse
from serverless_gpu.wire.indexes import IndexLogEntry

PAGE_BYTES_MAX = 64 << 20
PAGES_AT_ONCE = 4
"""Maximum number of pages in memory."""
PAGE_S = 60.0
"""Maximum seconds for a page, so that a slow index keeps no other index from its pages for long."""
FILE_BYTES_MAX = 16 << 30
PATH_BYTES_MAX = 8 << 10
TOTAL_S = 3_600.0
SEND_S = 60.0
TOKEN_FRESH_S = 5.0
TOKENS_KNOWN_MAX = 4_096
PAGE_FRESH_S = 60
FILE_FRESH_S = 86_400
RETRY_S = 2
_RANGE = re.compile(r"bytes=([0-9]{1,15}-[0-9]{0,15}|-[0-9]{1,15})")
_MEDIA_TYPE = re.compile(r"[a-z0-9.+-]{1,60}/[a-z0-9.+-]{1,80}")
_BASIC = re.compile(r"(?i)basic +([A-Za-z0-9+/=]{1,2000})")
_ASKED_HEADERS = ("if-range", "if-none-match", "if-modified-since")
_ANSWER_HEADERS = ("content-length", "content-range", "accept-ranges", "etag", "last-modified")
_logger = logging.getLogger(__name__)


class Refusal(Exception):
    """A request that the proxy refuses.

    Attributes:
        status: HTTP status.
        outcome: short name of the reason for log and metrics.
        headers: further headers of the response.
    """

    def __init__(self, status: int, outcome: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.outcome = status, outcome
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Disconnected(Exception):
    """The client has closed its connection, or reads nothing."""


class _Target(NamedTuple):
    """The object that a request names."""

    served: ServedIndex
    kind: str
    rest: str


class _Exchange:
    """One request with its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, clock: Clock) -> None:
        self.id = secrets.token_hex(6)
        self.method = scope["method"] if scope["method"] in METHODS else "OTHER"
        self.is_head = scope["method"] == "HEAD"
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self.path = (scope.get("raw_path") or b"").partition(b"?")[0].decode("latin-1")
        self.query = scope["query_string"].decode("latin-1")
        self.peer = str((scope.get("client") or ("",))[0])
        self.status, self.bytes = 0, 0
        self.client, self.index, self.project, self.file = "", "", "", ""
        self.detail = ""
        self._began_wall_ns, self._began_ns = clock.wall_ns(), clock.boottime_ns()
        self._clock = clock
        self._send = send
        self._gone = asyncio.ensure_future(_disconnected(receive))

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the status and the headers."""
        self.status = status
        shown = [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
        shown += [(b"x-content-type-options", b"nosniff"), (b"sgpu-request", self.id.encode())]
        await self._sent({"type": "http.response.start", "status": status, "headers": shown})

    async def write(self, piece: bytes, *, more: bool) -> None:
        """Send a piece of the body. Raises Disconnected."""
        self.bytes += len(piece)
        await self._sent({"type": "http.response.body", "body": piece, "more_body": more})

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole response."""
        await self.start(status, {**headers, "content-length": f"{len(body)}"})
        await self.write(b"" if self.is_head else body, more=False)

    async def refuse(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        """Send a refusal, unless the response has already begun. The server then ends the connection."""
        self.detail = message
        if self.status:
            return
        body = f"{message}\n".encode()
        with contextlib.suppress(Disconnected):
            await self.answer(status, {"content-type": "text/plain; charset=utf-8", **(headers or {})}, body)

    def entry(self, outcome: str) -> IndexLogEntry:
        """Return the entry for the request log."""
        return IndexLogEntry(
            at_ns=self._began_wall_ns,
            client=self.client,
            method=self.method,
            index=self.index,
            project=self.project,
            file=self.file,
            status=self.status,
            bytes=self.bytes,
            ms=round((self._clock.boottime_ns() - self._began_ns) / 1e6, 1),
            outcome=outcome,
            detail=self.detail,
        )

    def close(self) -> None:
        """Stop waiting for the client."""
        self._gone.cancel()

    async def _sent(self, message: Message) -> None:
        if self._gone.done():
            raise Disconnected("the client closed the connection")
        try:
            async with asyncio.timeout(SEND_S):
                await self._send(message)
        except TimeoutError:
            raise Disconnected(f"the client read nothing for {SEND_S:.0f} s") from None
        except OSError:
            raise Disconnected("the client closed the connection") from None


class IndexProxy:
    """ASGI application of the index proxy."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        keys: Keys,
        index_catalog: IndexCatalog,
        index_tokens: IndexTokens,
        index_log: IndexRequestLog,
    ) -> None:
        self._is_open = settings.index_proxy is not None and settings.index_proxy.open
        self._clock = clock
        self._sign = keys.link_signature
        self._catalog = index_catalog
        self._tokens = index_tokens
        self._requests = index_log
        self._limits = ClientLimits(clock)
        self._pages = asyncio.Semaphore(PAGES_AT_ONCE)
        self._holders: dict[str, tuple[str, int]] = {}  # Holder and time of the check, by token.
        self._upstream = Upstream()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the start and the end of the server."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._serve(_Exchange(scope, receive, send, self._clock))
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        async with self._upstream:
            pass
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve(self, exchange: _Exchange) -> None:
        outcome = "ok"
        try:
            async with asyncio.timeout(TOTAL_S):
                await self._admit(exchange)
                async with self._limits.slot(exchange.client):
                    await self._answer(exchange)
        except Refusal as error:
            outcome = error.outcome
            await exchange.refuse(error.status, str(error), error.headers)
        except LimitReached as error:
            outcome = "limit"
            await exchange.refuse(error.status, str(error), {"retry-after": f"{RETRY_S}"})
        except UpstreamProblem as error:
            outcome = error.outcome
            retry = {"retry-after": f"{RETRY_S}"} if error.status == 503 else None
            await exchange.refuse(error.status, f"{exchange.index}: {error}", retry)
        except Disconnected as error:
            outcome, exchange.detail = "disconnected", str(error)
        except TimeoutError:
            outcome = "timeout"
            await exchange.refuse(504, f"the request took longer than {TOTAL_S:.0f} s")
        except ServerlessGpuError as error:  # The database does not answer.
            outcome = "server"
            await exchange.refuse(503, error.message, {"retry-after": f"{RETRY_S}"})
        except Exception:  # Hide the details of server bugs from clients.
            outcome = "server"
            _logger.exception("a request of the index proxy failed")
            await exchange.refuse(500, f"an internal error occurred in the server (request {exchange.id})")
        finally:
            exchange.close()
            self._requests.add(exchange.entry(outcome), request_id=exchange.id, peer=exchange.peer)

    async def _admit(self, exchange: _Exchange) -> None:
        """Check the method and the token, and find the client. Raises Refusal."""
        if exchange.method not in ("GET", "HEAD"):
            raise Refusal(405, "refused", "the index proxy supports GET and HEAD only", allow="GET, HEAD")
        if len(exchange.path) + len(exchange.query) > PATH_BYTES_MAX:
            raise Refusal(414, "refused", "the path is too long")
        said = exchange.headers.get("authorization")
        if said is None:
            if not self._is_open:
                _refuse_token("the index proxy needs a token: use http://sgpu:TOKEN@HOST:PORT/INDEX/simple/")
            exchange.client = f"address:{exchange.peer}"
            return
        token = _password(said)
        holder, checked_ns = self._holders.get(token, ("", 0))
        now_ns = self._clock.boottime_ns()
        if not holder or now_ns - checked_ns > TOKEN_FRESH_S * 1e9:
            self._holders.pop(token, None)
            try:
                holder = await to_thread.run_sync(self._tokens.check, token)
            except NotAuthenticated as error:
                _refuse_token(str(error))
            if len(self._holders) >= TOKENS_KNOWN_MAX:
                self._holders.clear()
            self._holders[token] = holder, now_ns
        exchange.client = holder

    async def _answer(self, exchange: _Exchange) -> None:
        target = await self._target(exchange)
        if target.kind == links.FILES:
            await self._answer_file(exchange, target)
        else:
            await self._answer_page(exchange, target)

    async def _target(self, exchange: _Exchange) -> _Target:
        """Return the index and the kind of the request's path. Raises Refusal."""
        name, _, rest = exchange.path.removeprefix("/").partition("/")
        kind, _, rest = rest.partition("/")
        if kind not in ("simple", links.FILES):
            raise Refusal(404, "missing", "the index proxy serves /INDEX/simple/PROJECT/ and the files of these pages")
        index = await to_thread.run_sync(self._catalog.find, name)
        if index is None:
            raise Refusal(404, "missing", f"the server has no index {name[:64]!r}: sgpu index list")
        exchange.index = name
        if index.problem:
            raise Refusal(502, "credentials", f"{name}: {index.problem}")
        return _Target(index, kind, rest)

    async def _answer_page(self, exchange: _Exchange, target: _Target) -> None:
        text = target.rest.removesuffix("/")
        project = normalized(text)
        if project is None:
            raise Refusal(404, "missing", "the path names no valid project (the index proxy has no list of projects)")
        exchange.project = project
        if target.rest != f"{project}/":
            # Links of a page are relative to its normalized URL.
            location = f"../{project}/" if target.rest.endswith("/") else f"{project}/"
            await exchange.answer(301, {"location": location}, b"")
            return
        definition = target.served.definition
        asked = exchange.headers.get("accept", "")
        headers = {
            "Accept": asked if asked.isascii() and asked.isprintable() and 0 < len(asked) <= 500 else pages.PLAIN_HTML,
            "Accept-Encoding": "gzip",
        }
        async with self._pages:
            url = f"{definition.url}{project}/"
            try:
                async with asyncio.timeout(PAGE_S), self._fetched(target.served, "GET", url, headers) as response:
                    _check_status(response, target.served, project)
                    data = await response.decoded(PAGE_BYTES_MAX)
                    content_type = response.headers.get("content-type", "")
            except TimeoutError:
                raise UpstreamProblem(504, "timeout", f"the page took longer than {PAGE_S:.0f} s") from None
            try:
                page = await to_thread.run_sync(
                    lambda: pages.rewrite(
                        definition, content_type, data, url=response.url, project=project, sign=self._sign
                    )
                )
            except pages.InvalidPage as error:
                raise UpstreamProblem(502, "invalid", str(error)) from None
            if page.left_out:
                exchange.detail = f"links left out: {', '.join(page.left_out)}"
            fresh = {"cache-control": f"private, max-age={PAGE_FRESH_S}", "vary": "accept"}
            await exchange.answer(200, {"content-type": page.content_type, **fresh}, page.body)

    async def _answer_file(self, exchange: _Exchange, target: _Target) -> None:
        definition = target.served.definition
        link = links.from_proxy(definition, target.rest, exchange.query, self._sign)
        if link is None:
            raise Refusal(404, "missing", f"no page of the index {definition.name} contained this link")
        exchange.file = link.file
        headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
        for name in _ASKED_HEADERS:
            value = exchange.headers.get(name, "")
            if value and value.isascii() and value.isprintable() and len(value) <= 300:
                headers[name] = value
        asked = exchange.headers.get("range", "").strip()
        if _RANGE.fullmatch(asked):
            headers["Range"] = asked
        method = "HEAD" if exchange.is_head else "GET"
        async with self._fetched(target.served, method, link.url, headers) as response:
            if response.status not in (206, 304, 416):
                _check_status(response, target.served, link.file)
            await _stream(exchange, response, link)

    @contextlib.asynccontextmanager
    async def _fetched(
        self, index: ServedIndex, method: str, url: str, headers: Mapping[str, str]
    ) -> AsyncIterator[UpstreamResponse]:
        response = await self._upstream.fetch(index.definition, method, url, headers, credentials=index.credentials)
        try:
            yield response
        finally:
            await response.close()


async def _stream(exchange: _Exchange, response: UpstreamResponse, link: FileLink) -> None:
    """Send a file to the client. The last piece waits for the hash of the whole file."""
    length = response.headers.get("content-length", "0")  # The client library ends a body at its length.
    if not (length.isascii() and length.isdigit() and len(length) < 16 and int(length) <= FILE_BYTES_MAX):
        raise UpstreamProblem(502, "too_large", f"{link.file} has more than {FILE_BYTES_MAX} bytes")
    headers = {name: response.headers[name] for name in _ANSWER_HEADERS if name in response.headers}
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    headers["content-type"] = kind if _MEDIA_TYPE.fullmatch(kind) else "application/octet-stream"
    if link.sha256 and response.status == 200:
        headers["cache-control"] = f"private, max-age={FILE_FRESH_S}"
    await exchange.start(response.status, headers)
    if exchange.is_head or response.status == 304:
        await exchange.write(b"", more=False)
        return
    digest = hashlib.sha256() if link.sha256 and response.status == 200 else None
    held, received = b"", 0
    async for piece in response.raw():
        received += len(piece)
        if received > FILE_BYTES_MAX:
            raise UpstreamProblem(502, "too_large", f"{link.file} has more than {FILE_BYTES_MAX} bytes")
        if digest is not None:
            digest.update(piece)
        if held:
            await exchange.write(held, more=True)
        held = piece
    if digest is not None and digest.hexdigest() != link.sha256:
        raise UpstreamProblem(502, "hash", f"{link.file} does not have the hash that the page of the index names")
    await exchange.write(held, more=False)


def _check_status(response: UpstreamResponse, index: ServedIndex, what: str) -> None:
    """Raise UpstreamProblem unless an index has answered with the whole object."""
    status, name = response.status, index.definition.name
    if status == 200:
        return
    # Indexes in object stores answer 403 for a missing object.
    if status in (404, 410) or (status in (401, 403) and not index.credentials):
        raise UpstreamProblem(404, "missing", f"the index has no {what}")
    if status in (401, 403):
        raise UpstreamProblem(
            502, "credentials", f"the index refuses the server's credentials; set the secret of the index {name} again"
        )
    if status == 429:
        raise UpstreamProblem(503, "upstream", "the index limits the requests of the server")
    raise UpstreamProblem(502, "upstream", f"the index answered with status {status}")


def _password(authorization: str) -> str:
    """Return the password of a Basic header, or the user name if there is no password. Raises Refusal."""
    match = _BASIC.fullmatch(authorization.strip())
    try:
        pair = base64.b64decode(match[1], validate=True).decode("ascii") if match else ""
    except (binascii.Error, UnicodeDecodeError):
        pair = ""
    user, _, password = pair.partition(":")
    if not (password or user):
        _refuse_token("the index proxy reads its token from HTTP Basic authentication")
    return password or user


def _refuse_token(message: str) -> NoReturn:
    raise Refusal(401, "refused", message, www_authenticate='Basic realm="sgpu index proxy"')


async def _disconnected(receive: Receive) -> None:
    """Wait until the client closes the connection. The proxy reads no request body."""
    while (await receive())["type"] != "http.disconnect":
        pass
