"""Uses the store of a server over its API: `sgpu+http://host:port`, with a token.

    capture, restore ─▶ ServedStore ─ Connection ─▶ /environments/… ─▶ the server's own store

The server checks the objects that it receives. The server refuses bytes that were altered in transit (HashMismatch),
and the client sends the bytes again. The connection itself repeats interrupted transfers. The server's own store may be
of any kind.

Failure cases: If the server or its store is unreachable, the client retries for up to 5 minutes, then raises
StoreUnavailable. If the token is not valid or has too few rights, the client raises StoreUnavailable with a hint. If
the server's disk is full, the client raises StorageError.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from serverless_gpu.environment.stores.base import (
    OBJECT_BYTES_MAX,
    CollectionGuard,
    Store,
    Stored,
    check_key,
    check_prefix,
    check_range,
    check_size,
)
from serverless_gpu.errors import (
    EnvironmentProblem,
    EnvironmentRejected,
    HashMismatch,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    ServerProblem,
    ServerStorageFull,
    StorageError,
    StoreUnavailable,
    TooLarge,
)
from serverless_gpu.wire.blobs import NAMES_MAX, CondemnedAnswer, Free, KeyList, StoredList
from serverless_gpu.wire.connection import Connection

SCHEME = "sgpu+"
BOUND_S = 300.0
AT_ONCE = 8
SENT_MAX = 3
"""Maximum number of times that the client sends bytes that arrive altered."""
_OBJECTS = "/environments/objects/"

_Value = TypeVar("_Value")


class ServedStore(Store, CollectionGuard):
    """The store of a server.

    `url` is ``sgpu+http://host:port`` or ``sgpu+https://host:port``. `bound_s` limits how long one call waits for an
    unreachable server.
    """

    def __init__(self, url: str, token: str, *, ca: str = "", bound_s: float = BOUND_S) -> None:
        self.url = url
        self._token = token
        self._ca = ca
        self._bound_s = bound_s
        self._lock = threading.Lock()
        self._opened: tuple[int, Connection] | None = None

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return an object, or a range of it."""
        check_key(key)
        check_range(key, start, 0 if length is None else length)
        query = {"start": str(start)} if length is None else {"start": str(start), "length": str(length)}
        try:
            data = self._ask(lambda server: server.get(_OBJECTS + key, query=query))
        except NotFound:
            raise KeyError(key) from None
        if len(data) > OBJECT_BYTES_MAX:
            raise EnvironmentRejected(f"{key} has {len(data)} bytes; at most {OBJECT_BYTES_MAX} are allowed")
        return data

    def put(self, objects: Mapping[str, bytes | memoryview]) -> None:
        """Put objects durably and atomically, in place of existing objects, several at a time."""
        for key, data in objects.items():
            check_size(check_key(key), data)
        if len(objects) < 2:
            for key, data in objects.items():
                self._put_one(key, data)
            return
        with ThreadPoolExecutor(min(AT_ONCE, len(objects))) as pool:
            for done in [pool.submit(self._put_one, key, data) for key, data in objects.items()]:
                done.result()

    def present(self, keys: Collection[str]) -> frozenset[str]:
        """Return the keys of these objects that exist."""
        found: set[str] = set()
        for some in _batches(keys):
            found.update(self._ask_about("present", some, KeyList).keys)
        return frozenset(found)

    def list(self, prefix: str) -> Iterator[Stored]:
        """Return all objects below `prefix/`."""
        path = f"/environments/list/{check_prefix(prefix)}"
        listed = self._ask(lambda server: server.ask("GET", path, answer=StoredList))
        return (Stored(one.key, one.size, one.put_ns) for one in listed.objects)

    def condemned(self, keys: Collection[str]) -> frozenset[str]:
        """Return the keys of these objects that garbage collection has condemned."""
        found: set[str] = set()
        for some in _batches(keys):
            found.update(self._ask_condemned(some).keys)
        return frozenset(found)

    def is_collecting(self) -> bool:
        """Return True if a collection may be deleting objects now."""
        return self._ask_condemned(()).collecting

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, and ignore missing objects."""
        for some in _batches(keys):
            self._ask_about("delete", some, type(None))

    def free_bytes(self) -> int | None:
        """Return the number of bytes that still fit into the store, or None if the server cannot tell."""
        return self._ask(lambda server: server.ask("GET", "/environments/free", answer=Free)).bytes

    def repair(self, keys: Collection[str]) -> tuple[str, ...] | None:
        """Request that the server remove unusable objects, and return the removed keys.

        The client sends one request per key, because the server takes seconds to read a large unit.
        """
        removed: list[str] = []
        for key in keys:
            try:
                removed += self._ask_about("repair", (check_key(key),), KeyList).keys
            except NotFound:
                return None  # A server of an earlier version does not support this request.
        return tuple(dict.fromkeys(removed))

    def _put_one(self, key: str, data: bytes | memoryview) -> None:
        for last in (*([False] * (SENT_MAX - 1)), True):
            try:
                self._ask(lambda server: server.put(_OBJECTS + key, data))
                return
            except HashMismatch as error:
                if last:
                    raise StoreUnavailable(
                        f"{key} arrived altered at {self.url}, {SENT_MAX} times", hint=error.hint
                    ) from None

    def _ask_condemned(self, keys: tuple[str, ...]) -> CondemnedAnswer:
        """Query the server for condemned keys.

        Raises StoreUnavailable: the server is too old for the query, and would return the whole list.
        """
        try:
            return self._ask_about("condemned", keys, CondemnedAnswer)
        except NotFound:
            raise StoreUnavailable(
                f"the server at {self.url} is older than this client and does not report condemned objects",
                hint="upgrade serverless-gpu on the server",
            ) from None

    def _ask_about(self, route: str, keys: tuple[str, ...], answer: type[_Value]) -> _Value:
        path, body = f"/environments/{route}", KeyList(keys=keys)
        return self._ask(lambda server: server.ask("POST", path, body, answer=answer))

    def _ask(self, request: Callable[[Connection], _Value]) -> _Value:
        """Send a request, and convert the server's errors to errors of the `Store` interface.

        Callers handle NotFound and HashMismatch.
        """
        try:
            with self._lock:  # The lock guards the connection of this process; no connection survives a fork.
                if self._opened is None or self._opened[0] != os.getpid():
                    url = self.url.removeprefix(SCHEME)
                    self._opened = os.getpid(), Connection(url, self._token, patience_s=self._bound_s, ca=self._ca)
                connection = self._opened[1]
            return request(connection)
        except (NotFound, HashMismatch, EnvironmentProblem):
            raise
        except ServerStorageFull as error:
            raise StorageError(error.message, hint=error.hint) from None
        except TooLarge as error:
            raise EnvironmentRejected(error.message, hint=error.hint) from None
        except (NotAuthenticated, NotAllowed) as error:
            raise StoreUnavailable(
                f"the store {self.url} refuses the request: {error.message}",
                hint=error.hint or "to store another token, run `sgpu login`",
            ) from None
        except ServerProblem as error:
            raise StoreUnavailable(error.message, hint=error.hint) from None

    def close(self) -> None:
        """Close the connection. The next call opens a new connection."""
        with self._lock, contextlib.suppress(OSError):
            if self._opened is not None and self._opened[0] == os.getpid():
                self._opened[1].close()
            self._opened = None


def _batches(keys: Iterable[str]) -> Iterator[tuple[str, ...]]:
    asked = tuple(check_key(key) for key in keys)
    for first in range(0, len(asked), NAMES_MAX):
        yield asked[first : first + NAMES_MAX]
