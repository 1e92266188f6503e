"""Client for a server's environment store, with the URL `sgpu+http://host:port` and a token.

    capture, restore ─▶ ServedStore ─ Connection ─▶ /environments/… ─▶ the server's own store

The server verifies each uploaded object against its digest. The client repeats an upload if the server raises
HashMismatch for an object that was altered in transit. `Connection` repeats interrupted transfers. The server may keep
the objects in any type of store, for example a directory or an S3 bucket.

Failure cases: If the server or its store is unreachable, the client retries for up to 5 minutes, then raises
StoreUnavailable. If the token is invalid or lacks permission, the client raises StoreUnavailable with a hint. If the
server's disk is full, the client raises StorageError.
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
"""Maximum number of uploads of an object that arrives altered at the server."""
_OBJECTS = "/environments/objects/"

_Value = TypeVar("_Value")


class ServedStore(Store, CollectionGuard):
    """Client for a server's environment store.

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
        """Return an object's bytes, or a byte range of the object."""
        check_key(key)
        check_range(key, start, 0 if length is None else length)
        query = {"start": str(start)} if length is None else {"start": str(start), "length": str(length)}
        try:
            data = self._ask(lambda server: server.get(_OBJECTS + key, query=query))
        except NotFound:
            raise KeyError(key) from None
        if len(data) > OBJECT_BYTES_MAX:
            raise EnvironmentRejected(f"object {key} has {len(data)} bytes, more than the limit of {OBJECT_BYTES_MAX}")
        return data

    def put(self, objects: Mapping[str, bytes | memoryview]) -> None:
        """Upload objects in parallel. The store writes each object durably and atomically."""
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
        """Return the given keys whose objects exist in the store."""
        found: set[str] = set()
        for some in _batches(keys):
            found.update(self._ask_about("present", some, KeyList).keys)
        return frozenset(found)

    def list(self, prefix: str) -> Iterator[Stored]:
        """Return all objects whose keys begin with `prefix/`."""
        path = f"/environments/list/{check_prefix(prefix)}"
        listed = self._ask(lambda server: server.ask("GET", path, answer=StoredList))
        return (Stored(one.key, one.size, one.put_ns) for one in listed.objects)

    def condemned(self, keys: Collection[str]) -> frozenset[str]:
        """Return the given keys whose objects the garbage collector has condemned."""
        found: set[str] = set()
        for some in _batches(keys):
            found.update(self._ask_condemned(some).keys)
        return frozenset(found)

    def is_collecting(self) -> bool:
        """Return True if a garbage collection may be deleting objects now."""
        return self._ask_condemned(()).collecting

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects from the store, ignoring missing objects."""
        for some in _batches(keys):
            self._ask_about("delete", some, type(None))

    def free_bytes(self) -> int | None:
        """Return the store's free space in bytes, or None if the server does not know the free space."""
        return self._ask(lambda server: server.ask("GET", "/environments/free", answer=Free)).bytes

    def repair(self, keys: Collection[str]) -> tuple[str, ...] | None:
        """Ask the server to delete unusable objects, and return the deleted keys.

        The client sends one request per key, because the server needs seconds to read a large unit.
        """
        removed: list[str] = []
        for key in keys:
            try:
                removed += self._ask_about("repair", (check_key(key),), KeyList).keys
            except NotFound:
                return None  # Older servers do not support the repair request.
        return tuple(dict.fromkeys(removed))

    def _put_one(self, key: str, data: bytes | memoryview) -> None:
        for last in (*([False] * (SENT_MAX - 1)), True):
            try:
                self._ask(lambda server: server.put(_OBJECTS + key, data))
                return
            except HashMismatch as error:
                if last:
                    raise StoreUnavailable(
                        f"object {key} arrived altered at {self.url} in all {SENT_MAX} uploads", hint=error.hint
                    ) from None

    def _ask_condemned(self, keys: tuple[str, ...]) -> CondemnedAnswer:
        """Ask the server which of the given keys are condemned.

        Raises StoreUnavailable if the server is too old to answer the query.
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

        `_ask` passes NotFound and HashMismatch to its caller.
        """
        try:
            with self._lock:  # A forked process opens a separate connection.
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
                hint=error.hint or "run `sgpu login` to store another token",
            ) from None
        except ServerProblem as error:
            raise StoreUnavailable(error.message, hint=error.hint) from None

    def close(self) -> None:
        """Close the connection. The next store request opens a new connection."""
        with self._lock, contextlib.suppress(OSError):
            if self._opened is not None and self._opened[0] == os.getpid():
                self._opened[1].close()
            self._opened = None


def _batches(keys: Iterable[str]) -> Iterator[tuple[str, ...]]:
    asked = tuple(check_key(key) for key in keys)
    for first in range(0, len(asked), NAMES_MAX):
        yield asked[first : first + NAMES_MAX]
