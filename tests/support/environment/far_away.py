"""A store that a test holds up, alters and counts, and a server's environments in front of it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from serverless_gpu.environment.stores.directory_store import MemoryStore
from serverless_gpu.server.storage.environment_store import EnvironmentStore
from serverless_gpu.testing import FakeClock
from serverless_gpu.testing.stores import pack_key

PACK = random.Random(11).randbytes(300_000)
OTHER = random.Random(12).randbytes(300_000)
KEY = pack_key(PACK)


class FarAway(MemoryStore):
    """A store that counts what is got, and answers when, and what, a test says."""

    def __init__(self) -> None:
        super().__init__("bucket")
        self.got: list[str] = []
        self.asked = threading.Event()
        self.open = threading.Event()
        self.open.set()
        self.altered_times = 0
        self.problem: Exception | None = None

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return an object."""
        self.got.append(key)
        self.asked.set()
        self.open.wait(60)
        if self.problem is not None:
            raise self.problem
        data = super().get(key, start, length)
        if self.altered_times:
            self.altered_times -= 1
            data = bytes([data[0] ^ 1]) + data[1:]
        return data


def server_on(
    store: FarAway, directory: Path, *, bytes_max: int = 1 << 30, clock: FakeClock | None = None
) -> EnvironmentStore:
    place = directory / "nearby", bytes_max
    return EnvironmentStore(store, clock=clock or FakeClock(), kept_free_bytes=0, nearby=place)


def read(environments: EnvironmentStore, key: str = KEY, start: int = 0, length: int | None = None) -> bytes:
    return b"".join(environments.read(key, start, length))


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
