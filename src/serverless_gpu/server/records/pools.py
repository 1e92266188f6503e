"""Pools: repository of pools of nodes, and of the weights of teams and users in the fair share of the queue.

An on-demand pool serves runs that name none. A reserved one does not, but it may lend what is idle to runs that can
return it in time. A team or user without a share has a weight of 1.
"""

from __future__ import annotations

from typing import get_args

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.scheduling.values import Pool, QueuePolicy
from serverless_gpu.server.db.tables import RETURN_S, nodes, pools, shares
from serverless_gpu.wire.queue import ShareKind

DEFAULT = "default"
ON_DEMAND, RESERVED = "on-demand", "reserved"
SHARE_KINDS: tuple[ShareKind, ...] = get_args(ShareKind)
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


class StoredShare(msgspec.Struct, frozen=True, kw_only=True):
    """The weight of a team among teams, or of a user within their team."""

    kind: ShareKind
    name: str
    weight: float
    set_ns: int


def every_share(connection: sa.Connection) -> list[StoredShare]:
    """Return all shares, teams first, by name."""
    rows = connection.execute(sa.select(shares).order_by(shares.c.kind, shares.c.name))
    return [StoredShare(**row._mapping) for row in rows]


def put_share(connection: sa.Connection, share: StoredShare) -> None:
    """Set a share."""
    this = sa.and_(shares.c.kind == share.kind, shares.c.name == share.name)
    said = {"weight": share.weight, "set_ns": share.set_ns}
    if connection.execute(shares.update().where(this).values(**said)).rowcount == 0:
        connection.execute(shares.insert(), {"kind": share.kind, "name": share.name, **said})


def remove_share(connection: sa.Connection, kind: ShareKind, name: str) -> bool:
    """Take a share away, so that it is 1 again; return whether there was one."""
    this = sa.and_(shares.c.kind == kind, shares.c.name == name)
    return connection.execute(shares.delete().where(this)).rowcount == 1


def queue_policy(connection: sa.Connection, said: QueuePolicy) -> QueuePolicy:
    """Return the queue policy: the server's settings, with the shares as they are now."""
    there = every_share(connection)
    return msgspec.structs.replace(
        said,
        team_weights={share.name: share.weight for share in there if share.kind == "team"},
        user_weights={share.name: share.weight for share in there if share.kind == "user"},
    )
