"""Crews of which the ledger does not say all: which there are, and that it does now. A query room over crews."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.lifecycle.attempt import ACTIVE
from serverless_gpu.server.db.database import portions
from serverless_gpu.server.db.tables import attempts, crews, runs
from serverless_gpu.server.records.runs import attempts as attempt_rows
from serverless_gpu.server.records.runs.attempts import StoredAttempt
from serverless_gpu.server.records.runs.crews import CrewId, Gang

_ACTIVE = [state.value for state in ACTIVE]
_WHOSE = (crews.c.run_id, crews.c.fence, crews.c.crew)
_UNCHARGED: sa.ColumnElement[bool] = sa.literal_column("crews.uncharged")
# As the index has it, word for word: with "= 1" behind it SQLite does not use that.


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
    going = sa.select(*attempt_rows.COLUMNS, runs.c.stop).select_from(attempt_rows.joined_to(runs, is_current)).where(runs.c.state.in_(_ACTIVE))
    rows = list(connection.execute(going))
    left = {(run_id, fence) for run_id, fence in connection.execute(sa.select(*_WHOSE[:2]).where(_UNCHARGED))}
    others = sa.select(*attempt_rows.COLUMNS, runs.c.stop).select_from(attempt_rows.JOINED.outerjoin(runs, is_current))
    for some in portions(sorted({run_id for run_id, _ in left})):
        rows += connection.execute(others.where(attempts.c.run_id.in_(some)))
    found = [(attempt, row[-1] is not None) for row in rows if (attempt := attempt_rows.from_row(row))]
    stopping = {(attempt.run_id, attempt.fence) for attempt, is_stopping in found if is_stopping}
    there = {(one.run_id, one.fence): one for one in attempt_rows.whole(connection, [attempt for attempt, _ in found])}
    return {
        gang: Unposted(attempt=attempt, is_stopping=gang in stopping)
        for gang, attempt in there.items()
        if gang in left or attempt.ended_ns is None
    }


def due(connection: sa.Connection, *, limit: int) -> list[CrewId]:
    """Return crews of which nothing more is awaited, and that the ledger does not say all of.

    What they pay depends on how their attempt ended: before that they are not due.
    """
    own = sa.and_(attempts.c.run_id == crews.c.run_id, attempts.c.fence == crews.c.fence)
    query = sa.select(*_WHOSE).select_from(crews.join(attempts, own))
    query = query.where(_UNCHARGED, crews.c.settled_ns.is_not(None), attempts.c.ended_ns.is_not(None))
    rows = connection.execute(query.order_by(*_WHOSE).limit(limit))
    return [(run_id, fence, number) for run_id, fence, number in rows]


def going_on(connection: sa.Connection, *, before_ns: int) -> list[CrewId]:
    """Return crews that were placed before a moment and of which more is awaited, or of their attempts."""
    own = sa.and_(crews.c.run_id == attempts.c.run_id, crews.c.fence == attempts.c.fence)
    query = sa.select(*_WHOSE).select_from(attempts.join(runs).join(crews, own))
    more = sa.or_(crews.c.settled_ns.is_(None), attempts.c.ended_ns.is_(None))
    query = query.where(runs.c.settled_ns.is_(None), more, attempts.c.created_ns < before_ns)
    return [(run_id, fence, number) for run_id, fence, number in connection.execute(query)]


def count(connection: sa.Connection) -> int:
    """Return of how many crews that have ended the ledger does not say all."""
    return connection.scalar(sa.select(sa.func.count()).select_from(crews).where(_UNCHARGED)) or 0


def note_charged(connection: sa.Connection, ids: Sequence[CrewId]) -> None:
    """Write that the ledger says all of some crews, as far as is known in this transaction."""
    if ids:
        names = ("of_run", "of_fence", "of_crew")
        one = sa.and_(*(column == sa.bindparam(name) for column, name in zip(_WHOSE, names, strict=True)))
        rows = [dict(zip(names, crew, strict=True)) for crew in ids]
        connection.execute(crews.update().where(one).values(uncharged=False), rows)


def charge_again(connection: sa.Connection, run_id: str) -> None:
    """Have the crews of a run looked at once more by whoever charges."""
    connection.execute(crews.update().where(crews.c.run_id == run_id).values(uncharged=True))
