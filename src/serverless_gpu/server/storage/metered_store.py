"""A store that counts: how long each call takes, and which failed; in everything else the store it is made of."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping

from serverless_gpu.environment.stores.base import Store, Stored
from serverless_gpu.errors import EnvironmentProblem, StorageError
from serverless_gpu.server.core.server_metrics import Measures


class MeasuredStore(Store):
    """A store whose calls are counted.

    Args:
        store: does the work.
        name: of the store, as figures have it: "blobs" or "environments".
        measures: where calls are counted.
    """

    def __init__(self, store: Store, *, name: str, measures: Measures) -> None:
        self._store, self._name, self._measures = store, name, measures
        self.url = store.url

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return an object, or a range of it."""
        with self._counted("get"):
            return self._store.get(key, start, length)

    def put(self, objects: Mapping[str, bytes | memoryview]) -> None:
        """Put objects."""
        with self._counted("put"):
            self._store.put(objects)
        self._measures.upload_bytes.labels(self._name).inc(sum(len(data) for data in objects.values()))

    def present(self, keys: Collection[str]) -> frozenset[str]:
        """Return which of these objects are there."""
        with self._counted("present"):
            return self._store.present(keys)

    def list(self, prefix: str) -> Iterator[Stored]:
        """Return everything below a prefix; the time is the caller's, who reads at their own pace."""
        return self._store.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects."""
        with self._counted("delete"):
            self._store.delete(keys)

    def free_bytes(self) -> int | None:
        """Return how much more it can hold."""
        return self._store.free_bytes()

    @contextlib.contextmanager
    def _counted(self, operation: str) -> Iterator[None]:
        try:
            with self._measures.store.labels(self._name, operation).time():
                yield
        except (EnvironmentProblem, StorageError, OSError):  # an object that is not there is an answer
            self._measures.store_errors.labels(self._name, operation).inc()
            raise
