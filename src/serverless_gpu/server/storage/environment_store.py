"""Environment store: captured environments for clients and nodes, with the server's own checks.

    client's helper ── present, put ─▶ checked against its name, and the rules ─▶ store (a directory, or a bucket)
    node's agent    ◀── get, in pieces ── copies on this disk (`object_cache.py`) ◀── a bucket, once for all who ask ─┘

Nothing comes in that no restore could use: a pack is what its digest says, a unit or snapshot has its address and
breaks no rule, and a unit's packs are there before it and hold what its rows say (`ContentChecks`). A unit's
address says nothing about the packs it points into. So the server verifies a unit before it stores it, keeps the one it
has only when that one is verified too, and replaces one that is not. Of snapshots with one address the first stays:
later ones differ in nothing that matters. What garbage collection notes in the store (`gc/…`) is written by operators,
and by the server itself.

Each unit is verified once, a few at a time, never on the event loop:

    a unit arrives ─ verified already? done
                   ├ small ─ one of SMALL_AT_ONCE turns ─┐
                   └ large ─ one of LARGE_AT_ONCE turns ─┴─▶ read its packs, compare every file with its row

A large unit takes seconds of one core, so large units wait for each other and small ones pass them. A client whose
request ends before that asks again; the second request finds the answer of the first.

A store of an earlier version may hold units that were never verified. They stay usable: a node verifies every byte as
it restores, and asks for `repair` when something is wrong.

Failure cases: altered on the way (HashMismatch; send it again), against the rules (EnvironmentRejected), no room
(ServerStorageFull), a store that does not answer (StoreUnavailable, after trying for as long as a store does), packs
that hold something else than a unit's rows say (`ContentMismatch`), no turn within WAIT_S (StoreUnavailable; ask
again).
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
from serverless_gpu.environment.documents import Packages, Snapshot, Unit, packages_of
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
"""Above this content, or so many rows, a unit is large: it takes a good part of a second, or of a hundred MB."""
WAIT_S = 10.0
_KNOWN_MAX = 50_000


PIECE_BYTES = COPIED_BYTES
"""What is read of a store at once, so that no whole object is in memory."""
CHECKS_AT_ONCE = 2
"""Documents that are decoded at the same time; a large one takes some hundred MB."""
SEEN_S = 600
"""How long the server takes for granted that a snapshot which was there still is."""
REPAIRED_S = 600
"""How long the server does not look again at a unit that `repair` found whole."""
REPAIR_WAIT_S = 10.0
_SEEN_MAX = 10_000
_PACKAGES_MAX = 64
_NOTHING = f"snapshots/{'0' * 64}"


class EnvironmentStore:
    """The store of environments; safe to use from several threads.

    Args:
        store: where they lie.
        clock: how long ago something was looked at.
        kept_free_bytes: what is left on the store's disk.
        nearby: directory for copies of what nodes read, and the bytes these may take; None for a store that is a disk
            itself.
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
        self._seen: dict[str, int] = {}  # snapshot → boottime
        self._packages: dict[str, Packages] = {}
        self._content = ContentChecks(self._read_pack)
        self._repairs = threading.Semaphore(1)
        self._whole: dict[str, int] = {}  # unit → boottime of the repair that found it whole

    def read(self, key: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Yield an object, or a range of it, in pieces; the first one is read at once.

        Raises:
            NotFound: there is no such object.
            EnvironmentCorrupt: a bucket has something else under that name, also when it was asked again.
            EnvironmentRejected: it is no key, or no range.
        """
        if self._nearby is not None and not key.startswith("gc/"):
            try:
                return self._nearby.read(key, start, length)
            except KeyError:
                self._nearby.forget_documents()  # what names a pack that is gone may have been put again meanwhile
                raise NotFound(f"{key[:80]} is not on the server") from None
        first = self._piece(key, start, length)
        return self._pieces(first, key, start, length)

    def put(self, key: str, data: bytes | memoryview, *, may_manage: bool = False) -> None:
        """Store an object, durably.

        Args:
            key: which.
            data: its bytes.
            may_manage: whether the sender may write what garbage collection notes.

        Raises:
            NotAllowed: it is such a note, and they may not.
            HashMismatch: it is not what its key says.
            EnvironmentMissing: it is a unit, and a pack it points into is not there, or was altered and is removed now.
            EnvironmentRejected: it is no key, the object breaks the rules, or packs hold something else than a unit's
                rows say.
            StoreUnavailable: too many units are being verified.
            ServerStorageFull: there is no room.
        """
        if check_key(key).startswith("gc/") and not may_manage:
            raise NotAllowed(f"{key} is written by operators, and by the server itself")
        self.check_room(len(data))
        try:
            wanted = self._checked(key, data)
        except AlteredObject as error:
            raise HashMismatch(
                f"{key[:80]} arrived altered: {error}",
                hint="send it again; when that happens often, something on the way alters or cuts what is sent",
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
            self._nearby.keep(key, wanted)  # read next to verify its unit, and then by nodes

    def try_store(self) -> str:
        """Ask the store for something; return ""."""
        try:
            self._store.present((_NOTHING,))
        except (EnvironmentProblem, StorageError) as error:
            raise Unwell("do not answer") from error
        return ""

    def check_room(self, size: int) -> None:
        """Refuse so many bytes if they do not fit."""
        check_room(size, self._store.free_bytes(), kept_free_bytes=self._kept_free_bytes)

    def present(self, keys: Collection[str]) -> frozenset[str]:
        """Return which of these objects are there."""
        return self._store.present(keys)

    def condemned(self, keys: Collection[str]) -> tuple[frozenset[str], bool]:
        """Return which of these objects are condemned, and whether a collection may be deleting at this moment."""
        documents = StoreBlobs(self._store, clock=self._clock)
        return documents.condemned(keys) if keys else frozenset(), documents.is_collecting()

    def list(self, prefix: str) -> Iterator[Stored]:
        """Return everything below `prefix/`."""
        return self._store.list(prefix)

    def delete(self, keys: Collection[str]) -> None:
        """Remove objects; those that are not there are no error."""
        self._seen.clear()
        try:
            self._store.delete(keys)
        finally:
            if self._nearby is not None:
                self._nearby.forget([key for key in keys if not key.startswith("gc/")])

    def repair(self, keys: Collection[str]) -> tuple[str, ...]:
        """Check snapshots and units, content included, and remove what no restore can use.

        Nothing is believed of whoever asks, so everybody who may restore may ask. What was found whole within the last
        `REPAIRED_S` is not read again.
        """
        now_ns = self._clock.boottime_ns()
        wanted = [
            key
            for key in map(check_key, keys)
            if now_ns - self._whole.get(key, -(REPAIRED_S * 10**9)) >= REPAIRED_S * 10**9
        ]
        documents = StoreBlobs(self._store, clock=self._clock)
        if not self._repairs.acquire(timeout=REPAIR_WAIT_S):
            raise StoreUnavailable("the server checks other units of its store", hint="ask again in a moment")
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
        """Return how much more can be put, or None where that is not known."""
        free = self._store.free_bytes()
        return None if free is None else max(0, free - self._kept_free_bytes)

    def need(self, snapshot: str) -> None:
        """Refuse a snapshot that is not there, so that its user hears of it before the run waits for devices."""
        now_ns = self._clock.boottime_ns()
        if now_ns - self._seen.get(snapshot, -(SEEN_S * 10**9)) < SEEN_S * 10**9:
            return
        key = f"snapshots/{snapshot}"
        if not self._store.present([key]):
            raise EnvironmentMissing(
                f"snapshot {snapshot[:12]} is not on the server", hint="it was removed: call again, and it is captured"
            )
        if len(self._seen) >= _SEEN_MAX:
            self._seen.clear()
        self._seen[snapshot] = now_ns

    def packages(self, snapshot: str) -> Packages:
        """Return what is installed in an environment; remembered for the last few.

        Raises:
            EnvironmentMissing: it is not there.
            EnvironmentCorrupt: what the store has is something else.
            EnvironmentRejected: it is not what a snapshot may be.
        """
        known = self._packages.get(snapshot)
        if known is None:
            self.need(snapshot)
            with self._checks:  # a large one takes some hundred MB while it is decoded
                known = packages_of(StoreBlobs(self._store, clock=self._clock).read_snapshot(snapshot))
            if len(self._packages) >= _PACKAGES_MAX:
                self._packages.clear()
            self._packages[snapshot] = known
        return known

    def collect(self, in_use: Collection[str]) -> CollectionResult:
        """Condemn what no snapshot needs, and delete what was condemned long enough ago."""
        done = collect(StoreBlobs(self._store, clock=self._clock), in_use=in_use)
        self._seen.clear()
        if self._nearby is not None:
            self._nearby.forget_documents()
        return done

    def tend(self) -> None:
        """Remove copies of a bucket's objects when this server's disk runs full."""
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
        """Check an object against its name and the rules; return what to store, None where the store has it already."""
        if key.startswith("units/"):
            self._check_unit(key, data)
            return None if self._has_another(key, data) else data
        self._judge(key, data)
        return self._first(key, data) if key.startswith("snapshots/") else data

    def _check_unit(self, key: str, data: bytes | memoryview) -> None:
        """Verify a unit that is to be stored, its content included."""
        unit = self._unit(key, data)
        self._need_packs(unit)
        try:
            self._content.check(data, lambda: self._unit(key, data))
        except (ContentMismatch, EnvironmentCorrupt) as error:
            self._refuse_content(key, data, unit, str(error))

    def _refuse_content(self, key: str, data: bytes | memoryview, unit: Unit, why: str) -> NoReturn:
        """Refuse a unit whose packs hold something else; packs that were altered in the store are removed first."""
        altered = [f"packs/{digest}" for digest in dict.fromkeys(unit.packs) if not self._is_pack(digest)]
        with contextlib.suppress(KeyError):
            if self._store.get(key) == data:  # an earlier version has let it in
                self.delete((key,))
        if not altered:
            raise EnvironmentRejected(
                f"unit {unit.address[:12]} cannot be stored: {why}",
                hint="capture the environment again, with `sgpu env capture`",
            )
        self.delete(altered)
        raise EnvironmentMissing(
            f"unit {unit.address[:12]} cannot be stored: {len(altered)} of its packs were altered where they lie",
            hint="they are removed: capture the environment again. If it comes back, look at the disk of the store",
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
            if self._nearby is not None:  # a node is going to read it as well
                return b"".join(self._nearby.read(key, 0, length))
            return self._store.get(key, 0, length)
        except KeyError:
            raise ContentMismatch(f"pack {digest[:12]} is not there any more") from None

    def _first(self, key: str, data: bytes | memoryview) -> bytes | memoryview:
        """Return the snapshot to store: the one that is there, to be put again so that its age counts from now."""
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
        """Compare the sizes of a snapshot of version 1 with its units: its address does not cover them."""
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
        """Compare an object with its name."""
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
                f"unit {unit.address[:12]} cannot be stored: {len(missing)} of its packs are not there",
                hint="capture the environment again",
            )

    def _has_another(self, key: str, data: bytes | memoryview) -> bool:
        """Return whether a unit is there, points at other packs, and is good: verified, and not about to be deleted."""
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
    """Checks of units against the packs of one store; safe to use from several threads."""

    def __init__(self, read: ReadPack) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._known: OrderedDict[str, None] = OrderedDict()  # digests of documents that were verified
        self._small = threading.Semaphore(SMALL_AT_ONCE)
        self._large = threading.Semaphore(LARGE_AT_ONCE)

    def check(self, data: bytes | memoryview, decode: Callable[[], Unit]) -> None:
        """Verify the content of a unit unless that has been done.

        Args:
            data: its document.
            decode: returns the unit; called again for a large one, which is not held in memory while it waits.
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
        """Verify a unit whatever is known of it, with packs that are read again."""
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
                f"the server verifies other units; this one has waited for {WAIT_S:.0f} s",
                hint="it is sent again by itself; a large environment takes the server a few seconds",
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
