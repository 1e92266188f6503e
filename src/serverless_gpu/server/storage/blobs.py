"""Stores parts of large payloads and outputs by digest.

    client, node ── missing(digests) ─▶ digests of missing parts ── put(digest, bytes) ─▶ store, under packs/<digest>
    run, file    ── BlobReference(size, parts) ─▶ read, part by part

Blobs use the same kind of store as environments, at a separate location. A blob part exists completely or not at all. A
blob part is durable when `put` returns. The server compares every part with its digest before each write and after each
read.

`collect` deletes unreferenced parts in two steps, separated by a grace period. First, `collect` condemns a part. After
the grace period, `collect` deletes a part that is still condemned. A query for a part, or another `put`, removes the
part from the list of condemned parts. After the query or the `put`, the caller has at least one grace period to create
a reference to the part. A restarted server condemns parts again, because the list of condemned parts exists only in
memory.

Failure cases:

* If bytes do not match their digest, callers receive HashMismatch.

* If the disk is full, callers receive ServerStorageFull.

* If the store does not answer, callers receive StoreUnavailable after the retries of the store.

* If a part is missing or altered in the store, callers receive NotFound and must send the part again.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec
from blake3 import blake3

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.environment.stores.base import Store
from serverless_gpu.errors import EnvironmentProblem, HashMismatch, InvalidValue, NotFound, StorageError, TooLarge
from serverless_gpu.model.spec import BLOB_PART_BYTES, BlobReference
from serverless_gpu.server.core.disk_space import KEPT_FREE_BYTES, check_room, storage_full
from serverless_gpu.server.core.health import Unwell
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import ATTEMPT, Bytes, Call, Incoming, Routes, writing
from serverless_gpu.server.records import runs
from serverless_gpu.server.records.files import StoredFile
from serverless_gpu.server.storage.upload_spool import UploadSpool
from serverless_gpu.wire.blobs import NAMES_MAX, DigestList

GRACE_S = 24 * 3600
"""Seconds for which an unreferenced part may exist."""
SIZE_MAX = 64 << 30
"""Maximum size of a blob in bytes. Results have a lower limit."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DELETE_AT_ONCE = 100


routes = Routes("blobs")


