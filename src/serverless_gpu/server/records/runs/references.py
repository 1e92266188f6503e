"""Query room of what must not be collected: parts and snapshots that runs and their outputs refer to."""

from __future__ import annotations

import sqlalchemy as sa

from serverless_gpu.model.spec import BlobReference, Function
from serverless_gpu.server.db.tables import runs
from serverless_gpu.server.records import policies
from serverless_gpu.server.records.runs import files
from serverless_gpu.server.records.runs.runs import find
from serverless_gpu.server.records.runs.runs import parts_in_use as parts_of_payloads


def payload_of(connection: sa.Connection, run_id: str) -> BlobReference | None:
    """Return where the pickled call of a run is, or None when it is no blob, or there is no such run."""
    run = find(connection, run_id)
    return run.spec.payload.call if run is not None and isinstance(run.spec.payload, Function) else None


def parts_in_use(connection: sa.Connection) -> frozenset[str]:
    """Return the digests of all parts that outputs, and runs that have not ended, are made of."""
    return frozenset((*parts_of_payloads(connection), *files.parts_in_use(connection)))


def snapshots_in_use(connection: sa.Connection, *, since_ns: int) -> frozenset[str]:
    """Return the addresses of snapshots that runs have now, or had until recently, or that usage policies name.

    Args:
        connection: the database.
        since_ns: runs that ended before do not count; nanoseconds since 1970.
    """
    lately = sa.or_(runs.c.ended_ns.is_(None), runs.c.ended_ns >= since_ns)
    query = sa.select(runs.c.snapshot).where(runs.c.snapshot != "", lately).distinct()
    named = (address for each in policies.every(connection) for address in each.policy.environments)
    return frozenset((*connection.execute(query).scalars(), *named))
