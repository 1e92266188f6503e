"""Pools: repository of nodes under one policy. An on-demand pool serves runs that name none; a reserved one does
not, but it may lend what is idle to those that can give it back in time."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.scheduling.values import Pool
from serverless_gpu.server.db.tables import RETURN_S, nodes, pools

DEFAULT = "default"
ON_DEMAND, RESERVED = "on-demand", "reserved"
NO_ISOLATION, UNSET = "none", "unset"
"""What administrators said of a pool's isolation: several principals may share a uid there, or only one may use it."""


class StoredPool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool; its nodes say that they are in it.

    Attributes:
        lends: whether it is reserved and lends idle devices.
        return_s: seconds within which they are back.
        isolation: `NO_ISOLATION`, `UNSET`, or None where that is undecided, which counts as `UNSET`.
    """

    name: str
    kind: str
    created_ns: int
    lends: bool = False
    return_s: float = RETURN_S
    isolation: str | None = None

    @property
    def is_shared(self) -> bool:
        """Return whether an administrator accepts that several principals share a uid on its nodes."""
        return self.isolation == NO_ISOLATION

    @property
    def planned(self) -> Pool:
        """Return the pool as decisions take it."""
        is_reserved = self.kind == RESERVED
        return Pool(
            name=self.name,
            reserved=is_reserved,
            lends=is_reserved and self.lends,
            return_s=self.return_s,
            single_principal=not self.is_shared,
        )


def every(connection: sa.Connection) -> list[StoredPool]:
    """Return all pools by name."""
    rows = connection.execute(sa.select(pools).order_by(pools.c.name))
    return [StoredPool(**row._mapping) for row in rows]


def find(connection: sa.Connection, name: str) -> StoredPool | None:
    """Return a pool."""
    row = connection.execute(sa.select(pools).where(pools.c.name == name)).first()
    return None if row is None else StoredPool(**row._mapping)


def ensure(connection: sa.Connection, name: str, *, at_ns: int) -> None:
    """Make an on-demand pool of this name unless it exists."""
    if find(connection, name) is None:
        connection.execute(pools.insert(), {"name": name, "kind": ON_DEMAND, "created_ns": at_ns})


def put(connection: sa.Connection, pool: StoredPool) -> None:
    """Make a pool, or change its properties but its creation time."""
    said: dict[str, object] = {"kind": pool.kind, "lends": pool.lends, "return_s": pool.return_s}
    if pool.isolation is not None:
        said["isolation"] = pool.isolation
    changed = connection.execute(pools.update().where(pools.c.name == pool.name).values(**said))
    if changed.rowcount == 0:
        connection.execute(pools.insert(), {"name": pool.name, "created_ns": pool.created_ns, **said})


def move(connection: sa.Connection, name: str, *, node_id: str) -> None:
    """Move a node into a pool."""
    connection.execute(nodes.update().where(nodes.c.id == node_id).values(pool=name))
