"""Queries about the environments that runs use, which read the index `ix_runs_snapshot`."""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa

from serverless_gpu.server.db.tables import runs


class EnvironmentUse(NamedTuple):
    """Number of runs in an environment, and times of the first and last run (Unix time in ns)."""

    address: str
    runs: int
    first_ns: int
    last_ns: int


class OwnerUse(NamedTuple):
    """Use of an environment by the runs of one owner."""

    owner: str
    runs: int
    last_ns: int


class EnvironmentRun(NamedTuple):
    """A run in an environment."""

    run_id: str
    name: str
    owner: str
    state: str
    created_ns: int


def uses(
    connection: sa.Connection, owner: str | None, *, after: tuple[int, str] | None, limit: int
) -> list[EnvironmentUse]:
    """Return environments by last use, latest first.

    Args:
        connection: connection of the transaction.
        owner: owner whose runs count, or None for all runs.
        after: time of the last use and address of the last environment that the caller has already read, or None.
        limit: maximum number of environments.
    """
    last = sa.func.max(runs.c.created_ns)
    query = sa.select(runs.c.snapshot, sa.func.count(), sa.func.min(runs.c.created_ns), last)
    query = query.where(runs.c.snapshot > "", *_of(owner)).group_by(runs.c.snapshot)
    if after is not None:
        query = query.having(sa.or_(last < after[0], sa.and_(last == after[0], runs.c.snapshot > after[1])))
    rows = connection.execute(query.order_by(last.desc(), runs.c.snapshot).limit(limit))
    return [EnvironmentUse(*row) for row in rows]


def use(connection: sa.Connection, address: str, owner: str | None) -> EnvironmentUse | None:
    """Return the use of one environment, or None if no run uses the environment."""
    times = (sa.func.count(), sa.func.min(runs.c.created_ns), sa.func.max(runs.c.created_ns))
    count, first, last = connection.execute(sa.select(*times).where(runs.c.snapshot == address, *_of(owner))).one()
    return EnvironmentUse(address, count, first, last) if count else None


def owners(connection: sa.Connection, address: str, owner: str | None, *, limit: int) -> list[OwnerUse]:
    """Return the owners of runs in an environment, by last use, latest first."""
    last = sa.func.max(runs.c.created_ns)
    query = sa.select(runs.c.owner, sa.func.count(), last).where(runs.c.snapshot == address, *_of(owner))
    rows = connection.execute(query.group_by(runs.c.owner).order_by(last.desc(), runs.c.owner).limit(limit))
    return [OwnerUse(*row) for row in rows]


def latest_runs(connection: sa.Connection, address: str, owner: str | None, *, limit: int) -> list[EnvironmentRun]:
    """Return the latest runs in an environment, newest first."""
    columns = (runs.c.id, runs.c.name, runs.c.owner, runs.c.state, runs.c.created_ns)
    query = sa.select(*columns).where(runs.c.snapshot == address, *_of(owner))
    rows = connection.execute(query.order_by(runs.c.created_ns.desc()).limit(limit))
    return [EnvironmentRun(*row) for row in rows]


def _of(owner: str | None) -> list[sa.ColumnElement[bool]]:
    return [] if owner is None else [runs.c.owner == owner]
