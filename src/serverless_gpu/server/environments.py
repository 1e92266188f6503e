"""Collects garbage in the object stores, and serves captured environments.

    10 minutes after the start, then every six hours:   parts of payloads and outputs  ─▶ blobs.collect
                                                        captured environments          ─▶ environments.collect

A store first condemns an unused object and deletes the object in a later collection (`blobs.py`,
`environment/stores/collection.py`). The garbage collector reads the object references of runs only after the store has
listed its objects. Requests never wait for a collection, because the collector keeps young and recently requested
objects. The collector also keeps snapshots that a run used within the last month.

Callers with the reach `own` can use any known key, because an object's key is a capability. Only operators (reach
`all`) can list keys or read collection records.

Failure cases:
* A store does not answer. The garbage collector logs the failure and retries six hours later.
* Another server's collection runs in the same store. The garbage collector skips its own collection.
* The server stops during a collection. The next collection finishes the deletions.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated

import msgspec
from starlette.responses import Response, StreamingResponse

from serverless_gpu.ambient import Clock
from serverless_gpu.environment.stores.base import OBJECT_BYTES_MAX
from serverless_gpu.environment.stores.collection import KEEP_S
from serverless_gpu.errors import EnvironmentProblem, NotAllowed, ServerProblem, StorageError, TooLarge
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import BYTES, Bytes, Call, Incoming, Query, Routes, reading, writing
from serverless_gpu.server.records import runs
from serverless_gpu.server.storage.blobs import GRACE_S, Blobs
from serverless_gpu.server.storage.environment_store import PIECE_BYTES, EnvironmentStore
from serverless_gpu.server.storage.upload_spool import UploadSpool
from serverless_gpu.units import format_bytes
from serverless_gpu.wire.blobs import NAMES_MAX, CondemnedAnswer, Free, KeyList, StoredList, StoredView

FIRST_S = 600.0
"""Delay in seconds before the first collection after the server's start."""
EVERY_S = 6 * 3600.0
_log = logging.getLogger(__name__)


class GarbageCollector:
    """Removes unreferenced parts and environments."""

    def __init__(self, *, clock: Clock, database: Transactions, blobs: Blobs, environments: EnvironmentStore) -> None:
        self._clock = clock
        self._database = database
        self._blobs = blobs
        self._environments = environments
        self._due_ns = clock.boottime_ns() + round(FIRST_S * 1e9)

    def tick(self, now_ns: int) -> int | None:
        """Run a due garbage collection, and return the next collection's due time."""
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + round(EVERY_S * 1e9)
            for name, collect in (("parts", self._collect_parts), ("environments", self._collect_environments)):
                self._safely(name, collect)
        return self._due_ns

    def _safely(self, name: str, collect: Callable[[], str]) -> None:
        try:
            done = collect()
        except (EnvironmentProblem, ServerProblem, StorageError) as error:
            _log.warning("the garbage collection of %s failed: %s", name, error.message)
        else:
            _log.info("%s collected: %s", name, done)

    def _collect_parts(self) -> str:
        done = self._blobs.collect(lambda: self._database.read(runs.parts_in_use), grace_s=GRACE_S)
        freed = format_bytes(done.deleted_bytes)
        return f"{done.kept} kept, {done.condemned} condemned, {done.deleted} deleted ({freed})"

    def _collect_environments(self) -> str:
        since_ns = self._clock.wall_ns() - KEEP_S * 10**9
        in_use = self._database.read(lambda connection: runs.snapshots_in_use(connection, since_ns=since_ns))
        done = self._environments.collect(in_use)
        if done.busy:
            return "the server skipped this collection because another collection is running"
        kept, condemned, deleted = (format_bytes(part.bytes) for part in (done.kept, done.condemned, done.deleted))
        return f"{kept} kept, {condemned} condemned, {deleted} deleted"


routes = Routes("environments")

_COLLECTING = "gc/"
_ALL = "all"


class RangeQuery(Query, frozen=True, kw_only=True):
    """Requested byte range of an object."""

    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    length: Annotated[int, msgspec.Meta(ge=0, le=OBJECT_BYTES_MAX)] | None = None


