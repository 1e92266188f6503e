"""Routes of `wire/blobs.py` about the objects of captured environments: `own` reaches them by key, `all` lists them.

A key is a capability. Only operators are shown keys: the lists, and what garbage collection noted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Annotated

import msgspec
from starlette.responses import Response, StreamingResponse

from serverless_gpu.environment.stores.base import OBJECT_BYTES_MAX
from serverless_gpu.errors import NotAllowed, TooLarge
from serverless_gpu.server.http.routing import BYTES, Bytes, Call, Incoming, Query, Routes, reading, writing
from serverless_gpu.server.storage.environment_store import PIECE_BYTES, Environments
from serverless_gpu.server.storage.upload_spool import Spool
from serverless_gpu.wire.blobs import NAMES_MAX, CondemnedAnswer, Free, KeyList, StoredList, StoredView

routes = Routes("environments")

_COLLECTING = "gc/"
_ALL = "all"


class RangeQuery(Query, frozen=True, kw_only=True):
    """Which bytes of an object."""

    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    length: Annotated[int, msgspec.Meta(ge=0, le=OBJECT_BYTES_MAX)] | None = None


@routes.get("/environments/objects/{key:path}", needs=reading("environments"))
async def read_object(call: Call, environments: Environments, spool: Spool, key: str, query: RangeQuery) -> Response:
    """Return an object, or a range of it: fewer bytes where it ends before."""
    if key.startswith(_COLLECTING):
        _check_reach(call)
    pieces = await spool.in_thread(lambda: environments.read(key, query.start, query.length))
    first = next(pieces)
    if len(first) < PIECE_BYTES:
        return Bytes(first)
    return StreamingResponse(_following(first, pieces, spool), media_type=BYTES)


@routes.put("/environments/objects/{key:path}", needs=writing("environments"), limit=OBJECT_BYTES_MAX)
async def put_object(call: Call, environments: Environments, spool: Spool, key: str, body: Incoming) -> None:
    """Store an object that is what its key says."""
    may_manage = call.reach == _ALL
    await spool.in_thread(lambda: environments.check_room(body.size or 0))
    async with spool.whole(body, body.size) as data:
        await spool.in_thread(lambda: environments.put(key, data, may_manage=may_manage))


@routes.post("/environments/present", needs=reading("environments"))
async def present_objects(call: Call, environments: Environments, spool: Spool, body: KeyList) -> KeyList:
    """Say which objects are there."""
    _check_count(body)
    there = await spool.in_thread(lambda: environments.present(body.keys))
    return KeyList(keys=tuple(key for key in body.keys if key in there))


@routes.post("/environments/repair", needs=reading("environments"))
async def repair_objects(call: Call, environments: Environments, spool: Spool, body: KeyList) -> KeyList:
    """Check snapshots and units, content included; remove what no restore can use, and say what that was."""
    _check_count(body)
    removed = await spool.in_thread(lambda: environments.repair(body.keys))
    return KeyList(keys=removed)


@routes.post("/environments/condemned", needs=reading("environments"))
async def condemned_objects(call: Call, environments: Environments, spool: Spool, body: KeyList) -> CondemnedAnswer:
    """Say which objects garbage collection has condemned, and whether a collection is at work."""
    _check_count(body)
    keys, collecting = await spool.in_thread(lambda: environments.condemned(body.keys))
    return CondemnedAnswer(keys=tuple(key for key in body.keys if key in keys), collecting=collecting)


@routes.get("/environments/list/{prefix}", needs=reading("environments"))
async def list_objects(call: Call, environments: Environments, spool: Spool, prefix: str) -> StoredList:
    """Return all objects of a kind."""
    _check_reach(call)
    stored = await spool.in_thread(lambda: tuple(environments.list(prefix)))
    return StoredList(objects=tuple(StoredView(key=one.key, size=one.size, put_ns=one.put_ns) for one in stored))


@routes.post("/environments/delete", needs=writing("environments"))
async def delete_objects(call: Call, environments: Environments, spool: Spool, body: KeyList) -> None:
    """Remove objects."""
    _check_reach(call)
    _check_count(body)
    await spool.in_thread(lambda: environments.delete(body.keys))


@routes.get("/environments/free", needs=reading("environments"))
async def free_space(call: Call, environments: Environments, spool: Spool) -> Free:
    """Say how much more fits."""
    return Free(bytes=await spool.in_thread(environments.free_bytes))


async def _following(first: bytes, pieces: Iterator[bytes], spool: Spool) -> AsyncIterator[bytes]:
    piece: bytes | None = first
    while piece is not None:
        yield piece
        piece = await spool.in_thread(lambda: next(pieces, None))


def _check_reach(call: Call) -> None:
    if call.reach != _ALL:
        raise NotAllowed(
            "environments are listed and removed by operators",
            hint="ask one, or an administrator; if this is a capture, upgrade serverless-gpu on this machine",
        )


def _check_count(body: KeyList) -> None:
    if len(body.keys) > NAMES_MAX:
        raise TooLarge(f"{len(body.keys)} keys at once", hint=f"name {NAMES_MAX} at most")
