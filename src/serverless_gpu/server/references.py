"""Query room of what runs refer to: parts of payloads and outputs, and snapshots. What nothing refers to may go."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serverless_gpu.model.spec import BlobReference, Function, RunSpec
from serverless_gpu.server.tables import files, runs

_AT_ONCE = 1000


class _Called(msgspec.Struct):
    """What is looked at of a spec's payload, of any kind."""

    call: BlobReference | None = None


class _Spec(msgspec.Struct):
    payload: _Called = msgspec.field(default_factory=_Called)


_spec = msgspec.json.Decoder(_Spec)
_parts = msgspec.json.Decoder(tuple[str, ...])


def payload_of(connection: Connection, run_id: str) -> BlobReference | None:
    """Return where the pickled call of a run is, or None when it is no blob, or there is no such run."""
    text = connection.execute(sa.select(runs.c.spec_json).where(runs.c.id == run_id)).scalar_one_or_none()
    if text is None:
        return None
    payload = msgspec.json.decode(text, type=RunSpec).payload
    return payload.call if isinstance(payload, Function) else None


def parts_in_use(connection: Connection) -> frozenset[str]:
    """Return the digests of all parts that runs and their outputs refer to."""
    found: set[str] = set()
    for (text,) in connection.execute(sa.select(runs.c.spec_json).execution_options(yield_per=_AT_ONCE)):
        call = _spec.decode(text).payload.call
        found.update(call.parts if call is not None else ())
    outputs = sa.select(files.c.parts_json).where(files.c.parts_json.is_not(None))
    for (text,) in connection.execute(outputs.execution_options(yield_per=_AT_ONCE)):
        found.update(_parts.decode(text))
    return frozenset(found)


def snapshots_in_use(connection: Connection, *, since_ns: int) -> frozenset[str]:
    """Return the addresses of snapshots that runs may still need.

    Args:
        connection: the database.
        since_ns: runs that ended before need none; nanoseconds since 1970.
    """
    needed = sa.or_(runs.c.ended_ns.is_(None), runs.c.ended_ns >= since_ns)
    found = connection.execute(sa.select(runs.c.snapshot).where(runs.c.snapshot != "", needed).distinct())
    return frozenset(found.scalars())
