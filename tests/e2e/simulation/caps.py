"""Nobody gets more devices at once than their policy allows: looked at in the transaction of each placement.

Rows are read and summed here by themselves: what the server uses for that is what is tried.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import sqlalchemy as sa

from serverless_gpu.model.lifecycle.attempt import ACTIVE
from serverless_gpu.model.scheduling.values import Placement
from serverless_gpu.server.db.tables import crews, policies, runs
from serverless_gpu.server.records.nodes import StoredNode
from serverless_gpu.server.scheduling.scheduler import Scheduler

_HAVING = (
    sa.select(runs.c.id, runs.c.fence, crews.c.crew, runs.c.spec_json, crews.c.gpus)
    .select_from(runs.join(crews, sa.and_(crews.c.run_id == runs.c.id, crews.c.fence == runs.c.fence)))
    .where(runs.c.state.in_([state.value for state in ACTIVE]))
)


def watched(wrong: list[str]) -> AbstractContextManager[Any]:
    """Return a context in which every placement that breaks a cap is written down.

    Args:
        wrong: where it is.
    """
    intend = Scheduler._intend

    def intended(
        scheduler: Scheduler, connection: sa.Connection, one: Placement, on: Sequence[StoredNode], at_ns: int
    ) -> Any:
        came = intend(scheduler, connection, one, on, at_ns)
        if isinstance(came, int):
            wrong.extend(_over(connection, one.run_id, scheduler._leases.freed()))
        return came

    return mock.patch.object(Scheduler, "_intend", intended)


def _over(connection: sa.Connection, run_id: str, freed: frozenset[tuple[str, int, int]]) -> Iterator[str]:
    owner, spec = connection.execute(sa.select(runs.c.owner, runs.c.spec_json).where(runs.c.id == run_id)).one()
    name = json.loads(spec)["policy"]
    document = connection.scalar(sa.select(policies.c.document_json).where(policies.c.name == (name or "")))
    cap = None if document is None else json.loads(document)["gpus_at_once"]
    if cap is None:
        return
    having = connection.execute(_HAVING.where(runs.c.owner == owner)).all()
    theirs = [row for row in having if json.loads(row.spec_json)["policy"] == name]
    used = sum(row.gpus for row in theirs if (row.id, row.fence, row.crew) not in freed)
    if used > cap:
        yield f"caps {owner} has {used} devices under {name}, which allows {cap}: {run_id} was placed"
