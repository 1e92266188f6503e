"""The connection of a command that asks a few questions and ends.

It uses the standard library: importing httpx2 and its dependencies takes more CPU time than the rest of such a command.
Each request has a connection of its own. There are no streams and no threads; `connection.py` has those.
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlencode, urlsplit

from serverless_gpu.errors import InvalidValue
from serverless_gpu.lazy_import import load
from serverless_gpu.wire.base import API
from serverless_gpu.wire.exchange import ANSWER_S, CONNECT_S, Exchange, Reply


class BriefConnection(Exchange):
    """One server and one token, for a few requests in sequence; the arguments are `Exchange`'s."""

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
            raise InvalidValue(f"{self.url} is not an address: {error}") from None
        if parts.scheme != "https":
            return http.client.HTTPConnection(host, port, timeout=CONNECT_S)
        context = load("serverless_gpu.wire.exchange").trust(self._ca)
        return http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=context)
