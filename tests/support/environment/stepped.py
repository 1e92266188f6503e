"""Several processes on one store, in any order a test likes: each stands still before every call to the store.

    world.start(f) ─▶ a thread that runs f(store) ─▶ its next call waits ─▶ world.turn(actor) lets it happen

Time passes only when a test says so, and never more during one call, one capture or one collection than is allowed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from serverless_gpu.environment.stores.base import Store, Stored
from serverless_gpu.environment.stores.directory_store import MemoryStore
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.testing import FakeClock

CALL_S_MAX = 300
"""What one call to a store may take, as object stores have it."""


class Killed(BaseException):
    """The process is no more."""


class Actor(threading.Thread):
    """One process.

    Attributes:
        over: whether it has ended, was killed, or failed.
        error: why it failed, or None.
    """

    def __init__(self, world: World, work: Callable[[Actor], None], *, seconds_max: float) -> None:
        super().__init__(daemon=True)
        self.world, self.work, self.seconds_max = world, work, seconds_max
        self.store = SteppedStore(self)
        self.error: BaseException | None = None
        self.over = False
        self.killed = False
        self.began_ns = self.called_ns = world.clock.boottime_ns()
        self.turn = threading.Semaphore(0)
        self.stands = threading.Semaphore(0)

    def run(self) -> None:
        """Work until the end."""
        try:
            self.work(self)
        except Killed:
            pass
        except (ServerlessGpuError, AssertionError, LookupError, TypeError, ValueError) as error:
            self.error = error
        finally:
            self.over = True
            self.stands.release()

    def wait(self) -> None:
        """Stand still until the test goes on with this process."""
        self.called_ns = self.world.clock.boottime_ns()
        self.stands.release()
        self.turn.acquire()
        if self.killed:
            raise Killed


class World:
    """A store, a clock, and the processes that use them."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.memory = MemoryStore(clock=self.clock)
        self.actors: list[Actor] = []

    def start(self, work: Callable[[Actor], None], *, seconds_max: float) -> Actor:
        """Start a process; it goes as far as its first call."""
        actor = Actor(self, work, seconds_max=seconds_max)
        self.actors.append(actor)
        actor.start()
        actor.stands.acquire()
        self._forget()
        return actor

    def turn(self, actor: Actor) -> None:
        """Let one call of a process happen."""
        assert not actor.over, actor.error
        actor.turn.release()
        actor.stands.acquire()
        self._forget()

    def kill(self, actor: Actor) -> None:
        """End a process where it stands."""
        actor.killed = True
        self.turn(actor)
        # Threads of its pool may stand there as well.
        while not actor.over:
            self.turn(actor)

    def spare_s(self) -> float:
        """Return how much time may pass now."""
        now_ns = self.clock.boottime_ns()
        spare = [CALL_S_MAX - (now_ns - actor.called_ns) / 1e9 for actor in self.actors]
        spare += [actor.seconds_max - (now_ns - actor.began_ns) / 1e9 for actor in self.actors]
        return min(spare, default=float("inf"))

    def finish(self) -> None:
        """Let every process come to its end, in turn."""
        while self.actors:
            for actor in list(self.actors):
                self.turn(actor)

    def _forget(self) -> None:
        for actor in self.actors:
            if actor.over:
                actor.join()
        self.actors = [actor for actor in self.actors if not actor.over]


class SteppedStore(Store):
    """A process's way to the store."""

    def __init__(self, actor: Actor) -> None:
        self.url = "memory://stepped"
        self._actor = actor
        self._inner = actor.world.memory
        # Threads of one process take turns, too: a call has happened before the next one stands there.
        self._one = threading.Lock()
        self.calls = self.puts = 0
        self.next_call = ""

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return an object, later."""
        with self._one:
            self._wait("get")
            return self._inner.get(key, start, length)

    def put(self, objects: Mapping[str, bytes | memoryview]) -> None:
        """Put objects, each at its own time."""
        for key, data in objects.items():
            with self._one:
                self._wait("put")
                self._inner.put({key: data})

    def present(self, keys: Collection[str]) -> frozenset[str]:
        """Look for objects, each at its own time."""
        found: set[str] = set()
        for key in keys:
            with self._one:
                self._wait("present")
                found |= self._inner.present([key])
        return frozenset(found)

    def list(self, prefix: str) -> Iterator[Stored]:
        """List objects, later."""
        with self._one:
            self._wait("list")
            return iter(list(self._inner.list(prefix)))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, all at one time: a call has one bound."""
        with self._one:
            self._wait("delete")
            self._inner.delete(keys)

    def _wait(self, call: str) -> None:
        self.next_call = call
        self._actor.wait()
        self.calls += 1
        self.puts += call == "put"

    def free_bytes(self) -> int | None:
        """Return None."""
        return None
