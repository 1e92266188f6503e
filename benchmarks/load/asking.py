"""Requests that cost their sender little: one kept connection, no retries, bodies as bytes.

What sends load must not be the load: `http.client` takes a fifth of what a full client takes for a request.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from serverless_gpu.errors import ServerUnavailable
from serverless_gpu.wire.base import API

T = TypeVar("T")
_ANSWER_S = 60.0


class Asker:
    """One connection of one thread; it is made again when it breaks.

    Args:
        url: of the server.
        token: sent with every request; "" for none.
    """

    def __init__(self, url: str, token: str = "") -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=_ANSWER_S)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def ask(self, method: str, path: str, body: Any = None, *, token: str = "") -> tuple[int, bytes]:
        """Return status and body of an answer.

        Raises:
            ServerUnavailable: there was none.
        """
        headers = dict(self._headers, Authorization=f"Bearer {token}") if token else dict(self._headers)
        data = None
        if body is not None:
            raw = isinstance(body, bytes | memoryview)
            headers["Content-Type"] = "application/octet-stream" if raw else "application/json"
            data = body if raw else msgspec.json.encode(body)
        try:
            self._connection.request(method, API + path, data, headers)
            answer = self._connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ServerUnavailable(f"{method} {path}: {error!r}") from error

    def get(self, method: str, path: str, body: Any = None, *, answer: type[T]) -> T:
        """Return an answer's body.

        Raises:
            ServerUnavailable: there was none, or it is a refusal, which is told.
        """
        status, said = self.ask(method, path, body)
        if status >= 300:
            raise ServerUnavailable(f"{method} {path} was answered with {status}: {said[:300]!r}")
        return msgspec.json.decode(said, type=answer)

    def events(self, path: str) -> Iterator[bytes]:
        """Yield the data of a stream's events, and b"" for each sign of life, until it breaks.

        Raises:
            ServerUnavailable: it broke.
        """
        try:
            self._connection.request("GET", API + path, headers=dict(self._headers, Accept="text/event-stream"))
            answer = self._connection.getresponse()
            if answer.status >= 300:
                raise ServerUnavailable(f"{path} was answered with {answer.status}: {answer.read()[:300]!r}")
            while line := answer.readline():
                if line.startswith(b"data: "):
                    yield line[6:]
                elif line.startswith(b":"):
                    yield b""
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnavailable(f"{path}: {error!r}") from error
        finally:
            self._connection.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
