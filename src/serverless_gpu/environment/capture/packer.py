"""Packs units into a store: reads, checks, compresses and stores blocks in bounded memory.

    this thread       plans units, hands out blocks in order, takes frames back in the same order, fills packs, reports
    reading threads   one block each: read the files, check their digests, compress          (all of it without the GIL)
    storing threads   put packs, and a unit's document once all of its packs are stored

    pack closed ─▶ group ─ 8 MB, or 64 of them ─▶ a storing thread: packs, and then the units that were read completely
    unit read   ─▶   │

The packer collects compressed frames in block order. Packing a unit twice therefore gives identical packs. A capture
reuses the packs that an earlier, killed capture stored. The packer's memory contains the blocks in progress, the
current pack, and the packs that threads are storing. Memory use stays near 150 MB for an environment of any size.

A small unit consists of one pack of a few kB and one document. The packer stores small units in groups to save disk
syncs and network round trips. A storing thread stores a unit's document after all packs of the group. The storing
threads process groups in the order of their completion. A unit therefore waits only for packs that a thread is already
storing.

Failure cases: If a file's size differs from the scanned size, the packer plans the unit again. After a few attempts,
the packer raises `EnvironmentUnsupported` with the name of the file. `EnvironmentUnsupported` also reports a file that
is unreadable, missing, or not valid for a restore. A store error, such as a full disk, fails the whole group. The
packer stops its threads before it raises an error. No document ever refers to missing packs.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import msgspec
from blake3 import blake3

from serverless_gpu.environment.capture.unit_blocks import (
    TRIES_MAX,
    BlockPlan,
    CaptureStopped,
    FileChanged,
    ReusedBlocks,
    UnitReader,
    places_of,
    plan_blocks,
    reuse,
    true_sizes,
    unsteady,
)
from serverless_gpu.environment.compression import LEVEL_LOCAL, Compressor
from serverless_gpu.environment.documents import BLOCK_BYTES, PACK_BYTES, FileRow, PackBlock, Unit, unit_address
from serverless_gpu.environment.scan.snapshot_composition import LocalUnit
from serverless_gpu.environment.snapshot_validation import check_unit
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.errors import EnvironmentRejected, EnvironmentUnsupported

STORING_THREADS = 4
BYTES_IN_FLIGHT = 32 * 1024 * 1024
"""Maximum number of compressed bytes that wait for storage, unless a single pack is larger."""
GROUP_BYTES = 8 * 1024 * 1024
GROUP_ITEMS = 64
WAIT_S = 0.2
"""Seconds that the packer waits for a result before it calls `pulse` again."""
BLOCKS_MAX = 12
"""Maximum number of blocks that the packer reads and compresses in parallel."""
_Result = TypeVar("_Result")


class PackSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a `Packer`."""

    level: int = LEVEL_LOCAL  # Compression level for zstd.
    # Number of threads that read and compress files. The value 0 means one thread per core (2 to 8) plus one. The extra
    # thread compensates for a thread that waits for the lock on small files.
    threads: int = 0
    block_bytes: int = BLOCK_BYTES  # Number of content bytes in one block.
    pack_bytes: int = PACK_BYTES  # Size at which the packer closes a pack.

    @property
    def thread_count(self) -> int:
        return self.threads or 1 + min(8, max(2, len(os.sched_getaffinity(0))))


class PackJob(msgspec.Struct, frozen=True, kw_only=True):
    """A unit to pack into the store."""

    address: str  # Scanned address, which the packer may correct.
    name: str
    source: LocalUnit
    old: Unit | None = None  # Previous version of the unit, if the store has all packs of that version.


class PackedUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A unit whose packs and document the packer has stored."""

    job: PackJob
    unit: Unit


class Packer:
    """Packs units into a store.

    The packer calls `pulse` in the caller's thread with the name of the current unit, at least every `WAIT_S` seconds.
    The packer calls `before_packs` with the total size of the next packs to store. The callback may raise an error to
    stop the capture.
    """

    def __init__(
        self,
        blobs: StoreBlobs,
        settings: PackSettings,
        *,
        counts: CaptureCounts,
        pulse: Callable[[str], None] = lambda name: None,
        before_packs: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._blobs = blobs
        self._settings = settings
        self._counts = counts
        self._pulse = pulse
        self._before_packs = before_packs
        self._stop = threading.Event()
        self._own = threading.local()
        self._flight: deque[tuple[_UnitWork, BlockPlan, Future[bytes]]] = deque()
        self._again: deque[_UnitWork] = deque()
        self._ended: deque[tuple[PackJob, Future[Unit]]] = deque()

    def pack(self, *lines: Iterable[PackJob]) -> Iterator[PackedUnit]:
        """Store the units of several job queues, and yield each stored unit.

        The packer serves the job queues in turn, one block at a time. A queue of large units keeps the compressor busy
        while the reading threads open the many files of small units. When the packer has planned all blocks of a job,
        the packer starts the queue's next job.
        """
        threads = self._settings.thread_count
        with (
            ThreadPoolExecutor(threads, "sgpu-read") as self._reading,
            ThreadPoolExecutor(STORING_THREADS, "sgpu-store") as storing,
        ):
            self._sender = PackSender(
                self._blobs,
                storing,
                counts=self._counts,
                stopped=self._stop.is_set,
                before_packs=self._before_packs,
            )
            try:
                yield from self._pack([_JobQueue(iter(jobs)) for jobs in lines], min(4 * threads, BLOCKS_MAX))
            finally:
                self._stop.set()
                self._reading.shutdown(wait=True, cancel_futures=True)
                storing.shutdown(wait=True, cancel_futures=True)
                for work, _, _ in self._flight:
                    work.reader.close()

    def _pack(self, lines: list[_JobQueue], window: int) -> Iterator[PackedUnit]:
        while lines or self._flight or self._again:
            for line in lines:
                self._advance(line)
                while len(self._flight) >= window:
                    self._take()
            lines = [line for line in lines if line.work] or ([_JobQueue(iter(()))] if self._again else [])
            if not lines and self._flight:
                self._take()
            yield from self._stored(wait=False)
        self._sender.flush()
        yield from self._stored(wait=True)

    def _advance(self, line: _JobQueue) -> None:
        """Submit the next block of a queue's current unit, or start the queue's next unit."""
        work = line.work
        if work is None or work.planned:
            work = None
            if self._again:
                work = self._again.popleft()
            elif (job := next(line.jobs, None)) is not None:
                work = self._begun(_UnitWork(job, list(job.source.rows), self._settings, self._stop.is_set))
            line.work = work
            if work is None:
                return
        plan = None if work.changed else next(work.plans, None)
        if plan is None:
            work.planned = True
            self._close_if_done(work)
            return
        work.outstanding += 1
        self._flight.append((work, plan, self._reading.submit(self._fill, work.reader, plan)))

    def _begun(self, work: _UnitWork) -> _UnitWork:
        self._counts.add(bytes_done=work.bytes_done, files_done=work.files_done)
        return work

    def _fill(self, reader: UnitReader, plan: BlockPlan) -> bytes:
        buffer: memoryview | None = getattr(self._own, "buffer", None)
        if buffer is None:  # Each thread reuses a buffer, because the kernel zeroes newly allocated memory.
            buffer = self._own.buffer = memoryview(bytearray(self._settings.block_bytes + 1))
            self._own.compressor = Compressor(self._settings.level)
        content = reader.read(plan, buffer)
        # The compressed frame needs no checksum, because each file has its own digest.
        compressor: Compressor = self._own.compressor
        return compressor.compress(content) if content else b""

    def _take(self) -> None:
        """Wait for the compressed frame of the oldest block, and add the frame to the unit's pack."""
        work, plan, future = self._flight[0]
        try:
            frame = self._wait(future, work.job.name)
        except FileChanged as change:
            work.changed = change.path
            frame = b""
        self._flight.popleft()
        work.outstanding -= 1
        if not work.changed:
            work.add(plan, frame)
            self._counts.add(bytes_done=plan.size, files_done=sum(part.start == 0 for part in plan.parts))
            if work.filled >= self._settings.pack_bytes:
                self._close_pack(work)
        self._close_if_done(work)

    def _close_if_done(self, work: _UnitWork) -> None:
        if work.outstanding or not work.planned or work.closed:
            return
        work.closed = True
        work.reader.close()
        if work.changed:
            if work.tries >= TRIES_MAX:
                raise unsteady(work.changed)
            self._counts.add(bytes_done=-work.bytes_done, files_done=-work.files_done)
            rows = true_sizes(work.rows, work.files, work.job.source.texts)
            again = _UnitWork(work.job, rows, self._settings, self._stop.is_set, tries=work.tries + 1)
            self._again.append(self._begun(again))
            return
        if work.filled:
            self._close_pack(work)
        self._ended.append((work.job, self._sender.add_unit(ReadUnit(work.job.name, work.packs, work.unit))))

    def _close_pack(self, work: _UnitWork) -> None:
        while not self._sender.has_room(work.filled):
            self._pulse(work.job.name)
        for pack in work.packs:
            if pack.done():
                pack.result()  # Raises a store error early, not after the last pack.
        work.packs.append(self._sender.add_pack(work.take_pack()))

    def _stored(self, *, wait: bool) -> Iterator[PackedUnit]:
        while self._ended and (wait or self._ended[0][1].done()):
            job, future = self._ended[0]
            unit = self._wait(future, job.name)
            self._ended.popleft()
            yield PackedUnit(job=job, unit=unit)

    def _wait(self, future: Future[_Result], name: str) -> _Result:
        while not wait((future,), timeout=WAIT_S).done:
            self._pulse(name)
        self._pulse(name)
        return future.result()


