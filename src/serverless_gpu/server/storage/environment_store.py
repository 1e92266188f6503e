"""Stores captured environments for clients and nodes, and verifies each object.

    client's helper ── present, put ─▶ checked against its name and the rules ─▶ store (a directory, or a bucket)
    node's agent    ◀── get, in pieces ── copies on this disk (`object_cache.py`) ◀── a bucket, read once for all ──┘

The server accepts only packs, units and snapshots that a restore can use. A pack must match its digest. A unit or
snapshot must match its address and pass all validation rules. A client must upload the packs before the unit that
refers to them. The packs must contain the files that the unit's rows list (`ContentChecks`).

A unit's address does not cover its references to packs. The server therefore verifies the content of a unit before
storing the unit. The server replaces an existing unit that was never verified. If several snapshots have the same
address, the server stores only the first, because the differences do not matter. Only operators and the server itself
write garbage-collection records (`gc/…`).

The server verifies each unit once, in a separate thread:

    a unit arrives ─ verified already? done
                   ├ small ─ one of SMALL_AT_ONCE turns ─┐
                   └ large ─ one of LARGE_AT_ONCE turns ─┴─▶ read its packs, compare every file with its row

The verification of a large unit takes seconds of CPU time. Small and large units therefore have separate verification
slots. If a client repeats a request after a timeout, the server reuses the result of the first verification.

A store from an earlier version may contain unverified units, which remain usable. During a restore, a node verifies
every byte and requests `repair` after an error.

Failure cases:

* If the network alters data during the transfer, the client receives HashMismatch and sends the object again.

* If an object violates a validation rule, the client receives EnvironmentRejected.

* If the disk is full, the client receives ServerStorageFull.

* If the store does not answer, the client receives StoreUnavailable after the retries of the store.

* If the data in a pack differs from a unit's rows, the verification raises `ContentMismatch`.

* If the verification of a unit cannot start within WAIT_S seconds, the client receives StoreUnavailable.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NoReturn

from blake3 import blake3

from serverless_gpu.ambient import Clock
from serverless_gpu.environment.documents import (
    EnvironmentContents,
    Packages,
    Snapshot,
    Unit,
    contents_of,
    packages_of,
)
from serverless_gpu.environment.stores.base import Store, Stored, check_key
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.codec import AlteredObject, pack_of, snapshot_of, unit_of
from serverless_gpu.environment.stores.collection import CollectionResult, collect
from serverless_gpu.environment.stores.condemned_objects import read_condemned
from serverless_gpu.environment.stores.repair import ContentMismatch, ReadPack, check_content, damaged
from serverless_gpu.errors import (
    EnvironmentCorrupt,
    EnvironmentMissing,
    EnvironmentProblem,
    EnvironmentRejected,
    HashMismatch,
    NotAllowed,
    NotFound,
    StorageError,
    StoreUnavailable,
)
from serverless_gpu.server.core.disk_space import KEPT_FREE_BYTES, check_room, storage_full
from serverless_gpu.server.core.health import Unwell
from serverless_gpu.server.storage.object_cache import PIECE_BYTES as COPIED_BYTES
from serverless_gpu.server.storage.object_cache import ObjectCache

SMALL_AT_ONCE = 4
LARGE_AT_ONCE = 2
LARGE_BYTES = 64 * 1024 * 1024
LARGE_ROWS = 20_000
"""Number of content bytes or rows above which a unit counts as large."""
WAIT_S = 10.0
_KNOWN_MAX = 50_000


PIECE_BYTES = COPIED_BYTES
"""Bytes per read from a store, which limits the memory per request."""
CHECKS_AT_ONCE = 2
"""Maximum number of concurrently decoded units and snapshots.

