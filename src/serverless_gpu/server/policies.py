"""Usage policies: the query room of `model/policy.py`."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.policy import UsagePolicy
from serverless_gpu.server.tables import policies

_decode = msgspec.json.Decoder(UsagePolicy).decode


class StoredPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy and its name."""

    name: str
    policy: UsagePolicy
    set_ns: int


def every(connection: sa.Connection) -> list[StoredPolicy]:
    """Return all policies by name."""
    return [_from_row(row) for row in connection.execute(sa.select(policies).order_by(policies.c.name))]


def find(connection: sa.Connection, name: str) -> StoredPolicy | None:
    """Return a policy."""
    row = connection.execute(sa.select(policies).where(policies.c.name == name)).first()
    return None if row is None else _from_row(row)


def put(connection: sa.Connection, policy: StoredPolicy) -> None:
    """Make a policy, or put another one in its place."""
    said = {"document_json": msgspec.json.encode(policy.policy).decode(), "set_ns": policy.set_ns}
    if connection.execute(policies.update().where(policies.c.name == policy.name).values(**said)).rowcount == 0:
        connection.execute(policies.insert(), {"name": policy.name, **said})


def remove(connection: sa.Connection, name: str) -> bool:
    """Take a policy away; runs that named it keep their pool. Return whether there was one."""
    return connection.execute(policies.delete().where(policies.c.name == name)).rowcount == 1


def _from_row(row: sa.Row[tuple[str, str, int]]) -> StoredPolicy:
    return StoredPolicy(name=row.name, policy=_decode(row.document_json), set_ns=row.set_ns)