class _JobQueue:
    """A queue of units to pack, and the queue's current unit."""

    def __init__(self, jobs: Iterator[PackJob]) -> None:
        self.jobs = jobs
        self.work: _UnitWork | None = None


class _UnitWork:
    """One attempt to pack a unit."""

    def __init__(
        self, job: PackJob, rows: list[FileRow], settings: PackSettings, stopped: Callable[[], bool], *, tries: int = 1
    ) -> None:
        self.job = job
        self.rows = rows
        self.tries = tries
        filled = [index for index, row in enumerate(rows) if row.has_content]
        self.files = dict(zip(filled, job.source.files, strict=True))
        self.reader = UnitReader(rows, self.files, job.source.texts, stopped)
        self._reuse = reuse(rows, job.old) if job.old else ReusedBlocks()
        self._plans = plan_blocks(
            rows, [index for index in filled if index not in self._reuse.places], settings.block_bytes
        )
        self.plans = iter(self._plans)
        self.bytes_done = sum(rows[index].size for index in self._reuse.places)
        self.files_done = len(self._reuse.places)
        self.packs: list[Future[str]] = []
        self.outstanding = 0
        self.planned = self.closed = False
        self.changed = ""
        self._pack = bytearray()
        self._blocks: list[PackBlock] = []

    @property
    def filled(self) -> int:
        return len(self._pack)

    def add(self, plan: BlockPlan, frame: bytes) -> None:
        self.bytes_done += plan.size
        self.files_done += sum(part.start == 0 for part in plan.parts)
        if frame:
            pack = len(self._reuse.packs) + len(self.packs)
            self._blocks.append(PackBlock(pack, self.filled, len(frame), plan.size))
            self._pack += frame

    def take_pack(self) -> bytearray:
        pack, self._pack = self._pack, bytearray()
        return pack

    def unit(self, packs: tuple[str, ...]) -> Unit:
        rows = self.rows
        for index, digest in self.reader.corrections.items():
            rows[index] = msgspec.structs.replace(rows[index], sha256=digest)
        places = self._reuse.places | places_of(self._plans, len(self._reuse.blocks))
        return Unit(
            address=unit_address(rows),
            rows=tuple(rows),
            packs=self._reuse.packs + packs,
            blocks=(*self._reuse.blocks, *self._blocks),
            places=tuple(places[index] for index in sorted(places)),
        )


