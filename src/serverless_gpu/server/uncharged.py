"""Attempts of which the ledger does not say all: which there are, and that it does now. A query room over attempts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.attempt import ACTIVE
from serverless_gpu.server.attempts import COLUMNS, JOINED, Gang, StoredAttempt, from_row
from serverless_gpu.server.tables import attempts, runs

_ACTIVE = [state.value for state in ACTIVE]


class Unposted(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that goes on, or of which the ledger does not say all.

    Attributes:
        is_stopping: whether its run is asked to stop.
    """

    attempt: StoredAttempt
    is_stopping: bool


def unposted(connection: sa.Connection) -> dict[Gang, Unposted]:
    """Return the attempts that have not ended, or of which the ledger does not say all."""
    is_current = sa.and_(runs.c.id == attempts.c.run_id, runs.c.fence == attempts.c.fence)
    query = sa.select(*COLUMNS, runs.c.stop).select_from(JOINED.outerjoin(runs, is_current))
    found: dict[Gang, Unposted] = {}
    # Two queries, each with an index of its own: one for both would look at every attempt there ever was.
    for which in (runs.c.state.in_(_ACTIVE), attempts.c.uncharged):
        for row in connection.execute(query.where(which)):
            if attempt := from_row(row):
                found[attempt.run_id, attempt.fence] = Unposted(attempt=attempt, is_stopping=row[-1] is not None)
    return found


def due(connection: sa.Connection, *, limit: int) -> list[Gang]:
    """Return attempts of which nothing more is awaited, and that the ledger does not say all of."""
    query = sa.select(attempts.c.run_id, attempts.c.fence).where(
        attempts.c.uncharged, attempts.c.settled_ns.is_not(None)
    )
    rows = connection.execute(query.order_by(attempts.c.run_id, attempts.c.fence).limit(limit))
    return [(run_id, fence) for run_id, fence in rows]


def going_on(connection: sa.Connection, *, before_ns: int) -> list[Gang]:
    """Return attempts that were placed before a moment and of which more is awaited."""
    query = sa.select(attempts.c.run_id, attempts.c.fence).select_from(attempts.join(runs))
    query = query.where(runs.c.settled_ns.is_(None), attempts.c.settled_ns.is_(None), attempts.c.created_ns < before_ns)
    return [(run_id, fence) for run_id, fence in connection.execute(query)]


def note_charged(connection: sa.Connection, gangs: Sequence[Gang]) -> None:
    """Write that the ledger says all of some attempts, as far as is known in this transaction."""
    if gangs:
        one = sa.and_(attempts.c.run_id == sa.bindparam("run"), attempts.c.fence == sa.bindparam("number"))
        rows = [{"run": run_id, "number": fence} for run_id, fence in gangs]
        connection.execute(attempts.update().where(one).values(uncharged=False), rows)


def charge_again(connection: sa.Connection, run_id: str) -> None:
    """Have the attempts of a run looked at once more by whoever charges."""
    connection.execute(attempts.update().where(attempts.c.run_id == run_id).values(uncharged=True))
