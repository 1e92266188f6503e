"""Shares: repository of the weights of teams and users in the fair share; one without a row has 1."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.scheduling.values import QueuePolicy
from serverless_gpu.server.db.tables import shares

Kind = Literal["team", "user"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class StoredShare(msgspec.Struct, frozen=True, kw_only=True):
    """The weight of a team among teams, or of a user within their team."""

    kind: Kind
    name: str
    weight: float
    set_ns: int


def every(connection: sa.Connection) -> list[StoredShare]:
    """Return all shares, teams first, by name."""
    rows = connection.execute(sa.select(shares).order_by(shares.c.kind, shares.c.name))
    return [StoredShare(**row._mapping) for row in rows]


def put(connection: sa.Connection, share: StoredShare) -> None:
    """Set a share."""
    this = sa.and_(shares.c.kind == share.kind, shares.c.name == share.name)
    said = {"weight": share.weight, "set_ns": share.set_ns}
    if connection.execute(shares.update().where(this).values(**said)).rowcount == 0:
        connection.execute(shares.insert(), {"kind": share.kind, "name": share.name, **said})


def remove(connection: sa.Connection, kind: Kind, name: str) -> bool:
    """Take a share away, so that it is 1 again; return whether there was one."""
    this = sa.and_(shares.c.kind == kind, shares.c.name == name)
    return connection.execute(shares.delete().where(this)).rowcount == 1


def policy(connection: sa.Connection, said: QueuePolicy) -> QueuePolicy:
    """Return the queue policy: the server's settings, with the shares as they are now."""
    there = every(connection)
    return msgspec.structs.replace(
        said,
        team_weights={share.name: share.weight for share in there if share.kind == "team"},
        user_weights={share.name: share.weight for share in there if share.kind == "user"},
    )
