"""Routes of `wire/blobs.py` about parts, and the one by which an attempt reads its payload."""

from __future__ import annotations

from serverless_gpu.errors import NotFound, TooLarge
from serverless_gpu.model.spec import BLOB_PART_BYTES
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import ATTEMPT, Bytes, Call, Incoming, Routes, writing
from serverless_gpu.server.records.runs import runs
from serverless_gpu.server.storage.blobs import Blobs
from serverless_gpu.server.storage.upload_spool import Spool
from serverless_gpu.wire.blobs import NAMES_MAX, DigestList

routes = Routes("blobs")


@routes.post("/blobs/missing", needs=writing("blobs", attempts=True))
async def missing_parts(call: Call, blobs: Blobs, spool: Spool, body: DigestList) -> DigestList:
    """Say which parts have to be sent."""
    if len(body.digests) > NAMES_MAX:
        raise TooLarge(f"{len(body.digests)} digests at once", hint=f"ask for {NAMES_MAX} at most")
    return DigestList(digests=await spool.in_thread(lambda: blobs.missing(body.digests)))


@routes.put("/blobs/{digest}", needs=writing("blobs", attempts=True), limit=BLOB_PART_BYTES)
async def put_part(call: Call, blobs: Blobs, spool: Spool, digest: str, body: Incoming) -> None:
    """Store a part."""
    await spool.in_thread(lambda: blobs.check_room(body.size or 0))
    async with spool.whole(body, body.size) as data:
        await spool.in_thread(lambda: blobs.put(digest, data))


@routes.get("/attempts/{run}/{fence}/blobs/{digest}", needs=ATTEMPT)
async def payload_part(
    call: Call, database: Transactions, blobs: Blobs, spool: Spool, run: str, fence: int, digest: str
) -> Bytes:
    """Return a part of what the attempt is to call."""
    payload = await call.in_thread(lambda: database.read(lambda connection: runs.payload_of(connection, run)))
    if payload is None or digest not in payload.parts:
        raise NotFound(f"{digest[:80]!r} is no part of the payload of run {run} (attempt {fence})")
    return Bytes(await spool.in_thread(lambda: blobs.get(digest)))
