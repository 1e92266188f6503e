"""Repository of pools of nodes, and of the fair-share weights of teams and users.

An on-demand pool serves runs that name no pool. A reserved pool serves only runs that name the pool. A reserved pool
may lend idle devices to other runs that can release the devices quickly. A team or user without a stored share has a
weight of 1.
"""

from __future__ import annotations

from typing import get_args

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.egress import EGRESS, OPEN, Egress
from serverless_gpu.model.egress import NONE as NO_EGRESS
from serverless_gpu.model.isolation import LEVELS, NONE, Level
from serverless_gpu.model.scheduling.values import Pool, QueuePolicy
from serverless_gpu.server.db.tables import RETURN_S, nodes, pools, shares
from serverless_gpu.wire.queue import ShareKind

DEFAULT = "default"
ON_DEMAND, RESERVED = "on-demand", "reserved"
SHARE_KINDS: tuple[ShareKind, ...] = get_args(ShareKind)
UNSET = "unset"
"""Isolation of a pool that only one principal may use. All other isolation values of a pool are levels of
`model.isolation`."""
_allow_decoder = msgspec.json.Decoder(tuple[str, ...])


class StoredPool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool. Each node's row contains the name of its pool.

    Attributes:
        lends: True if the pool is reserved and lends idle devices.
        return_s: seconds within which borrowing runs release the devices.
        isolation: minimum level of the pool's runs, `UNSET`, or None if undecided, which counts as `UNSET`.
        egress: network policy of the pool's runs, or None for `OPEN`.
        allow_json: JSON list of the destinations that the policy opens, or None for an empty list.
    """

    name: str
    kind: str
    created_ns: int
    lends: bool = False
    return_s: float = RETURN_S
    isolation: str | None = None
    egress: str | None = None
    allow_json: str | None = None

    @property
    def mode(self) -> Egress:
        """Return the network policy of the pool's runs."""
        return next((mode for mode in EGRESS if mode == self.egress), OPEN if self.egress is None else NO_EGRESS)

    @property
    def allow(self) -> tuple[str, ...]:
        """Return the destinations that the network policy opens."""
        return _allow_decoder.decode(self.allow_json) if self.allow_json else ()

    @property
    def is_shared(self) -> bool:
        """Return True if several principals may use the pool, in sandboxes or with a shared uid."""
        return self.isolation not in (None, UNSET)

    @property
    def shares_uid(self) -> bool:
        """Return True if an administrator has permitted several principals to share a uid on the pool's nodes."""
        return self.isolation == NONE

    @property
    def level(self) -> Level:
        """Return the isolation level of the pool's runs, which is also the minimum for its nodes."""
        return next((level for level in LEVELS if level == self.isolation), NONE)

    @property
    def planned(self) -> Pool:
        """Return the pool as a data structure of the scheduler."""
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
    """Return a pool by name, or None."""
    row = connection.execute(sa.select(pools).where(pools.c.name == name)).first()
    return None if row is None else StoredPool(**row._mapping)


def level(connection: sa.Connection, name: str) -> Level:
    """Return the isolation level of a pool's runs. For a missing pool, return `NONE`."""
    found = find(connection, name)
    return NONE if found is None else found.level


def have_sandboxes(connection: sa.Connection) -> bool:
    """Return True if runs of any pool cannot read the directories of their callers."""
    return any(pool.level != NONE for pool in every(connection))


def ensure(connection: sa.Connection, name: str, *, at_ns: int) -> None:
    """Insert an on-demand pool with this name unless a pool with this name exists."""
    if find(connection, name) is None:
        connection.execute(pools.insert(), {"name": name, "kind": ON_DEMAND, "created_ns": at_ns})


def put(connection: sa.Connection, pool: StoredPool) -> None:
    """Insert a pool, or update all columns of the pool except the creation time."""
    said: dict[str, object] = {"kind": pool.kind, "lends": pool.lends, "return_s": pool.return_s}
    for name in ("isolation", "egress", "allow_json"):
        value = getattr(pool, name)
        if value is not None:
            said[name] = value
    changed = connection.execute(pools.update().where(pools.c.name == pool.name).values(**said))
    if changed.rowcount == 0:
        connection.execute(pools.insert(), {"name": pool.name, "created_ns": pool.created_ns, **said})


def delete(connection: sa.Connection, name: str) -> None:
    """Delete a pool without nodes."""
    connection.execute(pools.delete().where(pools.c.name == name))


def move(connection: sa.Connection, name: str, *, node_id: str) -> None:
    """Move a node into a pool."""
    connection.execute(nodes.update().where(nodes.c.id == node_id).values(pool=name))


class StoredShare(msgspec.Struct, frozen=True, kw_only=True):
    """The weight of a team among teams, or of a user within the user's team."""

    kind: ShareKind
    name: str
    weight: float
    set_ns: int


def every_share(connection: sa.Connection) -> list[StoredShare]:
    """Return all shares, teams first, by name."""
    rows = connection.execute(sa.select(shares).order_by(shares.c.kind, shares.c.name))
    return [StoredShare(**row._mapping) for row in rows]


def put_share(connection: sa.Connection, share: StoredShare) -> None:
    """Set the weight of a team or user."""
    this = sa.and_(shares.c.kind == share.kind, shares.c.name == share.name)
    said = {"weight": share.weight, "set_ns": share.set_ns}
    if connection.execute(shares.update().where(this).values(**said)).rowcount == 0:
        connection.execute(shares.insert(), {"kind": share.kind, "name": share.name, **said})


def remove_share(connection: sa.Connection, kind: ShareKind, name: str) -> bool:
    """Remove a stored share, and return True if it existed.

    A team or user without a stored share has the weight 1.
    """
    this = sa.and_(shares.c.kind == kind, shares.c.name == name)
    return connection.execute(shares.delete().where(this)).rowcount == 1


def queue_policy(connection: sa.Connection, said: QueuePolicy) -> QueuePolicy:
    """Return the queue policy, which combines the server's settings with the stored shares."""
    there = every_share(connection)
    return msgspec.structs.replace(
        said,
        team_weights={share.name: share.weight for share in there if share.kind == "team"},
        user_weights={share.name: share.weight for share in there if share.kind == "user"},
    )
