"""Caches objects of a bucket on the server's disk, so that all nodes share one download.

    read ─ cached and unchanged? ─────────────────────▶ from the file
         ├ another request reads it from the bucket  ─▶ the same bytes
         └ else: from the bucket, compared with its name, cached ─▶ from the file

A pack's name is the digest of its bytes, so a copy of a pack never becomes outdated. The address of a unit or snapshot
does not cover all of its data. Another `put` may change that data. For example, a unit may then refer to different
packs. Copies of units and snapshots are therefore valid only for `DOCUMENT_S`, and not after a restart. A missing pack
invalidates all copies of units and snapshots. The server compares every copy with its digest when it opens the copy. A
defective disk therefore causes only another read of the bucket.

When the cache or the disk is full, the server removes the least recently used copies. If an object does not fit, the
server serves the object from memory to all waiting requests and does not cache it.

Failure cases:

* The bucket does not have the object: callers receive KeyError.

* The bucket does not answer: all waiting callers receive StoreUnavailable.

* The bucket returns wrong data twice: callers receive EnvironmentCorrupt, which names the object.

* The disk is full or not writable: the server serves the object from memory and logs the problem once.

* The server is killed: the next start removes temporary files.
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
"""Bytes per read from a file, so that no complete object is in memory."""
PACKS_AT_ONCE = 8
"""Maximum number of concurrent pack downloads. Each download needs 16 to 32 MiB of memory."""
DOCUMENTS_AT_ONCE = 16
"""Maximum number of concurrent downloads of units and snapshots, which mostly wait for the network."""
TURN_S = 15.0
"""Seconds that a download waits for a free slot, which limits the delay from a hanging bucket."""
FIRST_BYTES = 64 << 20
"""Bytes in the first request to the bucket. Every pack is shorter and thus needs only one request."""
DOCUMENT_S = 600
"""Seconds for which a copy of a unit or a snapshot is valid."""
WAIT_S = 40.0
"""Seconds that a request waits for a shared download, fewer than the client's timeout."""
FLOOR_BYTES_MAX = 10**9
_FLOOR_SHARE = 20  # On a small disk, one twentieth of the disk stays free.
_COPIED = ("packs", "units", "snapshots")

Judge = Callable[[str, bytes], None]
"""Raises `AlteredObject` if the bytes do not match their key."""

_log = logging.getLogger(__name__)