@routes.get("/environments/objects/{key:path}", needs=reading("environments"))
async def read_object(
    call: Call, environments: EnvironmentStore, spool: UploadSpool, key: str, query: RangeQuery
) -> Response:
    """Return an object or a byte range of the object."""
    if key.startswith(_COLLECTING):
        _check_reach(call)
    pieces = await spool.in_thread(lambda: environments.read(key, query.start, query.length))
    first = next(pieces)
    if len(first) < PIECE_BYTES:
        return Bytes(first)
    return StreamingResponse(_following(first, pieces, spool), media_type=BYTES)


@routes.put("/environments/objects/{key:path}", needs=writing("environments"), limit=OBJECT_BYTES_MAX)
async def put_object(call: Call, environments: EnvironmentStore, spool: UploadSpool, key: str, body: Incoming) -> None:
    """Store an object whose content matches its key."""
    may_manage = call.reach == _ALL
    await spool.in_thread(lambda: environments.check_room(body.size or 0))
    async with spool.whole(body, body.size) as data:
        await spool.in_thread(lambda: environments.put(key, data, may_manage=may_manage))


@routes.post("/environments/present", needs=reading("environments"))
async def present_objects(call: Call, environments: EnvironmentStore, spool: UploadSpool, body: KeyList) -> KeyList:
    """Return the requested keys that exist in the store."""
    _check_count(body)
    there = await spool.in_thread(lambda: environments.present(body.keys))
    return KeyList(keys=tuple(key for key in body.keys if key in there))


@routes.post("/environments/repair", needs=reading("environments"))
async def repair_objects(call: Call, environments: EnvironmentStore, spool: UploadSpool, body: KeyList) -> KeyList:
    """Verify snapshots and units, remove damaged objects, and return the removed keys."""
    _check_count(body)
    removed = await spool.in_thread(lambda: environments.repair(body.keys))
    return KeyList(keys=removed)


@routes.post("/environments/condemned", needs=reading("environments"))
async def condemned_objects(
    call: Call, environments: EnvironmentStore, spool: UploadSpool, body: KeyList
) -> CondemnedAnswer:
    """Return the condemned keys among the requested keys, and True during a collection."""
    _check_count(body)
    keys, collecting = await spool.in_thread(lambda: environments.condemned(body.keys))
    return CondemnedAnswer(keys=tuple(key for key in body.keys if key in keys), collecting=collecting)


@routes.get("/environments/list/{prefix}", needs=reading("environments"))
async def list_objects(call: Call, environments: EnvironmentStore, spool: UploadSpool, prefix: str) -> StoredList:
    """Return all objects of one kind."""
    _check_reach(call)
    stored = await spool.in_thread(lambda: tuple(environments.list(prefix)))
    return StoredList(objects=tuple(StoredView(key=one.key, size=one.size, put_ns=one.put_ns) for one in stored))


@routes.post("/environments/delete", needs=writing("environments"))
async def delete_objects(call: Call, environments: EnvironmentStore, spool: UploadSpool, body: KeyList) -> None:
    """Delete objects."""
    _check_reach(call)
    _check_count(body)
    await spool.in_thread(lambda: environments.delete(body.keys))


@routes.get("/environments/free", needs=reading("environments"))
async def free_space(call: Call, environments: EnvironmentStore, spool: UploadSpool) -> Free:
    """Return the free bytes of the environment store."""
    return Free(bytes=await spool.in_thread(environments.free_bytes))


async def _following(first: bytes, pieces: Iterator[bytes], spool: UploadSpool) -> AsyncIterator[bytes]:
    piece: bytes | None = first
    while piece is not None:
        yield piece
        piece = await spool.in_thread(lambda: next(pieces, None))


def _check_reach(call: Call) -> None:
    if call.reach != _ALL:
        raise NotAllowed(
            "only operators can list and remove environments",
            hint="ask an operator or administrator. After a failed capture, upgrade serverless-gpu on this machine",
        )


def _check_count(body: KeyList) -> None:
    if len(body.keys) > NAMES_MAX:
        raise TooLarge(f"a request with {len(body.keys)} keys is too large", hint=f"request at most {NAMES_MAX} keys")
