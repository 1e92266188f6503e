"""The connection to a server that clients and nodes use: bodies in, bodies out, problems as our own exceptions.

    ask     one request, one answer            tried again while the server is away, for as long as `patience_s` says
    put     bytes of a part or an object       likewise
    get     bytes, or a range of them          likewise
    stream  server-sent events, one by one     not tried again: only the reader knows where to go on

Everything that is tried again must mean the same twice; that is so for every route of `wire` (identifiers are made by
the client, reports and parts are idempotent). Plain `http://` is for loopback: a token goes with every request.

Failure cases: nobody listens, the connection breaks, 502 to 504, or a problem whose class is retryable →
`ServerUnavailable` once patience is over, and one line when the wait begins and ends (a server that was started again
on another port is found there, where whoever made the connection can tell); an answer that is no JSON of ours
(a proxy's page) → `ServerProblem` with its status; a stream that is silent for longer than the server ever is →
`ServerUnavailable`.
"""

from __future__ import annotations

import random
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import httpx2
import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import (
    InvalidValue,
    NotAuthenticated,
    ServerlessGpuError,
    ServerProblem,
    ServerUnavailable,
    error_class,
)
from serverless_gpu.serialized import decoder, from_json
from serverless_gpu.units import format_duration_ms
from serverless_gpu.version import __version__
from serverless_gpu.wire.base import API, PROTOCOL, Problem, Request
from serverless_gpu.wire.state import Health

T = TypeVar("T")

CONNECT_S = 5.0
ANSWER_S = 60.0
SILENCE_S = 30.0
"""A stream says something, if only a comment, every 10 s."""
EVENT_BYTES_MAX = 32 << 20
_PAUSE_S = 0.1
_PAUSE_S_MAX = 5.0
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
_AWAY = frozenset({502, 503, 504})
_TEXT_CHARACTERS_MAX = 200


