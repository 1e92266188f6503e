"""Connects clients and nodes to a server to send and receive HTTP bodies.

If the server answers with an error, the connection raises an exception from `errors.py`.

    ask     one request, one answer            retried for `patience_s` while the server is unreachable
    put     bytes of a part or an object       retried like `ask`
    get     bytes, or a range of them          retried like `ask`
    stream  server-sent events, one by one     not retried, because only the reader knows the position

`http_client.py` describes the failure cases of requests. On a stream, the server sends data or a comment at least every
10 s. If a stream is silent for `SILENCE_S` seconds, the connection raises `ServerUnavailable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx2
import msgspec

from serverless_gpu.errors import ServerProblem, ServerUnavailable
from serverless_gpu.json_codec import decoder
from serverless_gpu.wire.base import API, Request
from serverless_gpu.wire.http_client import ANSWER_S, CONNECT_S, HttpClient, Reply, problem_of, trust

SILENCE_S = 30.0
"""Seconds without data after which a stream counts as broken. The server sends data or a comment every 10 s."""
EVENT_BYTES_MAX = 32 << 20


class Connection(HttpClient):
    """A connection to one server. Threads may share a connection, but forked processes must not.

    The constructor has the same arguments as `HttpClient`.
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
        super().__init__(url, token, patience_s=patience_s, announce=announce, ca=ca)
        self._client = httpx2.Client(
            timeout=httpx2.Timeout(ANSWER_S, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=64, max_keepalive_connections=16, keepalive_expiry=60.0),
            verify=trust(ca) if self.url.startswith("https://") else False,
            trust_env=False,  # Ignore proxies from environment variables, because a proxy would see the token.
        )

    def stream(
        self,
        method: str,
        path: str,
        body: Request | None = None,
        *,
        answer: Any,
        query: Mapping[str, str] | None = None,
    ) -> Iterator[Any]:
        """Yield events of type `answer` until the server ends the stream.

        Raises ServerUnavailable if the connection breaks. After a broken connection, the reader must resume from its
        position.
        """
        decode = decoder(answer).decode
        headers = {**self._headers(), "Accept": "text/event-stream"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            with self._client.sse(
                self.url + API + path,
                method=method,
                content=None if body is None else msgspec.json.encode(body),
                params=dict(query or {}),
                headers=headers,
                timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S),
                max_event_size=EVENT_BYTES_MAX,
            ) as source:
                if source.response.status_code >= 400:
                    source.response.read()
                    raise problem_of(_reply(source.response))
                for event in source:
                    yield decode(event.data)
        except httpx2.TransportError as error:
            raise self._broken(error) from None
        except msgspec.MsgspecError as error:
            raise ServerProblem(f"an event of {self.url}{API}{path} cannot be understood: {error}") from None

    def close(self) -> None:
        """Close all connections. After this call, requests that wait for the server raise an exception."""
        super().close()
        self._client.close()

    def _send(
        self, method: str, path: str, *, content: bytes | None, headers: Mapping[str, str], params: Mapping[str, str]
    ) -> Reply:
        def send() -> httpx2.Response:
            return self._client.request(
                method, self.url + API + path, content=content, headers={**self._headers(), **headers}, params=params
            )

        try:
            try:
                response = send()
            except httpx2.RemoteProtocolError:
                if method != "GET":
                    raise
                # The server may close an idle connection while a request is on its way. Reading again is safe.
                response = send()
        except httpx2.TransportError as error:
            raise self._broken(error) from None
        except RuntimeError as error:  # Another thread has closed the HTTP client.
            raise ServerUnavailable(f"the connection to {self.url} was closed: {error}") from None
        return _reply(response)

    def _broken(self, error: httpx2.TransportError) -> ServerUnavailable:
        return self._away(error, is_no_http=isinstance(error, httpx2.RemoteProtocolError))


def _reply(response: httpx2.Response) -> Reply:
    return Reply(response.status_code, response.content, response.headers, str(response.request.url))