class ReadUnit(msgspec.Struct, frozen=True):
    """A unit whose files the packer has read completely."""

    name: str
    packs: Sequence[Future[str]]
    make: Callable[[tuple[str, ...]], Unit]


class CaptureCounts:
    """Thread-safe progress counters of a capture."""

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
        """Count sent bytes, sent packs, and reused packs that the store already had."""
        with self._lock:
            self.sent_bytes += sent_bytes
            self.packs_sent += sent
            self.packs_known += known


class PackSender:
    """Stores packs and units in groups. Only one thread may call a `PackSender`.

    The executor `threads` processes the groups in order. `PackSender` calls `before_packs` with the total size of the
    next packs to store. The callback may raise an error to stop the capture.
    """

    def __init__(
        self,
        blobs: StoreBlobs,
        threads: ThreadPoolExecutor,
        *,
        counts: CaptureCounts,
        stopped: Callable[[], bool],
        before_packs: Callable[[int], None],
    ) -> None:
        self._blobs = blobs
        self._threads = threads
        self._counts = counts
        self._stopped = stopped
        self._before_packs = before_packs
        self._room = _ByteBudget(BYTES_IN_FLIGHT)
        self._group = _Group()

    def has_room(self, size: int) -> bool:
        """Return True if the byte budget admits a pack of this size, now or within `WAIT_S` seconds."""
        if self._room.take(size, 0):
            return True
        self.flush()  # The packs of the unsent group may exhaust the byte budget.
        return self._room.take(size, WAIT_S)

    def add_pack(self, data: bytes | bytearray) -> Future[str]:
        """Add a pack after `has_room` has accepted it, and return a future for the stored pack's name."""
        done = Future[str]()
        self._group.packs.append((data, done))
        self._group.size += len(data)
        self._flush_if_full()
        return done

    def add_unit(self, ending: ReadUnit) -> Future[Unit]:
        """Add a unit after the unit's packs, and return a future for the stored unit."""
        done = Future[Unit]()
        self._group.units.append((ending, done))
        self._flush_if_full()
        return done

    def flush(self) -> None:
        """Send the current group to a storing thread."""
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
        except BaseException as error:  # noqa: BLE001 - waiting futures must receive every error
            for done in waiting:
                if not done.done():
                    done.set_exception(error)

    def _send_packs(self, group: _Group) -> None:
        if self._stopped():
            raise CaptureStopped
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
            raise CaptureStopped
        try:
            self._blobs.write_units(units)
        except EnvironmentRejected:
            for unit, (ending, _) in zip(units, group.units, strict=True):
                _check(unit, ending.name)
            raise
        for unit, (_, done) in zip(units, group.units, strict=True):
            done.set_result(unit)


class _Group:
    """Packs and units that a single storing thread stores together."""

    def __init__(self) -> None:
        self.packs: list[tuple[bytes | bytearray, Future[str]]] = []
        self.units: list[tuple[ReadUnit, Future[Unit]]] = []
        self.size = 0

    @property
    def items(self) -> int:
        return len(self.packs) + len(self.units)


class _ByteBudget:
    """Limit on the total bytes that several threads hold in memory."""

    def __init__(self, bytes_max: int) -> None:
        self._free = threading.Condition()
        self._bytes_max = bytes_max
        self._bytes = 0

    def take(self, size: int, wait_s: float) -> bool:
        """Reserve bytes, or return False after `wait_s` seconds. An unused budget accepts any size."""
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
            (f"{name} cannot be captured: {error.message}"),
            hint="remove the file, because no restore would accept the file",
        ) from None