class Connection:
    """One server and one token; safe to use from several threads, not after a fork.

    Args:
        url: for example ``http://127.0.0.1:7878``; or a function that returns it, which is asked again, also in other
            threads, when the server does not answer there.
        token: sent with every request; or a function that returns it, which is asked again when it is not good any
            more.
        patience_s: how long a server that is away is waited for, in seconds.
        announce: given one line when that wait begins and one when it is over.
        ca: file with certificates to trust; "" for the system's.

    Attributes:
        url: where it is now, without a slash at its end.
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
        self._clock = SystemClock()
        self._closed = threading.Event()
        self._client = httpx2.Client(
            base_url=self.url + API,
            headers={
                "Authorization": f"Bearer {self._token}",
                "User-Agent": f"serverless-gpu/{__version__}",
                "SGPU-Protocol": str(PROTOCOL),
            },
            timeout=httpx2.Timeout(ANSWER_S, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=64, max_keepalive_connections=16, keepalive_expiry=60.0),
            verify=_trust(self.url, ca),
            trust_env=False,  # a proxy from the environment would see the token
        )

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

        Args:
            method: for example ``"GET"``.
            path: below ``/api/v1``, with a slash in front.
            body: what is sent, or None.
            answer: what comes back; None for nothing.
            query: parameters of the address.

        Raises:
            ServerUnavailable: the server is away, and patience is over.
            ServerlessGpuError: the server refused; the class is that of its code.
        """
        content = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if content is not None else {}
        response = self._patiently(method, path, content=content, headers=headers, params=dict(query or {}))
        if answer is type(None):
            return None
        return _decoded(response, answer)

    def health(self) -> Health:
        """Return how the server is, also when it is not well; as `ask` otherwise."""
        response = self._patiently("GET", "/health", fine=(503,))
        try:
            return from_json(response.content, Health)
        except msgspec.MsgspecError:  # something in front of the server says that it is away
            raise _problem(response) from None

    def put(self, path: str, data: bytes | memoryview) -> None:
        """Send bytes; as `ask` otherwise."""
        self._patiently("PUT", path, content=bytes(data), headers={"Content-Type": "application/octet-stream"})

    def get(
        self, path: str, *, query: Mapping[str, str] | None = None, start: int = 0, length: int | None = None
    ) -> bytes:
        """Return bytes, or a range of them: fewer where they end before; as `ask` otherwise."""
        return self.fetch(path, query=query, start=start, length=length)[0]

    def fetch(
        self, path: str, *, query: Mapping[str, str] | None = None, start: int = 0, length: int | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        """Return bytes, and the headers they came with; as `get`."""
        headers = {}
        if start or length is not None:
            headers["Range"] = f"bytes={start}-" + ("" if length is None else str(start + length - 1))
        response = self._patiently("GET", path, headers=headers, params=dict(query or {}), fine=(416,))
        return (b"" if response.status_code == 416 else response.content), response.headers

    def stream(
        self,
        method: str,
        path: str,
        body: Request | None = None,
        *,
        answer: Any,
        query: Mapping[str, str] | None = None,
    ) -> Iterator[Any]:
        """Yield the events of a stream, until the server ends it.

        Args:
            method: ``"GET"``, or ``"POST"`` for a request that is answered by a stream.
            path: as for `ask`.
            body: as for `ask`.
            answer: a type, or a tagged union of types: what events carry, and what is yielded.
            query: as for `ask`.

        Raises:
            ServerUnavailable: the server is away, or the connection broke.
            ServerlessGpuError: the server refused.
        """
        decode = decoder(answer).decode
        headers = {"Accept": "text/event-stream"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            with self._client.sse(
                path,
                method=method,
                content=None if body is None else msgspec.json.encode(body),
                params=dict(query or {}),
                headers=headers,
                timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S),
                max_event_size=EVENT_BYTES_MAX,
            ) as source:
                if source.response.status_code >= 400:
                    source.response.read()
                    raise _problem(source.response)
                for event in source:
                    yield decode(event.data)
        except httpx2.TransportError as error:
            raise self._away(error) from None
        except msgspec.MsgspecError as error:
            raise ServerProblem(f"what {self.url}{API}{path} says cannot be understood: {error}") from None

    def renew(self) -> bool:
        """Take the token that there is by now; return whether it is another one."""
        token = self._whose()
        if token == self._token:
            return False
        self._token = token
        self._client.headers["Authorization"] = f"Bearer {token}"
        return True

    def close(self) -> None:
        """Close all connections; whoever waits for the server in another thread gives up."""
        self._closed.set()
        self._client.close()

    # --- below ---------------------------------------------------------------------------------------------------

    def _patiently(self, method: str, path: str, *, fine: tuple[int, ...] = (), **request: Any) -> httpx2.Response:
        """Send a request, again and again while the server is away."""
        began_ns, pause_s, waiting = self._clock.boottime_ns(), _PAUSE_S, False
        while True:
            try:
                response = self._once(method, path, fine, **request)
            except ServerlessGpuError as error:
                waited_s = (self._clock.boottime_ns() - began_ns) / 1e9
                if (error.retryable or isinstance(error, NotAuthenticated)) and self._has_moved():
                    continue  # another server may listen by now where ours was
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
                self._announce(f"the server is back, after {format_duration_ms(waited_ms)}")
            return response

    def _has_moved(self) -> bool:
        """Turn to where the server is by now; return whether that is somewhere else."""
        url = self._address().rstrip("/")
        if url == self.url or url.partition(":")[0] != self.url.partition(":")[0]:
            return False
        self.url = url
        self._client.base_url = url + API
        return True

    def _once(self, method: str, path: str, fine: tuple[int, ...], **request: Any) -> httpx2.Response:
        try:
            response = self._client.request(method, path, **request)
        except httpx2.TransportError as error:
            raise self._away(error) from None
        except RuntimeError as error:  # closed in another thread meanwhile
            raise ServerUnavailable(f"the connection to {self.url} was closed: {error}") from None
        if response.status_code >= 400 and response.status_code not in fine:
            raise _problem(response)
        return response

    def _away(self, error: httpx2.TransportError) -> ServerUnavailable:
        said = str(error)
        if _UNTRUSTED in said:
            return ServerUnavailable(
                f"the certificate of the server at {self.url} is not trusted here ({_UNTRUSTED}: {_untrusted(said)})",
                hint=_trusted_by(said),
            )
        hint = "is `sgpu up` running there? `sgpu doctor` looks"
        if self.url.startswith("http://") and isinstance(error, httpx2.RemoteProtocolError):
            hint = "it may speak TLS: then its address begins with https://"
        return ServerUnavailable(
            f"the server at {self.url} does not answer ({type(error).__name__}: {error})", hint=hint
        )


def _always(text: str) -> Callable[[], str]:
    return lambda: text


def _decoded(response: httpx2.Response, answer: type[T]) -> T:
    try:
        return from_json(response.content, answer)
    except msgspec.MsgspecError as error:
        raise ServerProblem(f"the answer of {response.request.url} cannot be understood: {error}") from None


def _problem(response: httpx2.Response) -> ServerlessGpuError:
    """Return the exception for an answer of 400 or more."""
    try:
        problem = from_json(response.content, Problem)
    except msgspec.MsgspecError:
        cls = ServerUnavailable if response.status_code in _AWAY else ServerProblem
        text = response.text[:_TEXT_CHARACTERS_MAX].strip()
        return cls(f"{response.request.url} answered {response.status_code}: {text}")
    error = error_class(problem.code)(problem.message, hint=problem.hint)
    if problem.run_id and hasattr(error, "run_id"):
        error.run_id = problem.run_id
    return error


def _trust(url: str, ca: str) -> ssl.SSLContext | bool:
    """Return what checks the server's certificate; making that costs 20 ms, which plain HTTP need not pay."""
    if not url.startswith("https://"):
        return False
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise InvalidValue(
            f"{ca or 'the system'} has no certificate that can be read: {error.strerror or error}",
            hint="`sgpu login URL --ca FILE`: the certificate of the server's authority, PEM",
        ) from error


def _untrusted(said: str) -> str:
    return said.partition("certificate verify failed: ")[2].partition(" (_ssl")[0] or said


def _trusted_by(said: str) -> str:
    """Return what mends that a certificate is not trusted."""
    if "mismatch" in said:
        return "use a name that it has; whoever runs the server sees them where `sgpu up` says `others:`"
    if "expired" in said or "not yet valid" in said:
        return "is the clock of this machine right? whoever runs the server renews the certificate"
    return "of an authority of your own? `sgpu login URL --ca FILE`, with the authority's certificate"
