"""Caches objects of a bucket on the server's disk, so that all nodes share one download.

    read ─ cached and unchanged? ─────────────────────▶ from the file
         ├ another request reads it from the bucket  ─▶ the same bytes
         └ else: from the bucket, compared with its name, cached ─▶ from the file

A cached pack never becomes outdated, because a pack's name is the digest of its bytes. The address of a unit or
snapshot does not cover all of its data. For example, a later `put` may make a unit refer to different packs. Cached
units and snapshots are therefore valid only for `DOCUMENT_S` seconds, and not after a restart. A missing pack
invalidates all cached units and snapshots. The server compares every cached copy with its digest before each use. After
a disk error, the server downloads the object again.

When the cache or the disk is full, the server removes the least recently used copies. If an object does not fit into
the cache, the server serves the object from memory to all waiting requests.

Failure cases:

* If the bucket does not have the object, callers receive KeyError.

* If the bucket does not answer, all callers that wait for the object receive StoreUnavailable.

* If the bucket returns wrong data twice, callers receive EnvironmentCorrupt with the object's name.

* If the disk is full or not writable, the server serves the object from memory.

* After a kill of the server, the next start removes temporary files.
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
"""Bytes per read from a file, which limits the memory per request."""
PACKS_AT_ONCE = 8
"""Maximum number of concurrent pack downloads. Each download needs 16 to 32 MiB of memory."""
DOCUMENTS_AT_ONCE = 16
"""Maximum number of concurrent downloads of units and snapshots."""
TURN_S = 15.0
"""Seconds for which a download waits for a free slot."""
FIRST_BYTES = 64 << 20
"""Number of bytes that the first request to the bucket asks for. Every pack is shorter than this range and needs only
one request."""
DOCUMENT_S = 600
"""Seconds for which a cached unit or snapshot is valid."""
WAIT_S = 40.0
"""Seconds for which a request waits for a shared download. The client's timeout is longer."""
FLOOR_BYTES_MAX = 10**9
_FLOOR_SHARE = 20  # On a small disk, the cache keeps one twentieth of the disk free.
_COPIED = ("packs", "units", "snapshots")

Judge = Callable[[str, bytes], None]
"""Raises `AlteredObject` if the bytes do not match their key."""

_log = logging.getLogger(__name__)


