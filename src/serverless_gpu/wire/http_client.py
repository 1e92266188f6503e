"""Sends HTTP requests to a server, with retries while the server is unreachable.

    Connection        `connection.py`: many requests, threads, streams; with httpx2
    BriefConnection   here: a few requests of a command, with the standard library, because importing httpx2 and its
                      dependencies takes more CPU time than such a command. No streams, no threads

All routes are idempotent, so that the client can repeat a request. Use plain `http://` only for loopback addresses,
because each request contains a token.

The client retries a request after a connection error, a status from 502 to 504, or an answer with a retryable
exception. After `patience_s` seconds, the client raises `ServerUnavailable`. The client reports the beginning and the
end of each wait for the server. `url` and `token` can be functions that return the new address and token of a restarted
server. If an answer does not follow the protocol, such as a proxy's error page, the client raises `ServerProblem`.
"""

from __future__ import annotations

import abc
import http.client
import os
import random
import ssl
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlencode, urlsplit

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import (
    InvalidValue,
    NoSuitableNode,
    NotAuthenticated,
    ServerlessGpuError,
    ServerProblem,
    ServerUnavailable,
    error_class,
)
from serverless_gpu.json_codec import from_json
from serverless_gpu.units import format_duration_ms
from serverless_gpu.version import __version__
from serverless_gpu.wire.base import API, PROTOCOL, Problem, Request
from serverless_gpu.wire.server_status import Health

T = TypeVar("T")
CONNECT_S = 5.0
ANSWER_S = 60.0
_PAUSE_S = 0.1
_PAUSE_S_MAX = 5.0
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
_AWAY = frozenset({502, 503, 504})
_TEXT_CHARACTERS_MAX = 200


class Reply(NamedTuple):
    """A complete HTTP answer of a server."""

    status: int
    content: bytes
    headers: Mapping[str, str]
    url: str  # Address of the request without query parameters.


