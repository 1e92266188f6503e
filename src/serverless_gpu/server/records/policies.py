"""Repository of usage policies (`model/usage_policy.py`) and policy holders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from functools import lru_cache

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.usage_policy import Attached, PolicySubject, UsagePolicy
from serverless_gpu.server.db.tables import policies, policy_holders

POLICIES_MAX = 1_000
_decoder = msgspec.json.Decoder(UsagePolicy)


@lru_cache(maxsize=POLICIES_MAX)
def _decode(text: str) -> UsagePolicy:
    """Decode a usage policy, with a cache for the scheduler, which reads all policies in each tick."""
    return _decoder.decode(text)


class StoredPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A usage policy with its name."""

    name: str
    policy: UsagePolicy
    set_ns: int


def every(connection: sa.Connection) -> list[StoredPolicy]:
    """Return all policies by name."""
    return [_from_row(row) for row in connection.execute(sa.select(policies).order_by(policies.c.name))]


def find(connection: sa.Connection, name: str) -> StoredPolicy | None:
    """Return a usage policy by name, or None."""
    row = connection.execute(sa.select(policies).where(policies.c.name == name)).first()
    return None if row is None else _from_row(row)


def put(connection: sa.Connection, policy: StoredPolicy) -> None:
    """Insert or replace a usage policy."""
    said = {"document_json": msgspec.json.encode(policy.policy).decode(), "set_ns": policy.set_ns}
    if connection.execute(policies.update().where(policies.c.name == policy.name).values(**said)).rowcount == 0:
        connection.execute(policies.insert(), {"name": policy.name, **said})


def remove(connection: sa.Connection, name: str) -> bool:
    """Remove a usage policy without holders, and return True if the policy existed."""
    return connection.execute(policies.delete().where(policies.c.name == name)).rowcount == 1


def caps(connection: sa.Connection) -> dict[str, int]:
    """Return the maximum concurrent devices per user for each policy with this limit."""
    found = {name: _decode(text).gpus_at_once for name, text in connection.execute(_DOCUMENTS)}
    return {name: most for name, most in found.items() if most is not None}


def attached(connection: sa.Connection, principal: str, teams: Collection[str]) -> Attached:
    """Return the names of usage policies that are attached to a principal or to the principal's teams."""
    own = sa.and_(policy_holders.c.kind.in_(("user", "service")), policy_holders.c.name == principal)
    theirs = sa.and_(policy_holders.c.kind == "team", policy_holders.c.name.in_(teams))
    query = sa.select(policy_holders).where(sa.or_(own, theirs) if teams else own).order_by(policy_holders.c.policy)
    mine: list[str] = []
    of_teams: dict[str, list[str]] = defaultdict(list)
    for row in connection.execute(query):
        (of_teams[row.name] if row.kind == "team" else mine).append(row.policy)
    return Attached(own=tuple(mine), teams={team: tuple(names) for team, names in sorted(of_teams.items())})


def holders(connection: sa.Connection, name: str | None = None) -> dict[str, tuple[PolicySubject, ...]]:
    """Return the holders of each policy that has holders."""
    query = sa.select(policy_holders).order_by(policy_holders.c.kind, policy_holders.c.name)
    if name is not None:
        query = query.where(policy_holders.c.policy == name)
    found: dict[str, list[PolicySubject]] = defaultdict(list)
    for row in connection.execute(query):
        found[row.policy].append(PolicySubject(kind=row.kind, name=row.name))
    return {policy: tuple(who) for policy, who in found.items()}


def attach(connection: sa.Connection, name: str, holder: PolicySubject) -> bool:
    """Attach a policy to a principal or team, and return False if the policy is already attached."""
    this = {"policy": name, "kind": holder.kind, "name": holder.name}
    if connection.execute(sa.select(policy_holders.c.name).where(_is(name, holder))).first() is not None:
        return False
    connection.execute(policy_holders.insert(), this)
    return True


def detach(connection: sa.Connection, name: str, holder: PolicySubject) -> bool:
    """Detach a policy from a principal or team, and return True if the policy was attached."""
    return connection.execute(policy_holders.delete().where(_is(name, holder))).rowcount == 1


def count_holders(connection: sa.Connection) -> int:
    """Return the total number of attachments of all policies."""
    return connection.execute(sa.select(sa.func.count()).select_from(policy_holders)).scalar_one()


_DOCUMENTS = sa.select(policies.c.name, policies.c.document_json)


def _is(name: str, holder: PolicySubject) -> sa.ColumnElement[bool]:
    columns = policy_holders.c
    return sa.and_(columns.policy == name, columns.kind == holder.kind, columns.name == holder.name)


def _from_row(row: sa.Row[tuple[str, str, int]]) -> StoredPolicy:
    return StoredPolicy(name=row.name, policy=_decode(row.document_json), set_ns=row.set_ns)
