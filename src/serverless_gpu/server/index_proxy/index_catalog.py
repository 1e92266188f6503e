"""Reads the definitions of indexes and their credentials for the index proxy."""

from __future__ import annotations

import base64
import threading

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import SecretMissing
from serverless_gpu.server.core.server_key import Sealer
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.index_proxy.definition import IndexDefinition
from serverless_gpu.server.records import indexes, stored_secrets
from serverless_gpu.server.records.indexes import StoredIndex

FRESH_S = 5.0
"""Seconds after which the proxy reads definitions and secrets again."""
TOKEN_USER = "__token__"
"""User name for a secret without a colon, as indexes expect for tokens."""


class ServedIndex(msgspec.Struct, frozen=True, kw_only=True):
    """An index that the proxy serves.

    Attributes:
        definition: hosts and URL.
        credentials: `Authorization` header, or "".
        problem: why the index cannot be served, or "".
    """

    definition: IndexDefinition
    credentials: str = ""
    problem: str = ""

    def __repr__(self) -> str:
        """Omit the credentials, because logs may store printed objects."""
        return f"ServedIndex({self.definition.name!r})"


class IndexCatalog:
    """The indexes of the server, at most `FRESH_S` old. Thread-safe."""

    def __init__(self, *, clock: Clock, database: Transactions, sealer: Sealer) -> None:
        self._clock = clock
        self._database = database
        self._sealer = sealer
        self._lock = threading.Lock()
        self._known: dict[str, ServedIndex] = {}
        self._read_ns: int | None = None

    def changed(self) -> None:
        """Read the definitions again at the next request."""
        with self._lock:
            self._read_ns = None

    def find(self, name: str) -> ServedIndex | None:
        """Return an index by name, or None. Reads the database."""
        with self._lock:
            now_ns = self._clock.boottime_ns()
            if self._read_ns is None or now_ns - self._read_ns > FRESH_S * 1e9:
                self._known = {each.definition.name: each for each in self._database.read(self._every)}
                self._read_ns = now_ns
            return self._known.get(name)

    def _every(self, connection: sa.Connection) -> list[ServedIndex]:
        return [self._served(connection, stored) for stored in indexes.every(connection)]

    def _served(self, connection: sa.Connection, stored: StoredIndex) -> ServedIndex:
        definition = definition_of(stored)
        if not stored.secret:
            return ServedIndex(definition=definition)
        try:
            value = stored_secrets.newest(connection, self._sealer, stored.owner, stored.secret)
        except SecretMissing as error:
            return ServedIndex(definition=definition, problem=error.message)
        credentials = authorization(value)
        problem = "" if credentials else f"the secret {stored.secret} is not USER:PASSWORD or a token"
        return ServedIndex(definition=definition, credentials=credentials, problem=problem)


def definition_of(stored: StoredIndex) -> IndexDefinition:
    """Return the definition of a stored index."""
    return IndexDefinition(name=stored.name, url=stored.url, file_hosts=stored.file_hosts, private=stored.private)


def authorization(value: bytes) -> str:
    """Return the `Authorization` header for `USER:PASSWORD` or a token, or "" for an unusable value."""
    text = value.decode("utf-8", "replace").strip()
    if not text or not text.isprintable() or "\ufffd" in text:
        return ""
    pair = text if ":" in text else f"{TOKEN_USER}:{text}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"
