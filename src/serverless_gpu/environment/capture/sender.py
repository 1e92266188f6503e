"""Packs and the documents of units go into a store, several small ones together.

    pack closed ─▶ group ─ 8 MB, or 64 of them ─▶ a storing thread: packs, and then the units that were all read
    unit read   ─▶   │

A small unit is one pack of some kB and one document: put one by one, a disk spends more time on making them durable
than on their bytes, and a bucket on waiting. A unit is put after all packs are, its own and those of others: it points
into nothing that is not there. Groups are sent in the order in which they were filled, so a unit waits only for packs
that are being sent already.

Failure: what a store says reaches everybody who waits for something of the group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
from blake3 import blake3

from serverless_gpu.environment.documents import Unit
from serverless_gpu.environment.rules import check_unit
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.errors import EnvironmentRejected, EnvironmentUnsupported

STORING_THREADS = 4
BYTES_IN_FLIGHT = 32 * 1024 * 1024
"""Compressed bytes that wait to be stored, at most; or one pack."""
GROUP_BYTES = 8 * 1024 * 1024
GROUP_ITEMS = 64
WAIT_S = 0.2
"""How long a thread waits for anything before it reports again."""


class ReadUnit(msgspec.Struct, frozen=True):
    """A unit all of which has been read."""

    name: str
    packs: Sequence[Future[str]]
    make: Callable[[tuple[str, ...]], Unit]


class Counts:
    """What has happened so far; read by the reporter, written by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes_done = 0
        self.files_done = 0
        self.sent_bytes = 0
        self.packs_sent = 0
        self.packs_known = 0

    def add(self, *, bytes_done: int = 0, files_done: int = 0) -> None:
        with self._lock:
            self.bytes_done += bytes_done
            self.files_done += files_done

    def stored(self, sent_bytes: int, *, sent: int, known: int) -> None:
        """Count packs: the bytes that were sent, in how many packs, and how many the store had."""
        with self._lock:
            self.sent_bytes += sent_bytes
            self.packs_sent += sent
            self.packs_known += known


class Sender:
    """Collects what is to be stored, and stores it; used by one thread.

    Args:
        blobs: the store.
        threads: that store, taking what they are given in order.
        counts: what has happened, for reports.
        stopped: whether the result is no longer needed.
        before_packs: called before packs of so many bytes are put; may raise.
    """

    def __init__(
        self,
        blobs: StoreBlobs,
        threads: ThreadPoolExecutor,
        *,
        counts: Counts,
        stopped: Callable[[], bool],
        before_packs: Callable[[int], None],
    ) -> None:
        self._blobs = blobs
        self._threads = threads
        self._counts = counts
        self._stopped = stopped
        self._before_packs = before_packs
        self._room = _Room(BYTES_IN_FLIGHT)
        self._group = _Group()

    def has_room(self, size: int) -> bool:
        """Return whether a pack of this size may be added, now or in a moment."""
        if self._room.take(size, 0):
            return True
        self.flush()  # what is held back here may be what takes the room
        return self._room.take(size, WAIT_S)

    def add_pack(self, data: bytes | bytearray) -> Future[str]:
        """Add a pack for which there was room; return its name, once it is stored."""
        done = Future[str]()
        self._group.packs.append((data, done))
        self._group.size += len(data)
        self._flush_if_full()
        return done

    def add_unit(self, ending: ReadUnit) -> Future[Unit]:
        """Add a unit whose packs were added; return it, once it is stored."""
        done = Future[Unit]()
        self._group.units.append((ending, done))
        self._flush_if_full()
        return done

    def flush(self) -> None:
        """Send what has been added so far."""
        if self._group.items:
            group, self._group = self._group, _Group()
            self._threads.submit(self._send, group)

    def _flush_if_full(self) -> None:
        if self._group.size >= GROUP_BYTES or self._group.items >= GROUP_ITEMS:
            self.flush()

    def _send(self, group: _Group) -> None:
        waiting: list[Future[str] | Future[Unit]] = [done for _, done in group.packs]
        waiting += [done for _, done in group.units]
        try:
            try:
                self._send_packs(group)
            finally:
                group.packs.clear()
                self._room.give(group.size)
            self._send_units(group)
        except BaseException as error:  # noqa: BLE001 - whoever waits has to hear of it, whatever it is
            for done in waiting:
                if not done.done():
                    done.set_exception(error)

    def _send_packs(self, group: _Group) -> None:
        if self._stopped():
            raise Unwanted
        names = [blake3(data).hexdigest() for data, _ in group.packs]
        packs = dict(zip(names, (data for data, _ in group.packs), strict=True))
        missing = {name: memoryview(packs[name]) for name in self._blobs.missing_packs(packs)}
        size = sum(map(len, missing.values()))
        if missing:
            self._before_packs(size)
            self._blobs.write_packs(missing)
        self._counts.stored(size, sent=len(missing), known=len(names) - len(missing))
        for name, (_, done) in zip(names, group.packs, strict=True):
            done.set_result(name)

    def _send_units(self, group: _Group) -> None:
        if not group.units:
            return
        units = [ending.make(tuple(pack.result() for pack in ending.packs)) for ending, _ in group.units]
        if self._stopped():
            raise Unwanted
        try:
            self._blobs.write_units(units)
        except EnvironmentRejected:
            for unit, (ending, _) in zip(units, group.units, strict=True):
                _check(unit, ending.name)
            raise
        for unit, (_, done) in zip(units, group.units, strict=True):
            done.set_result(unit)


class Unwanted(Exception):
    """Another worker failed, so the result is not needed."""


class _Group:
    """What is stored together."""

    def __init__(self) -> None:
        self.packs: list[tuple[bytes | bytearray, Future[str]]] = []
        self.units: list[tuple[ReadUnit, Future[Unit]]] = []
        self.size = 0

    @property
    def items(self) -> int:
        return len(self.packs) + len(self.units)


class _Room:
    """A bound on bytes that several threads hold."""

    def __init__(self, bytes_max: int) -> None:
        self._free = threading.Condition()
        self._bytes_max = bytes_max
        self._bytes = 0

    def take(self, size: int, wait_s: float) -> bool:
        """Take room, or return after a moment that there was none; whoever comes first has room for any size."""
        with self._free:
            if not self._free.wait_for(lambda: not self._bytes or self._bytes + size <= self._bytes_max, wait_s):
                return False
            self._bytes += size
            return True

    def give(self, size: int) -> None:
        with self._free:
            self._bytes -= size
            self._free.notify()


def _check(unit: Unit, name: str) -> None:
    try:
        check_unit(unit)
    except EnvironmentRejected as error:
        raise EnvironmentUnsupported(
            f"{name} cannot be captured: {error.message}", hint="no restore would accept it; remove it"
        ) from None
