"""Runs of which nothing more comes: ended, all crews of their attempts settled, and all that those used in the ledger.

Part of the query room of runs (`runs.py`), for whoever removes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from serverless_gpu.model.lifecycle.attempt import TERMINAL
from serverless_gpu.server.db.database import portions
from serverless_gpu.server.db.tables import audit, crews, runs
from serverless_gpu.server.records.audit import Action

_UNSETTLED = sa.exists().where(
    crews.c.run_id == runs.c.id,
    sa.or_(crews.c.settled_ns.is_(None), crews.c.uncharged),
)
_OVER = sa.and_(
    runs.c.state.in_([state.value for state in TERMINAL]),
    runs.c.ended_ns.is_not(None),
    runs.c.settled_ns.is_not(None),
    sa.not_(_UNSETTLED),
)


def over(connection: sa.Connection, *, ended_before_ns: int, limit: int) -> list[str]:
    """Return runs that ended before a moment and of which nothing more will come, those that ended first first.

    Args:
        ended_before_ns: nanoseconds since 1970.
        limit: how many at most.
    """
    query = sa.select(runs.c.id).where(_OVER, runs.c.ended_ns < ended_before_ns)
    return list(connection.execute(query.order_by(runs.c.ended_ns, runs.c.id).limit(limit)).scalars())


def endings(connection: sa.Connection, run_ids: Sequence[str]) -> dict[str, int | None]:
    """Return, of those runs that exist, when they ended; None where something may still come."""
    query = sa.select(runs.c.id, runs.c.ended_ns, _OVER)
    rows = (row for some in portions(run_ids) for row in connection.execute(query.where(runs.c.id.in_(some))))
    return {run_id: ended_ns if over else None for run_id, ended_ns, over in rows}


def removed(connection: sa.Connection, run_ids: Sequence[str]) -> set[str]:
    """Return which of those runs retention removed, as the audit says."""
    query = sa.select(audit.c.subject).where(audit.c.action == Action.RUN_EXPIRE.value)
    return {
        run_id for some in portions(run_ids) for run_id in connection.scalars(query.where(audit.c.subject.in_(some)))
    }


def remove(connection: sa.Connection, run_id: str) -> bool:
    """Remove a run of which nothing more will come and nothing else is left; return whether it was there."""
    return connection.execute(runs.delete().where(runs.c.id == run_id, _OVER)).rowcount == 1
