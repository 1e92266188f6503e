"""A store in this process's memory, for tests; it obeys the same conformance suite as the others."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.environment.stores.base import (
    Store,
    Stored,
    check_key,
    check_prefix,
    check_range,
    check_size,
)
from serverless_gpu.errors import StorageError


class MemoryStore(Store):
    """Objects in a dictionary.

    `name` is what comes after ``memory://``; `capacity_bytes` None means no bound.
    """

    def __init__(self, name: str = "", *, clock: Clock | None = None, capacity_bytes: int | None = None) -> None:
        self.url = f"memory://{name}"
        self._clock = clock or SystemClock()
        self._capacity_bytes = capacity_bytes
        self._objects: dict[str, tuple[bytes, int]] = {}
        self._lock = threading.Lock()

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return an object, or a range of it."""
        data = self._objects[check_key(key)][0]
        check_range(key, start, max(0, len(data) - start) if length is None else length)
        return data[start:] if length is None else data[start : start + length]

    def put(self, objects: Mapping[str, bytes | memoryview]) -> None:
        """Put objects, at once, in place of what may be there."""
        contents = {check_key(key): bytes(check_size(key, data)) for key, data in objects.items()}
        with self._lock:
            free, size = self.free_bytes(), sum(map(len, contents.values()))
            if free is not None and size > free:
                raise StorageError(
                    f"no space left in {self.url}: {size} bytes to write, {free} bytes free",
                    hint="make more space, or choose another store",
                )
            now_ns = self._clock.wall_ns()
            self._objects.update((key, (content, now_ns)) for key, content in contents.items())

    def present(self, keys: Collection[str]) -> frozenset[str]:
        """Return which of these objects are there."""
        return frozenset(key for key in keys if check_key(key) in self._objects)

    def list(self, prefix: str) -> Iterator[Stored]:
        """Return everything below `prefix/`."""
        start = check_prefix(prefix) + "/"
        with self._lock:
            found = [Stored(key, len(data), put) for key, (data, put) in self._objects.items() if key.startswith(start)]
        return iter(found)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there are no error."""
        for key in keys:
            with self._lock:
                self._objects.pop(check_key(key), None)

    def free_bytes(self) -> int | None:
        """Return how much more it can hold, or None without a bound."""
        if self._capacity_bytes is None:
            return None
        return max(0, self._capacity_bytes - sum(len(data) for data, _ in self._objects.values()))
