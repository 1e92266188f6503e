"""Decides which principals may share a pool, because runs on a node share a uid.

All runs on a node share the uid of the node's agent. User code can read files that other runs leave on the node. On the
server's machine, user code can also read the server's key and tokens. By default, a pool therefore serves only the
server's first administrator. An administrator can accept the risk of shared uids with `sgpu pool set --isolation none`.

The first administrator is the oldest user in the database, normally the user who started the server. A personal server
therefore needs no isolation decision. If an administrator demotes or disables the first administrator, all runs wait
for the isolation decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.isolation import NONE
from serverless_gpu.model.scheduling.values import QueuedRun
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.db.tables import pools as pools_table
from serverless_gpu.server.db.tables import principals as principals_table
from serverless_gpu.server.db.tables import runs
from serverless_gpu.server.lifecycle import owner_suspension
from serverless_gpu.server.records import audit, pools, principals
from serverless_gpu.server.records.audit import SERVER, Action
from serverless_gpu.server.records.pools import UNSET, StoredPool


class Isolation(msgspec.Struct, frozen=True, kw_only=True):
    """Pools that are open or closed to principals, for scheduling decisions."""

    first: str  # Name of the first administrator, or "".
    closed: frozenset[str]  # Pools that serve only the first administrator.
    opened: frozenset[str]  # Pools that serve all principals.

    @classmethod
    def of(cls, there: Iterable[StoredPool], first: str) -> Isolation:
        """Return the isolation of the given pools."""
        names = {pool.name: pool.is_shared for pool in there}
        opened = frozenset(name for name, is_shared in names.items() if is_shared)
        return cls(first=first, closed=frozenset(names) - opened, opened=opened)

    def is_second(self, owner: str) -> bool:
        """Return True if any pool refuses the principal's runs."""
        return bool(self.closed) and owner != self.first

    def is_closed(self, wanted: QueuedRun) -> bool:
        """Return True if every possible pool refuses the run."""
        return wanted.second_principal and (wanted.pool in self.closed if wanted.pool else not self.opened)


EVERYBODY = Isolation(first="", closed=frozenset(), opened=frozenset())


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """Principals that share or would share a uid with the first administrator."""

    principals: tuple[str, ...]  # Names of other principals that own or may start runs.
    had_runs: tuple[str, ...]  # Names of other principals that own runs.
    undecided: tuple[str, ...]  # Pools with undecided isolation.
    closed: tuple[str, ...]  # Pools that refuse other principals, including undecided pools.
    shared: tuple[str, ...]  # Pools that allow shared uids.
    isolated: tuple[str, ...] = ()  # Pools whose principals have uids of their own.


def admits(connection: sa.Connection, owner: str, pool: str) -> bool:
    """Return True if a pool's isolation allows the runs of a principal."""
    found = pools.find(connection, pool)
    return (found is not None and found.is_shared) or owner == principals.first_administrator(connection)


def exposure(connection: sa.Connection) -> Exposure:
    """Return the principals that share a uid, and the isolation of all pools."""
    first, there = principals.first_administrator(connection), pools.every(connection)
    has_runs = sa.exists().where(runs.c.owner == principals_table.c.name)
    query = sa.select(principals_table.c.name, has_runs.label("has_runs")).order_by(principals_table.c.name)
    rows = [row for row in connection.execute(query) if row.name != first]
    out = owner_suspension.suspended_owners(connection)
    return Exposure(
        principals=tuple(row.name for row in rows if row.has_runs or row.name not in out),
        had_runs=tuple(row.name for row in rows if row.has_runs),
        undecided=tuple(pool.name for pool in there if pool.isolation is None),
        closed=tuple(pool.name for pool in there if not pool.is_shared),
        shared=tuple(pool.name for pool in there if pool.shares_uid),
        isolated=tuple(pool.name for pool in there if pool.is_shared and not pool.shares_uid),
    )


def settle(database: Transactions, ask: Callable[[Exposure], bool | None], *, now_ns: int) -> None:
    """Ask the operator whether several principals may share a uid in undecided pools.

    `ask` returns the operator's answer, or None to postpone the decision. `settle` calls `ask` outside of transactions.
    """
    found = database.read(exposure)
    if not found.principals:
        return
    answer = ask(found)
    if answer is not None and found.undecided:
        database.write(lambda connection: _decide(connection, found.undecided, is_shared=answer, now_ns=now_ns))


def _decide(connection: sa.Connection, names: tuple[str, ...], *, is_shared: bool, now_ns: int) -> None:
    level = NONE if is_shared else UNSET
    for name in names:
        undecided = sa.and_(pools_table.c.name == name, pools_table.c.isolation.is_(None))
        if connection.execute(pools_table.update().where(undecided).values(isolation=level)).rowcount:
            detail = {"isolation": level, "asked_by": "sgpu up"}
            audit.record(connection, who=SERVER, action=Action.POOL_PUT, subject=name, now_ns=now_ns, detail=detail)