Decoding a large snapshot takes several hundred MB of memory.
"""
SEEN_S = 600
"""Seconds for which the server relies on an existence check of a snapshot."""
REPAIRED_S = 600
"""Seconds for which the server relies on a repair that found a unit intact."""
REPAIR_WAIT_S = 10.0
_SEEN_MAX = 10_000
_PACKAGES_MAX = 64
_NOTHING = f"snapshots/{'0' * 64}"


class EnvironmentStore:
    """Stores and verifies captured environments. Thread-safe.

    Args:
        store: the underlying store.
        clock: measures the age of earlier checks.
        kept_free_bytes: minimum of free space on the store's disk.
        nearby: directory for local copies of the bucket's objects, and their maximum bytes; None for a store on a disk.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        kept_free_bytes: int = KEPT_FREE_BYTES,
        nearby: tuple[Path, int] | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._nearby = nearby and ObjectCache(
            store, *nearby, judge=self._judge, clock=clock, kept_free_bytes=kept_free_bytes
        )
        self._kept_free_bytes = kept_free_bytes
        self._checks = threading.Semaphore(CHECKS_AT_ONCE)
        self._seen: dict[str, int] = {}  # Boottime of the last existence check, by snapshot address.
        self._packages: dict[str, Packages] = {}
        self._contents: dict[str, EnvironmentContents] = {}
        self._content = ContentChecks(self._read_pack)
        self._repairs = threading.Semaphore(1)
        self._whole: dict[str, int] = {}  # Boottime of the last repair without findings, by unit address.

    def read(self, key: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Yield the pieces of an object or of a byte range, after reading the first piece.

        Raises:
            NotFound: the object does not exist.
            EnvironmentCorrupt: a bucket has other data under that name, also in a second read.
            EnvironmentRejected: the key or the range is invalid.
        """
        if self._nearby is not None and not key.startswith("gc/"):
            try:
                return self._nearby.read(key, start, length)
            except KeyError:
                # A client may have replaced the unit or snapshot that refers to the missing pack.
                self._nearby.forget_documents()
                raise NotFound(f"{key[:80]} is not on the server") from None
        first = self._piece(key, start, length)
        return self._pieces(first, key, start, length)

    def put(self, key: str, data: bytes | memoryview, *, may_manage: bool = False) -> None:
        """Verify an uploaded object and store it durably.

        Args:
            key: key of the object.
            data: bytes of the object.
            may_manage: True if the sender may write notes of garbage collection.

        Raises:
            NotAllowed: the object is a note of garbage collection, and the sender may not write the note.
            HashMismatch: the data does not match the key.
            EnvironmentMissing: a pack of the unit does not exist, or was altered and is removed now.
            EnvironmentRejected: the key is invalid, the object breaks the rules, or packs contain other data than the
                unit's rows list.
            StoreUnavailable: the server is verifying too many units.
            ServerStorageFull: the disk is full.
        """
        if check_key(key).startswith("gc/") and not may_manage:
            raise NotAllowed(f"only operators and the server itself write {key}")
        self.check_room(len(data))
        try:
            wanted = self._checked(key, data)
        except AlteredObject as error:
            raise HashMismatch(
                f"{key[:80]} arrived altered: {error}",
                hint="send the object again. If the error recurs, check the network between client and server "
                "for a "
                "device that alters data",
            ) from None
        if wanted is None:
            return
        try:
            self._store.put({key: wanted})
        except StorageError as error:
            raise storage_full(error.message) from error
        finally:
            if self._nearby is not None:
                self._nearby.forget((key,))
        if self._nearby is not None and key.startswith("packs/"):
            # Cache the pack, because the server and the nodes will read it soon.
            self._nearby.keep(key, wanted)

    def try_store(self) -> str:
        """Send a test request to the store. Raise `Unwell` if the request fails."""
        try:
            self._store.present((_NOTHING,))
        except (EnvironmentProblem, StorageError) as error:
            raise Unwell("do not answer") from error
        return ""

    def check_room(self, size: int) -> None:
        """Raise an error if the environment store cannot hold `size` more bytes."""
        check_room(size, self._store.free_bytes(), kept_free_bytes=self._kept_free_bytes)

    def present(self, keys: Collection[str]) -> frozenset[str]:
        """Return the given keys whose objects exist."""
        return self._store.present(keys)

    def condemned(self, keys: Collection[str]) -> tuple[frozenset[str], bool]:
        """Return the condemned objects among the given keys, and True while a collection may delete objects."""
        documents = StoreBlobs(self._store, clock=self._clock)
        return documents.condemned(keys) if keys else frozenset(), documents.is_collecting()

    def list(self, prefix: str) -> Iterator[Stored]:
        """Return all stored objects below `prefix/`."""
        return self._store.list(prefix)

    def delete(self, keys: Collection[str]) -> None:
        """Delete objects, and ignore missing objects."""
        self._seen.clear()
        try:
            self._store.delete(keys)
        finally:
            if self._nearby is not None:
                self._nearby.forget([key for key in keys if not key.startswith("gc/")])

    def repair(self, keys: Collection[str]) -> tuple[str, ...]:
        """Verify snapshots and units with their content, and delete objects that no restore can use.

        Any caller who may restore can request a repair, because the server verifies every claim of the caller. The
        server skips units that a repair has found intact within the last `REPAIRED_S` seconds.
        """
        now_ns = self._clock.boottime_ns()
        wanted = [
            key
            for key in map(check_key, keys)
            if now_ns - self._whole.get(key, -(REPAIRED_S * 10**9)) >= REPAIRED_S * 10**9
        ]
        documents = StoreBlobs(self._store, clock=self._clock)
        if not self._repairs.acquire(timeout=REPAIR_WAIT_S):
            raise StoreUnavailable("the server is verifying other units of its store", hint="send the request again")
        try:
            bad = [key for key in wanted if key.startswith("snapshots/") and not _is_snapshot(documents, key)]
            units = [key.partition("/")[2] for key in wanted if key.startswith("units/")]
            bad += damaged(documents, units, check=self._content.compare)
            self.delete(bad)
        finally:
            self._repairs.release()
        if len(self._whole) > _SEEN_MAX:
            self._whole.clear()
        self._whole.update(dict.fromkeys(set(wanted) - set(bad), now_ns))
        return tuple(bad)

    def free_bytes(self) -> int | None:
        """Return the free space of the store in bytes, or None if unknown."""
        free = self._store.free_bytes()
        return None if free is None else max(0, free - self._kept_free_bytes)

    def need(self, snapshot: str) -> None:
        """Refuse a run whose snapshot is missing, before the run waits for devices."""
        now_ns = self._clock.boottime_ns()
        if now_ns - self._seen.get(snapshot, -(SEEN_S * 10**9)) < SEEN_S * 10**9:
            return
        key = f"snapshots/{snapshot}"
        if not self._store.present([key]):
            raise EnvironmentMissing(
                f"snapshot {snapshot[:12]} is not on the server",
                hint="call the function again, which captures the environment again",
            )
        if len(self._seen) >= _SEEN_MAX:
            self._seen.clear()
        self._seen[snapshot] = now_ns

    def packages(self, snapshot: str) -> Packages:
        """Return the packages of an environment, from a cache of recent results if possible.

        Raises:
            EnvironmentMissing: the snapshot does not exist.
            EnvironmentCorrupt: the store contains other data under this address.
            EnvironmentRejected: the snapshot breaks the rules.
        """
        known = self._packages.get(snapshot)
        if known is None:
            self.need(snapshot)
            with self._checks:  # Decoding a large snapshot takes several hundred MB of memory.
                known = packages_of(StoreBlobs(self._store, clock=self._clock).read_snapshot(snapshot))
            if len(self._packages) >= _PACKAGES_MAX:
                self._packages.clear()
            self._packages[snapshot] = known
        return known

    def contents(self, snapshot: str) -> EnvironmentContents:
        """Return the units of an environment, from a cache of recent results if possible.

        Raises the same errors as `packages`.
        """
        known = self._contents.get(snapshot)
        if known is None:
            self.need(snapshot)
            with self._checks:
                known = contents_of(StoreBlobs(self._store, clock=self._clock).read_snapshot(snapshot))
            if len(self._contents) >= _PACKAGES_MAX:
                self._contents.clear()
            self._contents[snapshot] = known
        return known

    def snapshot(self, address: str) -> Snapshot:
        """Read a snapshot, and raise the errors of `packages`."""
        with self._checks:
            return self.documents().read_snapshot(address)

    def documents(self) -> StoreBlobs:
        """Return a reader of the store's snapshots and units."""
        return StoreBlobs(self._store, clock=self._clock)

    def collect(self, in_use: Collection[str]) -> CollectionResult:
        """Condemn objects that no snapshot needs, and delete objects whose grace period has ended."""
        done = collect(StoreBlobs(self._store, clock=self._clock), in_use=in_use)
        self._seen.clear()
        if self._nearby is not None:
            self._nearby.forget_documents()
        return done

    def tend(self) -> None:
        """Delete cached copies of bucket objects if the server's disk is nearly full."""
        if self._nearby is not None:
            self._nearby.tend()

    def _piece(self, key: str, start: int, length: int | None) -> bytes:
        wanted = PIECE_BYTES if length is None else min(length, PIECE_BYTES)
        try:
            return self._store.get(key, start, wanted)
        except KeyError:
            raise NotFound(f"{key[:80]} is not on the server") from None

    def _pieces(self, piece: bytes, key: str, start: int, length: int | None) -> Iterator[bytes]:
        yield piece
        while len(piece) == PIECE_BYTES and length != PIECE_BYTES:
            start, length = start + PIECE_BYTES, None if length is None else length - PIECE_BYTES
            piece = self._piece(key, start, length)
            if piece:
                yield piece

    def _checked(self, key: str, data: bytes | memoryview) -> bytes | memoryview | None:
        """Verify an object.

        Verify an object. Return the bytes to store, or None if the store already has the object.
        """
        if key.startswith("units/"):
            self._check_unit(key, data)
            return None if self._has_another(key, data) else data
        self._judge(key, data)
        return self._first(key, data) if key.startswith("snapshots/") else data

    def _check_unit(self, key: str, data: bytes | memoryview) -> None:
        """Verify a new unit and the content of its packs."""
        unit = self._unit(key, data)
        self._need_packs(unit)
        try:
            self._content.check(data, lambda: self._unit(key, data))
        except (ContentMismatch, EnvironmentCorrupt) as error:
            self._refuse_content(key, data, unit, str(error))

    def _refuse_content(self, key: str, data: bytes | memoryview, unit: Unit, why: str) -> NoReturn:
        """Delete altered packs from the store, and refuse a unit whose packs contain wrong data."""
        altered = [f"packs/{digest}" for digest in dict.fromkeys(unit.packs) if not self._is_pack(digest)]
        with contextlib.suppress(KeyError):
            if self._store.get(key) == data:  # An earlier server version has accepted the unit.
                self.delete((key,))
        if not altered:
            raise EnvironmentRejected(
                f"unit {unit.address[:12]} cannot be stored: {why}",
                hint="capture the environment again, with `sgpu env capture`",
            )
        self.delete(altered)
        raise EnvironmentMissing(
            f"unit {unit.address[:12]} cannot be stored: {len(altered)} of its packs were altered in the store",
            hint="capture the environment again. If the error recurs, check the disk of the store",
        )

    def _is_pack(self, digest: str) -> bool:
        try:
            pack_of(self._store.get(f"packs/{digest}"), digest)
        except (KeyError, AlteredObject):
            return False
        return True

    def _unit(self, key: str, data: bytes | memoryview) -> Unit:
        with self._checks:
            return unit_of(bytes(data), key.partition("/")[2])

    def _read_pack(self, digest: str, length: int) -> bytes:
        key = f"packs/{digest}"
        try:
            if self._nearby is not None:  # Read the pack through the cache, because nodes will need the same pack.
                return b"".join(self._nearby.read(key, 0, length))
            return self._store.get(key, 0, length)
        except KeyError:
            raise ContentMismatch(f"pack {digest[:12]} no longer exists in the store") from None

    def _first(self, key: str, data: bytes | memoryview) -> bytes | memoryview:
        """Return the bytes of the snapshot to store. Storing an existing snapshot again resets its age."""
        with self._checks:
            address = key.partition("/")[2]
            try:
                there = self._store.get(key)
                snapshot_of(there, address)
            except (KeyError, AlteredObject, EnvironmentRejected):
                self._check_members(snapshot_of(bytes(data), address))
                return data
            return there

    def _check_members(self, snapshot: Snapshot) -> None:
        """Compare the sizes in a version 1 snapshot, which its address does not cover, with its units."""
        if snapshot.version > 1:
            return
        documents = StoreBlobs(self._store, clock=self._clock)
        for member in (member for root in snapshot.roots for member in root.members):
            content = [row.size for row in documents.read_unit(member.address).rows if row.has_content]
            if (member.size, member.files) != (sum(content), len(content)):
                raise EnvironmentRejected(
                    f"snapshot {snapshot.address[:12]}: unit {member.address[:12]} holds {sum(content)} bytes in "
                    f"{len(content)} files, and the snapshot lists {member.size} in {member.files}",
                    hint="capture the environment again with a current version of serverless-gpu",
                )

    def _judge(self, key: str, data: bytes | memoryview) -> None:
        """Verify that an object's bytes match its key."""
        kind, _, name = key.partition("/")
        if kind == "packs":
            pack_of(data, name)
        elif kind in ("snapshots", "units"):
            with self._checks:
                (snapshot_of if kind == "snapshots" else unit_of)(bytes(data), name)

    def _need_packs(self, unit: Unit) -> None:
        keys = frozenset(f"packs/{digest}" for digest in unit.packs)
        missing = keys - self._store.present(keys)
        if missing:
            raise EnvironmentMissing(
                f"unit {unit.address[:12]} cannot be stored: {len(missing)} of its packs are missing",
                hint="capture the environment again",
            )

    def _has_another(self, key: str, data: bytes | memoryview) -> bool:
        """Return True if the store keeps another verified version of the unit."""
        try:
            there = self._store.get(key)
            if there == data:
                return False
            self._need_packs(self._unit(key, there))
            self._content.check(there, lambda: self._unit(key, there))
            return all(sentence.key != key for sentence in read_condemned(self._store).entries)
        except StoreUnavailable:
            raise
        except (KeyError, AlteredObject, ContentMismatch, EnvironmentProblem):
            return False


class ContentChecks:
    """Verifies units against the packs in one store. Thread-safe."""

    def __init__(self, read: ReadPack) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._known: OrderedDict[str, None] = OrderedDict()  # Digests of verified units and snapshots.
        self._small = threading.Semaphore(SMALL_AT_ONCE)
        self._large = threading.Semaphore(LARGE_AT_ONCE)

    def check(self, data: bytes | memoryview, decode: Callable[[], Unit]) -> None:
        """Verify the content of a unit that the server has not verified yet.

        Args:
            data: the unit's document.
            decode: returns the unit. Called again for a large unit, which is not kept in memory while the check waits.
        """
        digest = blake3(data).hexdigest()
        if self._is_known(digest):
            return
        unit: Unit | None = decode()
        assert unit is not None
        is_large = len(unit.rows) > LARGE_ROWS or sum(row.size for row in unit.rows) > LARGE_BYTES
        if is_large:
            unit = None
        with self._turn(self._large if is_large else self._small):
            if not self._is_known(digest):
                check_content(unit or decode(), self._read)
                with self._lock:
                    self._known[digest] = None
                    while len(self._known) > _KNOWN_MAX:
                        self._known.popitem(last=False)

    def compare(self, unit: Unit, read: ReadPack) -> None:
        """Verify a unit by reading its packs again, even after an earlier verification."""
        with self._turn(self._large):
            check_content(unit, read)

    def _is_known(self, digest: str) -> bool:
        with self._lock:
            if digest not in self._known:
                return False
            self._known.move_to_end(digest)
            return True

    @contextlib.contextmanager
    def _turn(self, turns: threading.Semaphore) -> Iterator[None]:
        if not turns.acquire(timeout=WAIT_S):
            raise StoreUnavailable(
                f"the unit has waited for {WAIT_S:.0f} s, because the server is busy with other units",
                hint="wait until the client has sent the unit again, because the verification takes a few seconds",
            )
        try:
            yield
        finally:
            turns.release()


def _is_snapshot(documents: StoreBlobs, key: str) -> bool:
    try:
        documents.read_snapshot(key.partition("/")[2])
    except EnvironmentCorrupt:
        return False
    except EnvironmentMissing:
        pass
    return True