class HttpClient(abc.ABC):
    """Base class of HTTP clients for one server and one token. Subclasses implement the transport.

    `url` and `token` are strings, or functions that return the current values. If the server does not answer, the
    client calls the function `url` again, possibly in another thread. If the server rejects the token, the client calls
    the function `token` again. `patience_s` is the maximum wait for an unreachable server in seconds. At the start and
    the end of a wait, the client calls `announce` with a message. `ca` is a file with trusted certificates, or "" for
    the system's certificates.
    """

    def __init__(
        self,
        url: str | Callable[[], str],
        token: str | Callable[[], str],
        *,
        patience_s: float = 0.0,
        announce: Callable[[str], None] | None = None,
        ca: str = "",
    ) -> None:
        self._address = _always(url) if isinstance(url, str) else url
        self.url = self._address().rstrip("/")
        self._whose = _always(token) if isinstance(token, str) else token
        self._token = self._whose()
        self._patience_s = patience_s
        self._announce = announce or (lambda _line: None)
        self._ca = ca
        self._clock = SystemClock()
        self._closed = threading.Event()

    def ask(
        self,
        method: str,
        path: str,
        body: Request | None = None,
        *,
        answer: type[T],
        query: Mapping[str, str] | None = None,
    ) -> T:
        """Send a request and return the answer's body.

        `path` is below ``/api/v1``. For an answer without a body, pass ``NoneType`` as `answer`. Raises
        ServerUnavailable after `patience_s` seconds, or the exception in the error answer.
        """
        content = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if content is not None else {}
        reply = self._patiently(method, path, content=content, headers=headers, params=dict(query or {}))
        if answer is type(None):
            return None
        try:
            return from_json(reply.content, answer)
        except msgspec.MsgspecError as error:
            raise ServerProblem(f"the answer of {reply.url} cannot be understood: {error}") from None

    def health(self) -> Health:
        """Return the health report of a healthy or unhealthy server. Raises the same errors as `ask`."""
        reply = self._patiently("GET", "/health", fine=(503,))
        try:
            return from_json(reply.content, Health)
        except msgspec.MsgspecError:  # The answer comes from a proxy in front of the server.
            raise problem_of(reply) from None

    def put(self, path: str, data: bytes | memoryview) -> None:
        """Send bytes. Raises the same errors as `ask`."""
        self._patiently("PUT", path, content=bytes(data), headers={"Content-Type": "application/octet-stream"})

    def get(
        self, path: str, *, query: Mapping[str, str] | None = None, start: int = 0, length: int | None = None
    ) -> bytes:
        """Return the bytes of an object or of a byte range. Raises the same errors as `ask`."""
        return self.fetch(path, query=query, start=start, length=length)[0]

    def fetch(
        self, path: str, *, query: Mapping[str, str] | None = None, start: int = 0, length: int | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        """Return the bytes of an object and the headers of the answer. Raises the same errors as `get`."""
        headers = {}
        if start or length is not None:
            headers["Range"] = f"bytes={start}-" + ("" if length is None else str(start + length - 1))
        reply = self._patiently("GET", path, headers=headers, params=dict(query or {}), fine=(416,))
        return (b"" if reply.status == 416 else reply.content), reply.headers

    def renew(self) -> bool:
        """Read the current token, and return True if the token has changed."""
        token = self._whose()
        if token == self._token:
            return False
        self._token = token
        return True

    def close(self) -> None:
        """Refuse further requests. After this call, requests that wait for the server raise an exception."""
        self._closed.set()

    # --- requests and retries ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _send(
        self, method: str, path: str, *, content: bytes | None, headers: Mapping[str, str], params: Mapping[str, str]
    ) -> Reply:
        """Send a request to `self.url` with `self._headers()`. Raise the error from `_away` on failure."""

    def _headers(self) -> dict[str, str]:
        """Return the headers of every request. Public routes need no token."""
        return {
            **({"Authorization": f"Bearer {self._token}"} if self._token else {}),
            "User-Agent": f"serverless-gpu/{__version__}",
            "SGPU-Protocol": str(PROTOCOL),
        }

    def _patiently(self, method: str, path: str, *, fine: tuple[int, ...] = (), **request: Any) -> Reply:
        """Send a request, and repeat the request while the server is unreachable."""
        began_ns, pause_s, waiting = self._clock.boottime_ns(), _PAUSE_S, False
        while True:
            try:
                reply = self._once(method, path, fine, **request)
            except ServerlessGpuError as error:
                waited_s = (self._clock.boottime_ns() - began_ns) / 1e9
                if (error.retryable or isinstance(error, NotAuthenticated)) and self._has_moved():
                    continue  # Repeat the request at the server's new address.
                if isinstance(error, NotAuthenticated) and self.renew():
                    continue
                if not error.retryable or waited_s + pause_s > self._patience_s:
                    raise
                if not waiting and waited_s > 1.0:
                    waiting = True
                    self._announce(f"the server at {self.url} does not answer; waiting for it")
                if self._closed.wait(pause_s * random.uniform(0.5, 1.0)):
                    raise
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)
                continue
            if waiting:
                waited_ms = (self._clock.boottime_ns() - began_ns) // 1_000_000
                self._announce(f"the server answers again after {format_duration_ms(waited_ms)}")
            return reply

    def _has_moved(self) -> bool:
        """Read the server's current address, and return True if the address has changed."""
        url = self._address().rstrip("/")
        if url == self.url or url.partition(":")[0] != self.url.partition(":")[0]:
            return False
        self.url = url
        self.renew()  # The server at the new address may require another token.
        return True

    def _once(
        self,
        method: str,
        path: str,
        fine: tuple[int, ...],
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> Reply:
        reply = self._send(method, path, content=content, headers=headers or {}, params=params or {})
        if reply.status >= 400 and reply.status not in fine:
            raise problem_of(reply)
        return reply

    def _away(self, error: Exception, *, is_no_http: bool = False) -> ServerUnavailable:
        """Return the exception for a transport error. `is_no_http` is True if the peer does not speak HTTP."""
        said = str(error)
        if _UNTRUSTED in said:
            hint = (
                "for a certificate of your own certificate authority, run `sgpu login URL --ca FILE` with the "
                "authority's "
                "certificate"
            )
            if "mismatch" in said:
                hint = "use a server name from the certificate. `sgpu up` prints the names after `others:`"
            elif "expired" in said or "not yet valid" in said:
                hint = "check the clock of this machine, or ask the server's operator to renew the certificate"
            why = said.partition("certificate verify failed: ")[2].partition(" (_ssl")[0] or said
            return ServerUnavailable(
                f"this machine does not trust the certificate of the server at {self.url} ({_UNTRUSTED}: {why})",
                hint=hint,
            )
        hint = "start the server with `sgpu up` on its machine, and check the server with `sgpu doctor`"
        if proxy := proxy_variable(self.url, os.environ):
            hint += f". Connections to a server ignore {proxy}, so connect directly or through `ssh -L`"
        if self.url.startswith("http://") and is_no_http:
            hint = "if the server uses TLS, use an address that begins with https://"
        return ServerUnavailable(
            f"the server at {self.url} does not answer ({type(error).__name__}: {error})", hint=hint
        )


class BriefConnection(HttpClient):
    """An HTTP client for a few sequential requests, with the constructor of `HttpClient`."""

    def _send(
        self, method: str, path: str, *, content: bytes | None, headers: Mapping[str, str], params: Mapping[str, str]
    ) -> Reply:
        url = self.url + API + path
        target = urlsplit(url).path + (f"?{urlencode(params)}" if params else "")
        connection = self._made()
        try:
            connection.connect()
            connection.sock.settimeout(ANSWER_S)
            connection.request(method, target, body=content, headers={**self._headers(), **headers})
            answer = connection.getresponse()
            return Reply(answer.status, answer.read(), cast("Mapping[str, str]", answer.headers), url)
        except (OSError, http.client.HTTPException) as error:
            raise self._away(error, is_no_http=isinstance(error, http.client.BadStatusLine)) from None
        finally:
            connection.close()

    def _made(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        try:
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise InvalidValue(f"{self.url} is not a valid address: {error}") from None
        if parts.scheme != "https":
            return http.client.HTTPConnection(host, port, timeout=CONNECT_S)
        return http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=trust(self._ca))


def proxy_variable(url: str, environ: Mapping[str, str]) -> str:
    """Return the environment variable that sets a proxy for an address, or "".

    Connections to a server bypass proxies, because a proxy would see the token. Error hints name the variable, because
    users behind a proxy may not expect the bypass. A lower-case variable takes precedence, as in curl.
    """
    parts = urlsplit(url)
    if parts.hostname in ("localhost", "127.0.0.1", "::1"):
        return ""
    names = (f"{parts.scheme}_proxy", f"{parts.scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY")
    return next((name for name in names if environ.get(name)), "")


def _always(text: str) -> Callable[[], str]:
    return lambda: text


def problem_of(reply: Reply) -> ServerlessGpuError:
    """Return the exception for an answer with status 400 or higher."""
    try:
        problem = from_json(reply.content, Problem)
    except msgspec.MsgspecError:
        cls = ServerUnavailable if reply.status in _AWAY else ServerProblem
        text = reply.content.decode(errors="replace")[:_TEXT_CHARACTERS_MAX].strip()
        return cls(f"{reply.url} answered {reply.status}: {text}")
    error = error_class(problem.code)(problem.message, hint=problem.hint)
    if problem.run_id and hasattr(error, "run_id"):
        error.run_id = problem.run_id
    if problem.shortage is not None and isinstance(error, NoSuitableNode):
        there = problem.shortage
        error.gpus, error.gpu_type, error.pool, error.choices = there.gpus, there.gpu_type, there.pool, there.choices
    return error


def trust(ca: str) -> ssl.SSLContext:
    """Return the TLS context that verifies a server's certificate.

    Creating the context takes 20 ms.
    """
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise InvalidValue(
            f"{ca or 'the system'} has no readable certificate: {error.strerror or error}",
            hint="set the PEM certificate of the server's authority with `sgpu login URL --ca FILE`",
        ) from error