class BlobCollection(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a garbage collection: numbers of kept, condemned and deleted parts, and the deleted bytes."""

    kept: int
    condemned: int
    deleted: int
    deleted_bytes: int


class Blobs:
    """Stores blob parts in a store. Thread-safe."""

    def __init__(self, store: Store, *, clock: Clock, kept_free_bytes: int = KEPT_FREE_BYTES) -> None:
        self._store = store
        self._clock = clock
        self._kept_free_bytes = kept_free_bytes
        self._changed = threading.Condition()
        self._condemned: dict[str, int] = {}  # Boottime of the condemnation, by key of the part.
        self._deleting: frozenset[str] = frozenset()

    def missing(self, digests: Collection[str]) -> tuple[str, ...]:
        """Return the digests of missing parts, and protect existing parts for at least one grace period."""
        keys = {_key(digest): digest for digest in digests}
        with self._changed:
            look = [key for key in keys if key not in self._deleting]
            self._pardon(look)
        there = self._store.present(look) if look else frozenset()
        return tuple(digest for key, digest in keys.items() if key not in there)

    def check_room(self, size: int) -> None:
        """Raise an error if the blob store cannot hold `size` more bytes."""
        check_room(size, self._store.free_bytes(), kept_free_bytes=self._kept_free_bytes)

    def put(self, digest: str, data: bytes | memoryview) -> None:
        """Store a blob part durably, even if the store already contains the part."""
        key = _key(digest)
        if blake3(data).hexdigest() != digest:
            raise HashMismatch(
                f"{len(data)} bytes arrived for part {digest[:12]}, which do not match this digest",
                hint="send the part again. If the error recurs, check the network between client and server for "
                "a device that alters data",
            )
        self.check_room(len(data))
        with self._changed:
            self._changed.wait_for(lambda: key not in self._deleting)
            self._pardon([key])
        try:
            self._store.put({key: data})
        except StorageError as error:
            raise storage_full(error.message) from error
        faults.reach("after_part_before_answer")

    def try_store(self) -> str:
        """Test the store with a write, a read and a deletion. Return a description of the problem, or ""."""
        data = b"serverless-gpu looks whether it can store anything: " + secrets.token_bytes(16)
        key = _key(blake3(data).hexdigest())
        try:
            self._store.put({key: data})
            is_same = self._store.get(key) == data
            self._store.delete((key,))
        except (EnvironmentProblem, StorageError, KeyError) as error:
            raise Unwell("takes nothing" if isinstance(error, StorageError) else "does not answer") from error
        return "" if is_same else "the store returned wrong data for a test object"

    def get(self, digest: str) -> bytes:
        """Return a part."""
        try:
            data = self._store.get(_key(digest))
        except KeyError:
            raise NotFound(f"part {digest[:12]} is not on the server", hint="send the part again") from None
        if blake3(data).hexdigest() != digest:
            raise NotFound(
                f"part {digest[:12]} was altered in the server's store", hint="check the disk of the server's store"
            )
        return data

    def read(self, reference: BlobReference, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Yield the bytes of a blob or of a byte range, at most one part at a time."""
        check_reference(reference)
        if start < 0 or (length is not None and length < 0):
            raise InvalidValue(f"{length} bytes from byte {start} are not a valid range")
        end = reference.size if length is None else min(reference.size, start + length)
        for number in range(start // BLOB_PART_BYTES, len(reference.parts)):
            first = number * BLOB_PART_BYTES
            if first >= end:
                return
            part = self.get(reference.parts[number])
            if len(part) != min(BLOB_PART_BYTES, reference.size - first):
                raise NotFound(f"part {number} of the blob has {len(part)} bytes and does not match the blob's size")
            yield part[max(0, start - first) : end - first]

    def collect(self, in_use: Callable[[], Collection[str]], *, grace_s: float = GRACE_S) -> BlobCollection:
        """Condemn and delete unreferenced parts. Only one collection may run at a time.

        Args:
            in_use: returns the digests to which runs and files refer. Called once, after `collect` has listed the
                store.
            grace_s: minimum age of a part, and minimum time between condemnation and deletion, in seconds.
        """
        listed = {stored.key: stored for stored in self._store.list("packs")}
        needed = {f"packs/{digest}" for digest in in_use()}
        now_ns, wall_ns, grace_ns = self._clock.boottime_ns(), self._clock.wall_ns(), round(grace_s * 1e9)
        idle = {key for key, stored in listed.items() if key not in needed and wall_ns - stored.put_ns >= grace_ns}
        with self._changed:
            doomed = [key for key in idle if now_ns - self._condemned.get(key, now_ns) >= max(grace_ns, 1)]
            self._condemned = {key: self._condemned.get(key, now_ns) for key in idle}
        deleted: list[str] = []
        for first in range(0, len(doomed), _DELETE_AT_ONCE):
            deleted += self._delete(doomed[first : first + _DELETE_AT_ONCE])
        return BlobCollection(
            kept=len(listed) - len(idle),
            condemned=len(idle) - len(deleted),
            deleted=len(deleted),
            deleted_bytes=sum(listed[key].size for key in deleted),
        )

    def _pardon(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._condemned.pop(key, None)

    def _delete(self, keys: Sequence[str]) -> Sequence[str]:
        """Delete parts that are still condemned. A concurrent `put` of a condemned part waits."""
        with self._changed:
            self._deleting = frozenset(key for key in keys if self._condemned.pop(key, None) is not None)
            doomed = tuple(self._deleting)
        try:
            self._store.delete(doomed)
            faults.reach("after_parts_are_deleted")
        finally:
            with self._changed:
                self._deleting = frozenset()
                self._changed.notify_all()
        return doomed


def check_reference(reference: BlobReference) -> None:
    """Refuse an invalid blob reference."""
    if not 0 <= reference.size <= SIZE_MAX:
        raise InvalidValue(f"a blob of {reference.size} bytes is over the limit of {SIZE_MAX}")
    if len(reference.parts) != -(-reference.size // BLOB_PART_BYTES):
        raise InvalidValue(f"a blob of {reference.size} bytes cannot have {len(reference.parts)} parts")
    for digest in reference.parts:
        _key(digest)


def _key(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise InvalidValue(
            f"{digest[:80]!r} is not a digest", hint="use 64 hexadecimal digits: BLAKE3 of the part's bytes"
        )
    return f"packs/{digest}"


def file_source(blobs: Blobs, file: StoredFile) -> Callable[[int, int], Iterator[bytes]]:
    """Return a function that yields a byte range of a file and may block."""
    inline = file.inline
    if inline is not None:
        return lambda start, length: iter([inline[start : start + length]])
    blob = BlobReference(size=file.size, parts=file.parts)
    return lambda start, length: blobs.read(blob, start, length)


@routes.post("/blobs/missing", needs=writing("blobs", attempts=True))
async def missing_parts(call: Call, blobs: Blobs, spool: UploadSpool, body: DigestList) -> DigestList:
    """Return the digests of the parts that the client must upload."""
    if len(body.digests) > NAMES_MAX:
        raise TooLarge(
            f"a request with {len(body.digests)} digests is too large", hint=f"request at most {NAMES_MAX} digests"
        )
    return DigestList(digests=await spool.in_thread(lambda: blobs.missing(body.digests)))


@routes.put("/blobs/{digest}", needs=writing("blobs", attempts=True), limit=BLOB_PART_BYTES)
async def put_part(call: Call, blobs: Blobs, spool: UploadSpool, digest: str, body: Incoming) -> None:
    """Store a part."""
    await spool.in_thread(lambda: blobs.check_room(body.size or 0))
    async with spool.whole(body, body.size) as data:
        await spool.in_thread(lambda: blobs.put(digest, data))


@routes.get("/attempts/{run}/{fence}/blobs/{digest}", needs=ATTEMPT)
async def payload_part(
    call: Call, database: Transactions, blobs: Blobs, spool: UploadSpool, run: str, fence: int, digest: str
) -> Bytes:
    """Return a blob part of the attempt's payload."""
    payload = await call.in_thread(lambda: database.read(lambda connection: runs.payload_of(connection, run)))
    if payload is None or digest not in payload.parts:
        raise NotFound(f"{digest[:80]!r} is not a part of the payload of run {run} (attempt {fence})")
    return Bytes(await spool.in_thread(lambda: blobs.get(digest)))
