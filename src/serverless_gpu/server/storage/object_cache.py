"""Object cache: keeps objects of a bucket on this server's disk, so that the bucket is read once for all nodes.

    read ─ here, and still what it was? ──────────────▶ from the file
         ├ another request reads it from the bucket  ─▶ the same bytes
         └ else: from the bucket, compared with its name, kept ─▶ from the file

A pack's name is the digest of its bytes, so a copy is right or it is none, for ever. What a unit or a snapshot says
beside its address may be put again (a unit may come to point at other packs): a copy of one is good for as long as the
server takes for granted that a snapshot is there, and no longer than a restart; and none is when a pack is missed.
Every copy is compared with its digest when it is opened: a disk that forgets costs a read of the bucket.

All of this is only a copy. It gives way: what was not asked for the longest goes when there is too much of it, and
when others need the disk; what does not fit is passed on from memory, to everybody who waits for it, and not kept.

Failure cases: the bucket does not have it (KeyError), does not answer (StoreUnavailable, for all who wait), gives
something else twice (EnvironmentCorrupt naming it); the disk is full, or cannot be written (passed on, said once in
the log); the server is killed (what has no name yet is removed at the next start).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from serverless_gpu.ambient import Clock
from serverless_gpu.environment.stores.base import OBJECT_BYTES_MAX, Store, check_key, check_range
from serverless_gpu.environment.stores.codec import AlteredObject
from serverless_gpu.errors import EnvironmentCorrupt, EnvironmentRejected, StoreUnavailable
from serverless_gpu.server.core.disk_space import KEPT_FREE_BYTES, free_bytes

DIRECTORY = "nearby"
PIECE_BYTES = 8 << 20
"""What is read of a file at once, so that no whole object is in memory."""
PACKS_AT_ONCE = 8
"""Packs that are read from the bucket at the same time; each is in memory, 16 to 32 MiB, until it is on the disk."""
DOCUMENTS_AT_ONCE = 16
"""Units and snapshots, which are small: what takes long is that the bucket is far away."""
TURN_S = 15.0
"""How long an object waits until it is read: a bucket that hangs holds up a request for so long at most."""
FIRST_BYTES = 64 << 20
"""What is asked of the bucket first: every pack is shorter, so it takes one request."""
DOCUMENT_S = 600
"""How long a copy of a unit or a snapshot is good."""
WAIT_S = 40.0
"""How long a request waits for what another one reads: less than its client does, which asks again."""
FLOOR_BYTES_MAX = 10**9
_FLOOR_SHARE = 20  # of a small disk, a twentieth stays free
_COPIED = ("packs", "units", "snapshots")

Judge = Callable[[str, bytes], None]
"""Raises `AlteredObject` when bytes are not what their key says."""

_log = logging.getLogger(__name__)


class ObjectCache:
    """Copies of a bucket's objects; safe to use from several threads.

    Args:
        store: the bucket.
        directory: for the copies, nothing else is in it; made when it is needed.
        bytes_max: what they may take.
        judge: compares what comes with its key.
        clock: how old a copy is.
        kept_free_bytes: what the server leaves of its disk; copies leave a gigabyte more.
    """

    def __init__(
        self,
        store: Store,
        directory: Path,
        bytes_max: int,
        *,
        judge: Judge,
        clock: Clock,
        kept_free_bytes: int = KEPT_FREE_BYTES,
    ) -> None:
        self._store = store
        self._directory = directory
        self.bytes_max = bytes_max
        self._judge = judge
        self._clock = clock
        self._kept_free_bytes = kept_free_bytes
        self._lock = threading.Lock()
        self._packs = threading.Semaphore(PACKS_AT_ONCE)
        self._others = threading.Semaphore(DOCUMENTS_AT_ONCE)
        self._flights: dict[str, Future[_Copy]] = {}
        self._sizes: OrderedDict[str, int] | None = None  # key → bytes; what was asked for last at the end
        self._documents: dict[str, _Document] = {}
        self._told: set[str] = set()

    def read(self, key: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Yield an object, or a range of it, in pieces; when this returns it is there, and right.

        Raises:
            KeyError: there is no such object.
            EnvironmentCorrupt: the bucket has something else.
            EnvironmentRejected: it is no key, or no range.
            StoreUnavailable: the bucket does not answer.
        """
        check_range(check_key(key), start, 0 if length is None else length)
        copy = self._hit(key) or self._shared(key)
        pieces = _pieces(copy, start, copy.size if length is None else min(copy.size, start + length))
        return itertools.chain((next(pieces),), pieces)

    def keep(self, key: str, data: bytes | memoryview) -> None:
        """Keep a copy of an object that was just put into the bucket, so that it need not be read back."""
        self._kept(key, data)

    def forget(self, keys: Collection[str]) -> None:
        """Throw copies away, because what is in the bucket is removed, or another one."""
        with self._lock:
            for key in keys:
                self._drop(key)

    def forget_documents(self) -> None:
        """Have units and snapshots read from the bucket again."""
        with self._lock:
            self._documents.clear()

    def tend(self) -> None:
        """Remove copies when the disk runs full."""
        with self._lock:
            self._make_room(0)

    # --- one read of the bucket for all who ask ------------------------------------------------------------------

    def _shared(self, key: str) -> _Copy:
        with self._lock:
            flight = self._flights.get(key)
            leads = flight is None
            if flight is None:
                flight = self._flights[key] = Future()
        if leads:
            self._lead(key, flight)
        try:
            return flight.result(WAIT_S)
        except Late:
            raise StoreUnavailable(
                f"{key[:80]} has been on its way from {self._store.url} for more than {WAIT_S:.0f} s",
                hint="look how the bucket does: `sgpu doctor`, or /health of the server",
            ) from None

    def _lead(self, key: str, flight: Future[_Copy]) -> None:
        try:
            # The leader before may have ended between the look and the flight.
            copy = self._hit(key) or self._fetched(key)
        except BaseException as error:  # noqa: BLE001 - whatever it was, those who wait get it, too
            flight.set_exception(error)
        else:
            flight.set_result(copy)
        finally:
            with self._lock:
                del self._flights[key]

    def _fetched(self, key: str) -> _Copy:
        with self._turn(key):
            data = self._whole(key)
            try:
                self._judge(key, data)
            except AlteredObject:
                data = self._once_more(key)
            except EnvironmentRejected:
                return _Bytes(data)  # it breaks a rule, or is of another version: the caller says so
            return self._kept(key, data)

    @contextlib.contextmanager
    def _turn(self, key: str) -> Iterator[None]:
        turns = self._packs if key.startswith("packs/") else self._others
        if not turns.acquire(timeout=TURN_S):
            raise StoreUnavailable(
                f"the store {self._store.url} is slow: {key[:20]} has waited for {TURN_S:.0f} s behind others",
                hint="it is asked for again; look how the bucket does",
            )
        try:
            yield
        finally:
            turns.release()

    def _once_more(self, key: str) -> bytes:
        """Read again what came altered: on its way, or where it lies?"""
        data = self._whole(key)
        try:
            self._judge(key, data)
        except AlteredObject as error:
            kind, _, name = key.partition("/")
            raise EnvironmentCorrupt(
                f"{kind[:-1]} {name[:12]} in the store {self._store.url} is altered: {error}",
                hint="look at the disk of the store; a restore removes what is altered, and a capture sends it again",
            ) from None
        return data

    def _whole(self, key: str) -> bytes:
        data = self._store.get(key, 0, FIRST_BYTES)
        if len(data) == FIRST_BYTES:
            data += self._store.get(key, FIRST_BYTES, OBJECT_BYTES_MAX - FIRST_BYTES)
        return data

    # --- copies on the disk ----------------------------------------------------------------------------------------

    def _hit(self, key: str) -> _Copy | None:
        """Return a copy that is what it was when it was kept."""
        digest = self._digest(key)
        if digest is None:
            return None
        try:
            copy = KeptFile(self._place(key))
        except OSError:
            return None
        try:
            found = blake3()
            for piece in _pieces(copy, 0, copy.size):
                found.update(piece)
            if found.hexdigest() != digest:
                raise OSError("it is not what it was")
        except OSError as error:
            _log.warning("the copy of %s in %s is thrown away: %s", key[:20], self._directory, error)
            self.forget((key,))
            return None
        with contextlib.suppress(OSError):  # it only says what goes first after a restart
            os.utime(self._place(key))
        with self._lock:
            if key in self._known():
                self._known().move_to_end(key)
        return copy

    def _digest(self, key: str) -> str | None:
        """Return the digest of a copy that would be good, or None where none would."""
        kind, _, name = key.partition("/")
        if kind == "packs":
            return name
        with self._lock:
            document = self._documents.get(key)
        if document is None or self._clock.boottime_ns() - document.read_ns > DOCUMENT_S * 10**9:
            return None
        return document.digest

    def _kept(self, key: str, data: bytes | memoryview) -> _Copy:
        """Keep what came and return the copy, or the bytes themselves where there is no room."""
        place = self._place(key)
        fresh = place.with_name(f".new-{place.name}-{os.urandom(4).hex()}")
        with self._lock:
            self._drop(key)
            if not self._make_room(len(data)):
                return _Bytes(data)
            self._known()[key] = len(data)  # from now on the room is taken
        try:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh.write_bytes(data)
            copy = KeptFile(fresh)
            with self._lock:
                if key in self._known():
                    fresh.rename(place)
                else:  # it had to give way while it was written
                    fresh.unlink()
                    return copy
        except OSError as error:
            with contextlib.suppress(OSError):  # it says what it said just now
                fresh.unlink(missing_ok=True)
            self.forget((key,))
            self._tell(f"copies of {self._store.url} are not kept in {self._directory}: {error.strerror or error}")
            return _Bytes(data)
        if not key.startswith("packs/"):
            with self._lock:
                self._documents[key] = _Document(blake3(data).hexdigest(), self._clock.boottime_ns())
        return copy

    def _make_room(self, size: int) -> bool:
        """Have what was not asked for longest go until there is room for so many bytes; return whether there is."""
        known = self._known()
        if size > self.bytes_max:
            return False
        while not self._fits(size, sum(known.values())):
            if not known:
                return False
            self._drop(next(iter(known)))
        return True

    def _fits(self, size: int, held: int) -> bool:
        if held + size > self.bytes_max:
            return False
        free = free_bytes(self._existing())
        return free is None or free - size >= self._floor()

    def _floor(self) -> int:
        try:
            disk = os.statvfs(self._existing())
        except OSError:
            return self._kept_free_bytes
        return self._kept_free_bytes + min(FLOOR_BYTES_MAX, disk.f_blocks * disk.f_frsize // _FLOOR_SHARE)

    def _existing(self) -> Path:
        return self._directory if self._directory.exists() else self._directory.parent

    def _drop(self, key: str) -> None:
        self._known().pop(key, None)
        self._documents.pop(key, None)
        try:
            self._place(key).unlink(missing_ok=True)
        except OSError as error:
            self._tell(f"copies in {self._directory} cannot be removed: {error.strerror or error}")

    def _known(self) -> OrderedDict[str, int]:
        """Return what is here; looked for once, and then what a killed server left is removed."""
        if self._sizes is None:
            self._sizes = OrderedDict()
            try:
                self._sizes.update(_found(self._directory))
            except OSError as error:
                self._tell(f"{self._directory} cannot be read: {error.strerror}")
        return self._sizes

    def _place(self, key: str) -> Path:
        return self._directory / key

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            _log.warning("%s", sentence)


class _Document(NamedTuple):
    """A unit or snapshot with a copy: the digest of its bytes, and when they were read."""

    digest: str
    read_ns: int


class _Copy:
    """An object that can be read piece by piece, also after its file was removed."""

    size: int

    def at(self, start: int, length: int) -> bytes:
        """Return bytes of it."""
        raise NotImplementedError


class _Bytes(_Copy):
    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data
        self.size = len(data)

    def at(self, start: int, length: int) -> bytes:
        return bytes(self._data[start : start + length])


class KeptFile(_Copy):
    """A copy that is read from its file, also when another thread removes the file."""

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def __del__(self) -> None:
        # Several who wait share one, and a reader that goes away in the middle says nothing.
        if self._fd >= 0:
            os.close(self._fd)

    def at(self, start: int, length: int) -> bytes:
        return os.pread(self._fd, length, start)


def _pieces(copy: _Copy, start: int, end: int) -> Iterator[bytes]:
    """Yield a range of a copy; one piece at least."""
    yield copy.at(start, max(0, min(end - start, PIECE_BYTES)))
    for first in range(start + PIECE_BYTES, end, PIECE_BYTES):
        yield copy.at(first, min(end - first, PIECE_BYTES))


def _found(directory: Path) -> list[tuple[str, int]]:
    """Return keys and sizes of the packs here, what was asked for last at the end; remove everything else."""
    found: list[tuple[int, str, int]] = []
    for kind in _COPIED:
        for path in (directory / kind).glob("*"):
            status = path.stat()
            if kind != "packs" or path.name.startswith("."):
                path.unlink(missing_ok=True)  # its digest is not known any more, or it is half of one
            else:
                found.append((status.st_mtime_ns, f"{kind}/{path.name}", status.st_size))
    return [(key, size) for _, key, size in sorted(found)]