class ObjectCache:
    """Caches a bucket's objects on the disk. Thread-safe.

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
        self._sizes: OrderedDict[str, int] | None = None  # Size in bytes by key, in order of last use.
        self._documents: dict[str, _Document] = {}
        self._told: set[str] = set()

    def read(self, key: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Yield the pieces of a verified object or of a byte range.

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
        """Cache an object after its upload to the bucket, which saves a download."""
        self._kept(key, data)

    def forget(self, keys: Collection[str]) -> None:
        """Delete the copies of objects that were deleted or replaced in the bucket."""
        with self._lock:
            for key in keys:
                self._drop(key)

    def forget_documents(self) -> None:
        """Invalidate all cached units and snapshots."""
        with self._lock:
            self._documents.clear()

    def tend(self) -> None:
        """Delete cached copies if the disk is nearly full."""
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
                hint="check the bucket with `sgpu doctor`",
            ) from None

    def _lead(self, key: str, flight: Future[_Copy]) -> None:
        try:
            # Another request may have cached the object since the first lookup.
            copy = self._hit(key) or self._fetched(key)
        except BaseException as error:  # noqa: BLE001 - all waiting requests receive the same error
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
                return _Bytes(data)  # The caller reports objects that violate a rule or have another version.
            return self._kept(key, data)

    @contextlib.contextmanager
    def _turn(self, key: str) -> Iterator[None]:
        turns = self._packs if key.startswith("packs/") else self._others
        if not turns.acquire(timeout=TURN_S):
            raise StoreUnavailable(
                f"the store {self._store.url} is slow: {key[:20]} has waited for {TURN_S:.0f} s behind other downloads",
                hint="check the bucket for the cause of the delay",
            )
        try:
            yield
        finally:
            turns.release()

    def _once_more(self, key: str) -> bytes:
        """Download an altered object again to find out if the store or the transfer altered the data."""
        data = self._whole(key)
        try:
            self._judge(key, data)
        except AlteredObject as error:
            kind, _, name = key.partition("/")
            raise EnvironmentCorrupt(
                f"{kind[:-1]} {name[:12]} in the store {self._store.url} is altered: {error}",
                hint="check the disk of the store, and capture the environment again",
            ) from None
        return data

    def _whole(self, key: str) -> bytes:
        data = self._store.get(key, 0, FIRST_BYTES)
        if len(data) == FIRST_BYTES:
            data += self._store.get(key, FIRST_BYTES, OBJECT_BYTES_MAX - FIRST_BYTES)
        return data

    # --- copies on the disk ----------------------------------------------------------------------------------------

    def _hit(self, key: str) -> _Copy | None:
        """Return a cached copy that matches its digest, or None."""
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
                raise OSError("the content of the copy has changed")
        except OSError as error:
            _log.warning("the server removes the copy of %s in %s: %s", key[:20], self._directory, error)
            self.forget((key,))
            return None
        with contextlib.suppress(OSError):  # The file time determines the order of last use after a restart.
            os.utime(self._place(key))
        with self._lock:
            if key in self._known():
                self._known().move_to_end(key)
        return copy

    def _digest(self, key: str) -> str | None:
        """Return the expected digest of a cached copy, or None if no copy can be valid."""
        kind, _, name = key.partition("/")
        if kind == "packs":
            return name
        with self._lock:
            document = self._documents.get(key)
        if document is None or self._clock.boottime_ns() - document.read_ns > DOCUMENT_S * 10**9:
            return None
        return document.digest

    def _kept(self, key: str, data: bytes | memoryview) -> _Copy:
        """Cache downloaded data. Return the copy on the disk, or the bytes if the disk is full."""
        place = self._place(key)
        fresh = place.with_name(f".new-{place.name}-{os.urandom(4).hex()}")
        with self._lock:
            self._drop(key)
            if not self._make_room(len(data)):
                return _Bytes(data)
            self._known()[key] = len(data)  # The new entry reserves disk space for the copy.
        try:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh.write_bytes(data)
            copy = KeptFile(fresh)
            with self._lock:
                if key in self._known():
                    fresh.rename(place)
                else:  # Another thread has deleted the copy during the write, for lack of space.
                    fresh.unlink()
                    return copy
        except OSError as error:
            with contextlib.suppress(OSError):  # The log message below reports the disk error.
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
        """Delete the least recently used copies until `size` bytes fit. Return True on success."""
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
        """Return the cached copies. The first call scans the disk and deletes incomplete files."""
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
    """The digest and the download time of a cached unit or snapshot."""

    digest: str
    read_ns: int


class _Copy:
    """An object that remains readable after the deletion of its file."""

    size: int

    def at(self, start: int, length: int) -> bytes:
        """Return a byte range of the object."""
        raise NotImplementedError


class _Bytes(_Copy):
    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data
        self.size = len(data)

    def at(self, start: int, length: int) -> bytes:
        return bytes(self._data[start : start + length])


class KeptFile(_Copy):
    """A cached copy that remains readable after another thread has deleted its file."""

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def __del__(self) -> None:
        # A reader that disconnects must not close the copy, because several requests share a copy.
        if self._fd >= 0:
            os.close(self._fd)

    def at(self, start: int, length: int) -> bytes:
        return os.pread(self._fd, length, start)


def _pieces(copy: _Copy, start: int, end: int) -> Iterator[bytes]:
    """Yield the pieces of a byte range of a copy, at least one."""
    yield copy.at(start, max(0, min(end - start, PIECE_BYTES)))
    for first in range(start + PIECE_BYTES, end, PIECE_BYTES):
        yield copy.at(first, min(end - first, PIECE_BYTES))


def _found(directory: Path) -> list[tuple[str, int]]:
    """Return the keys and sizes of the cached packs in order of last use. Delete all other files."""
    found: list[tuple[int, str, int]] = []
    for kind in _COPIED:
        for path in (directory / kind).glob("*"):
            status = path.stat()
            if kind != "packs" or path.name.startswith("."):
                # After a restart, the digests of units and snapshots are unknown. All other files are incomplete
                # downloads.
                path.unlink(missing_ok=True)
            else:
                found.append((status.st_mtime_ns, f"{kind}/{path.name}", status.st_size))
    return [(key, size) for _, key, size in sorted(found)]
