"""Sends the proxy's requests to package indexes.

    request ─▶ host in the definition? ─▶ resolve ─▶ addresses permitted? ─▶ connect to this address ─▶ response
                  ▲                                                                                        │
                  └──────────────── redirect, at most five, to a host of the definition ◀──────────────────┘

The network backend resolves each name and connects to an address that it has checked. A name server therefore cannot
lead the proxy to the server's own network (DNS rebinding). Credentials go only to the scheme, host and port of the
index's URL. The proxy ignores HTTP_PROXY and similar variables, because another proxy would resolve names itself.

Failure cases: an index that does not answer, or sends nothing for `READ_S`, ends the request with 504. The body of a
file has `application.TOTAL_S` in total.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from types import TracebackType
from urllib.parse import urljoin, urlsplit

import anyio
import httpcore2

from serverless_gpu.server.index_proxy.definition import IndexDefinition, authority, is_open_address
from serverless_gpu.version import __version__

CONNECT_S = 10.0
READ_S = 30.0
REDIRECTS_MAX = 5
CONNECTIONS_MAX = 128
ADDRESSES_MAX = 4
"""Maximum number of addresses of a host that the proxy tries."""
KEPT_S = 30.0
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class UpstreamProblem(Exception):
    """An index did not give a usable answer.

    Attributes:
        status: status of the proxy's response.
        outcome: short name of the problem for log and metrics.
    """

    def __init__(self, status: int, outcome: str, message: str) -> None:
        super().__init__(message)
        self.status, self.outcome = status, outcome


class UpstreamResponse:
    """A response of an index, whose body the caller reads once."""

    def __init__(self, response: httpcore2.Response, url: str) -> None:
        self.status = response.status
        self.url = url
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
        self._response = response

    async def raw(self) -> AsyncIterator[bytes]:
        """Yield the body as the index has sent it. Raises UpstreamProblem."""
        with _translated(self.url):
            async for piece in self._response.aiter_stream():
                yield piece

    async def decoded(self, bytes_max: int) -> bytes:
        """Return the whole body without its compression. Raises UpstreamProblem for a body over the limit."""
        encoding = self.headers.get("content-encoding", "identity").lower()
        if encoding not in ("identity", "gzip"):
            raise UpstreamProblem(502, "invalid", f"the index compressed its page with {encoding[:20]!r}")
        inflate = zlib.decompressobj(31) if encoding == "gzip" else None
        body = bytearray()
        async for piece in self.raw():
            try:
                body += piece if inflate is None else inflate.decompress(piece, bytes_max + 1 - len(body))
            except zlib.error:
                raise UpstreamProblem(502, "invalid", "the index sent a damaged page") from None
            if len(body) > bytes_max:
                raise UpstreamProblem(502, "too_large", f"the page of the index has more than {bytes_max} bytes")
        if inflate is not None and not inflate.eof:
            raise UpstreamProblem(502, "truncated", "the index ended the connection within its page")
        return bytes(body)

    async def close(self) -> None:
        """Return the connection to the pool, or close the connection if the body was not read."""
        with contextlib.suppress(Exception):
            await self._response.aclose()


class Upstream:
    """Connections to indexes. Use within one event loop."""

    def __init__(self) -> None:
        context = ssl.create_default_context()
        inner = httpcore2.AnyIOBackend()
        # An index with permission for private addresses never shares connections with an index without it.
        self._pools = {
            private: httpcore2.AsyncConnectionPool(
                ssl_context=context,
                max_connections=CONNECTIONS_MAX,
                max_keepalive_connections=CONNECTIONS_MAX // 4,
                keepalive_expiry=KEPT_S,
                network_backend=CheckedBackend(inner, private=private),
            )
            for private in (False, True)
        }
        self._timeout = {"connect": CONNECT_S, "read": READ_S, "write": READ_S, "pool": CONNECT_S}

    async def __aenter__(self) -> Upstream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pool in self._pools.values():
            await pool.aclose()

    async def fetch(
        self, index: IndexDefinition, method: str, url: str, headers: Mapping[str, str], *, credentials: str = ""
    ) -> UpstreamResponse:
        """Return the response of an index, after redirects to its own hosts. Raises UpstreamProblem.

        Args:
            index: the definition of the index, which names the permitted hosts.
            method: "GET" or "HEAD".
            url: URL of a page or file.
            headers: further headers.
            credentials: `Authorization` header for the index's own host, or "".
        """
        for _ in range(REDIRECTS_MAX + 1):
            response = await self._ask(index, method, url, headers, credentials)
            if response.status not in _REDIRECTS:
                return response
            await response.close()
            try:
                url = urljoin(url, response.headers.get("location", ""))
                scheme, host = urlsplit(url).scheme, authority(url)
            except ValueError:
                raise UpstreamProblem(502, "redirect", "the index redirects to an invalid URL") from None
            if not index.has_host(scheme, host):
                raise UpstreamProblem(
                    502,
                    "redirect",
                    f"the index redirects to {scheme}://{host[:100]}, which is not a host of its definition",
                )
        raise UpstreamProblem(502, "redirect", f"the index redirects more than {REDIRECTS_MAX} times")

    async def _ask(
        self, index: IndexDefinition, method: str, url: str, headers: Mapping[str, str], credentials: str
    ) -> UpstreamResponse:
        parts = urlsplit(url)
        host = authority(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        sent = {"Host": host, "User-Agent": f"serverless-gpu/{__version__}", **headers}
        if credentials and (parts.scheme, host) == (index.scheme, index.authority):
            sent["Authorization"] = credentials
        try:
            request = httpcore2.Request(
                method,
                httpcore2.URL(scheme=parts.scheme, host=parts.hostname or "", port=parts.port, target=target),
                headers=[(name.encode("ascii"), value.encode("latin-1")) for name, value in sent.items()],
                extensions={"timeout": self._timeout},
            )
        except (ValueError, TypeError):
            raise UpstreamProblem(502, "invalid", "the index has an invalid URL") from None
        with _translated(url):
            response = await self._pools[index.private].handle_async_request(request)
        return UpstreamResponse(response, url)


class CheckedBackend(httpcore2.AsyncNetworkBackend):
    """Connects to permitted addresses only. TLS still verifies the name of the host."""

    def __init__(self, inner: httpcore2.AsyncNetworkBackend, *, private: bool) -> None:
        self._inner = inner
        self._private = private

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Resolve a host and connect to the first permitted address that answers."""
        within_s = timeout or CONNECT_S
        found = await _addresses(host, port, within_s)
        permitted = [each for each in found if is_open_address(each, private=self._private)]
        if not permitted:
            raise UpstreamProblem(
                502,
                "address",
                f"the proxy does not connect to {found[0]}, the address of {host}. An administrator can permit private "
                "addresses for an index: sgpu index set --private",
            )
        problem: Exception = httpcore2.ConnectError("no address answers")
        for address in permitted[:ADDRESSES_MAX]:
            try:
                return await self._inner.connect_tcp(
                    address, port, timeout=within_s / min(len(permitted), ADDRESSES_MAX), socket_options=socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                problem = error
        raise problem

    async def sleep(self, seconds: float) -> None:
        """Wait between two tries of a connection."""
        await anyio.sleep(seconds)


async def _addresses(host: str, port: int, within_s: float) -> list[str]:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(within_s):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UpstreamProblem(502, "unreachable", f"the name {host} has no address") from None
    except TimeoutError:
        raise UpstreamProblem(504, "timeout", f"the name servers do not answer for {host}") from None
    return list(dict.fromkeys(str(each[4][0]) for each in found))


@contextlib.contextmanager
def _translated(url: str) -> Iterator[None]:
    """Translate errors of the connection. The messages name the host and no further part of the URL."""
    host = authority(url)
    try:
        yield
    except httpcore2.TimeoutException:
        raise UpstreamProblem(504, "timeout", f"{host} does not answer in time") from None
    except (httpcore2.RemoteProtocolError, httpcore2.ReadError):
        raise UpstreamProblem(502, "truncated", f"{host} ended the connection within its answer") from None
    except (httpcore2.NetworkError, httpcore2.ProtocolError, OSError) as error:
        raise UpstreamProblem(502, "unreachable", f"{host} is not reachable: {str(error)[:200]}") from None