class ObjectCache:
    """Copies of a bucket's objects. Thread-safe.

    Args:
        store: the bucket.
        directory: directory that contains only the copies; created when needed.
        bytes_max: maximum size of all copies.
        judge: compares downloaded data with its key.
        clock: measures the age of copies.
        kept_free_bytes: minimum of free space for the server. Copies leave an additional gigabyte free.
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
        self._sizes: OrderedDict[str, int] | None = None  # key → bytes; the last used key is at the end
        self._documents: dict[str, _Document] = {}
        self._told: set[str] = set()

    def read(self, key: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Yield a verified object, or a range of it, in pieces.

        Raises:
            KeyError: the object does not exist.
            EnvironmentCorrupt: the bucket has other data under this name.
            EnvironmentRejected: the key or the range is invalid.
            StoreUnavailable: the bucket does not answer.
        """
        check_range(check_key(key), start, 0 if length is None else length)
        copy = self._hit(key) or self._shared(key)
        pieces = _pieces(copy, start, copy.size if length is None else min(copy.size, start + length))
        return itertools.chain((next(pieces),), pieces)

    def keep(self, key: str, data: bytes | memoryview) -> None:
        """Cache an object right after a `put` into the bucket, to save the download of the object."""
        self._kept(key, data)

    def forget(self, keys: Collection[str]) -> None:
        """Remove copies of objects that were deleted or replaced in the bucket."""
        with self._lock:
            for key in keys:
                self._drop(key)

    def forget_documents(self) -> None:
        """Invalidate the copies of units and snapshots."""
        with self._lock:
            self._documents.clear()

    def tend(self) -> None:
        """Remove copies when the disk is nearly full."""
        with self._lock:
            self._make_room(0)

    # --- shared downloads ------------------------------------------------------------------------------------------

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
                f"the download of {key[:80]} from {self._store.url} has taken more than {WAIT_S:.0f} s",
                hint="check the bucket with `sgpu doctor`, or with /health of the server",
            ) from None

    def _lead(self, key: str, flight: Future[_Copy]) -> None:
        try:
            # An earlier download may have ended between the lookup and this download.
            copy = self._hit(key) or self._fetched(key)
        except BaseException as error:  # noqa: BLE001 - all waiting requests get the same error
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
                return _Bytes(data)  # The object breaks a rule or is of another version. The caller reports the error.
            return self._kept(key, data)

    @contextlib.contextmanager
    def _turn(self, key: str) -> Iterator[None]:
        turns = self._packs if key.startswith("packs/") else self._others
        if not turns.acquire(timeout=TURN_S):
            raise StoreUnavailable(
                f"the store {self._store.url} is slow: {key[:20]} has waited for {TURN_S:.0f} s behind other downloads",
                hint="the client tries again; check the bucket",
            )
        try:
            yield
        finally:
            turns.release()

    def _once_more(self, key: str) -> bytes:
        """Read altered data a second time, to determine if the transfer or the store altered the data."""
        data = self._whole(key)
        try:
            self._judge(key, data)
        except AlteredObject as error:
            kind, _, name = key.partition("/")
            raise EnvironmentCorrupt(
                f"{kind[:-1]} {name[:12]} in the store {self._store.url} is altered: {error}",
                hint="check the disk of the store; a restore removes altered objects, and a capture sends them again",
            ) from None
        return data

    def _whole(self, key: str) -> bytes:
        data = self._store.get(key, 0, FIRST_BYTES)
        if len(data) == FIRST_BYTES:
            data += self._store.get(key, FIRST_BYTES, OBJECT_BYTES_MAX - FIRST_BYTES)
        return data

    # --- copies on the disk ----------------------------------------------------------------------------------------

    def _hit(self, key: str) -> _Copy | None:
        """Return a copy that still matches its digest."""
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
                raise OSError("its content has changed")
        except OSError as error:
            _log.warning("the server removes the copy of %s in %s: %s", key[:20], self._directory, error)
            self.forget((key,))
            return None
        with contextlib.suppress(OSError):  # The file time only determines the order of removal after a restart.
            os.utime(self._place(key))
        with self._lock:
            if key in self._known():
                self._known().move_to_end(key)
        return copy

    def _digest(self, key: str) -> str | None:
        """Return the digest that a valid copy must have, or None if no copy can be valid."""
        kind, _, name = key.partition("/")
        if kind == "packs":
            return name
        with self._lock:
            document = self._documents.get(key)
        if document is None or self._clock.boottime_ns() - document.read_ns > DOCUMENT_S * 10**9:
            return None
        return document.digest

    def _kept(self, key: str, data: bytes | memoryview) -> _Copy:
        """Cache downloaded data and return the copy, or return the bytes if the disk is full."""
        place = self._place(key)
        fresh = place.with_name(f".new-{place.name}-{os.urandom(4).hex()}")
        with self._lock:
            self._drop(key)
            if not self._make_room(len(data)):
                return _Bytes(data)
            self._known()[key] = len(data)  # The new entry reserves the space.
        try:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh.write_bytes(data)
            copy = KeptFile(fresh)
            with self._lock:
                if key in self._known():
                    fresh.rename(place)
                else:  # Another thread removed the copy for lack of space during the write.
                    fresh.unlink()
                    return copy
        except OSError as error:
            with contextlib.suppress(OSError):  # The log has just reported the same error.
                fresh.unlink(missing_ok=True)
            self.forget((key,))
            self._tell(
                f"the server cannot keep copies of {self._store.url} in {self._directory}: {error.strerror or error}"
            )
            return _Bytes(data)
        if not key.startswith("packs/"):
            with self._lock:
                self._documents[key] = _Document(blake3(data).hexdigest(), self._clock.boottime_ns())
        return copy

    def _make_room(self, size: int) -> bool:
        """Remove the least recently used copies until the given size fits, and return True on success."""
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
            self._tell(f"the server cannot remove copies in {self._directory}: {error.strerror or error}")

    def _known(self) -> OrderedDict[str, int]:
        """Return the copies in the cache. The first call searches the disk and removes incomplete files."""
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
    """A cached unit or snapshot: the digest of its bytes, and the time of its download."""

    digest: str
    read_ns: int


class _Copy:
    """An object whose pieces remain readable after the removal of its file."""

    size: int

    def at(self, start: int, length: int) -> bytes:
        """Return bytes of the object."""
        raise NotImplementedError


class _Bytes(_Copy):
    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data
        self.size = len(data)

    def at(self, start: int, length: int) -> bytes:
        return bytes(self._data[start : start + length])


class KeptFile(_Copy):
    """A copy that is read from its file, even after another thread has removed the file."""

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def __del__(self) -> None:
        # Several waiting requests share a copy, so a reader that disconnects does not close the copy.
        if self._fd >= 0:
            os.close(self._fd)

    def at(self, start: int, length: int) -> bytes:
        return os.pread(self._fd, length, start)


def _pieces(copy: _Copy, start: int, end: int) -> Iterator[bytes]:
    """Yield a range of a copy, in at least one piece."""
    yield copy.at(start, max(0, min(end - start, PIECE_BYTES)))
    for first in range(start + PIECE_BYTES, end, PIECE_BYTES):
        yield copy.at(first, min(end - first, PIECE_BYTES))


def _found(directory: Path) -> list[tuple[str, int]]:
    """Return keys and sizes of the packs on the disk, in order of last use. Delete all other files."""
    found: list[tuple[int, str, int]] = []
    for kind in _COPIED:
        for path in (directory / kind).glob("*"):
            status = path.stat()
            if kind != "packs" or path.name.startswith("."):
                # A restart loses the digest of a document. Other files are incomplete.
                path.unlink(missing_ok=True)
            else:
                found.append((status.st_mtime_ns, f"{kind}/{path.name}", status.st_size))
    return [(key, size) for _, key, size in sorted(found)]
