"""Pools: the query room of nodes under one policy. An on-demand pool serves runs that name none; a reserved one does
not."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from serverless_gpu.server.tables import nodes, pools

DEFAULT = "default"
ON_DEMAND, RESERVED = "on-demand", "reserved"


class StoredPool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool; its nodes say that they are in it."""

    name: str
    kind: str
    created_ns: int


def every(connection: sa.Connection) -> list[StoredPool]:
    """Return all pools by name."""
    rows = connection.execute(sa.select(pools).order_by(pools.c.name))
    return [StoredPool(**row._mapping) for row in rows]


def find(connection: sa.Connection, name: str) -> StoredPool | None:
    """Return a pool."""
    row = connection.execute(sa.select(pools).where(pools.c.name == name)).first()
    return None if row is None else StoredPool(**row._mapping)


def ensure(connection: sa.Connection, name: str, *, at_ns: int) -> None:
    """Make an on-demand pool of this name if there is none."""
    if find(connection, name) is None:
        connection.execute(pools.insert(), {"name": name, "kind": ON_DEMAND, "created_ns": at_ns})


def put(connection: sa.Connection, name: str, *, kind: str, at_ns: int) -> None:
    """Make a pool, or change its kind."""
    changed = connection.execute(pools.update().where(pools.c.name == name).values(kind=kind))
    if changed.rowcount == 0:
        connection.execute(pools.insert(), {"name": name, "kind": kind, "created_ns": at_ns})


def move(connection: sa.Connection, name: str, *, node_id: str) -> None:
    """Move a node into a pool."""
    connection.execute(nodes.update().where(nodes.c.id == node_id).values(pool=name))
