"""Repository of orders: the outbox of messages that start or stop attempts on nodes.

    decision ─▶ one transaction: attempt + order ─▶ (committed) ─▶ stream of the node ─▶ taken

The server writes an order in the transaction that starts or stops the attempt. The server repeats each order until the
node confirms the order, even after restarts of server or node. A node may receive an order twice. Nodes recognize a
repeated order by its gang and execute each order once. The server does not deliver orders for attempts that have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.lifecycle.attempt import StopReason
from serverless_gpu.server.db.database import in_chunks
from serverless_gpu.server.db.tables import crews, orders
from serverless_gpu.server.records.crews import CrewId, Gang

OPEN_MAX = 1_000
"""Maximum number of orders in one read. The server sends further orders after the node has confirmed earlier orders."""


class StoredOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order that the node has not confirmed yet.

    Attributes:
        crew: rank of the node in the attempt.
        stop: reason of a stop order; None for a start order.
    """

    seq: int
    run_id: str
    fence: int
    crew: int
    kind: Literal["start", "stop"]
    stop: StopReason | None
    created_ns: int


def add_start(connection: sa.Connection, node_id: str, crew: CrewId, *, at_ns: int) -> int:
    """Insert an order to start an attempt on a node, and return the order's number."""
    return _insert(connection, node_id, crew, {"kind": "start"}, at_ns)


def add_stop(connection: sa.Connection, node_id: str, crew: CrewId, *, why: StopReason, at_ns: int) -> int | None:
    """Insert an order to stop an attempt on a node, and return its number, or None if the order exists."""
    run_id, fence, number = crew
    own = sa.and_(orders.c.run_id == run_id, orders.c.fence == fence, orders.c.crew == number)
    same = sa.and_(own, orders.c.kind == "stop", orders.c.stop == why.value)
    if connection.execute(sa.select(orders.c.seq).where(same)).first() is not None:
        return None
    return _insert(connection, node_id, crew, {"kind": "stop", "stop": why.value}, at_ns)


def waiting(connection: sa.Connection, node_id: str) -> list[StoredOrder]:
    """Return a node's unconfirmed orders for unended attempts, oldest first."""
    return _open(connection, orders.c.node_id == node_id)


def take(connection: sa.Connection, node_id: str, seqs: Sequence[int], *, at_ns: int) -> None:
    """Mark orders of a node as confirmed. Other nodes' orders and already confirmed orders do not change."""
    mine = sa.and_(orders.c.node_id == node_id, orders.c.seq.in_(list(seqs)), orders.c.taken_ns.is_(None))
    connection.execute(orders.update().where(mine).values(taken_ns=at_ns))


def take_starts(connection: sa.Connection, node_id: str, gangs: Sequence[tuple[str, int]], *, at_ns: int) -> None:
    """Mark the start orders of attempts that a node has reported as confirmed."""
    for run_id, fence in gangs:
        same = sa.and_(orders.c.node_id == node_id, orders.c.run_id == run_id, orders.c.fence == fence)
        untaken = sa.and_(same, orders.c.kind == "start", orders.c.taken_ns.is_(None))
        connection.execute(orders.update().where(untaken).values(taken_ns=at_ns))


def taken(connection: sa.Connection, run_ids: Sequence[str]) -> set[Gang]:
    """Return the attempts of several runs for which a node has confirmed a start order."""
    found: set[Gang] = set()
    starts = sa.and_(orders.c.kind == "start", orders.c.taken_ns.is_not(None))
    for some in in_chunks(run_ids):
        query = sa.select(orders.c.run_id, orders.c.fence).where(orders.c.run_id.in_(some), starts)
        found |= {(run_id, fence) for run_id, fence in connection.execute(query)}
    return found


def remove(connection: sa.Connection, run_id: str) -> None:
    """Remove the orders of a run."""
    connection.execute(orders.delete().where(orders.c.run_id == run_id))


def _open(connection: sa.Connection, which: sa.ColumnElement[bool]) -> list[StoredOrder]:
    columns = [orders.c[name] for name in StoredOrder.__struct_fields__]
    own = (crews.c[name] == orders.c[name] for name in ("run_id", "fence", "crew"))
    query = sa.select(*columns).select_from(orders.join(crews, sa.and_(*own)))
    query = query.where(which, orders.c.taken_ns.is_(None), crews.c.ended_ns.is_(None))
    rows = connection.execute(query.order_by(orders.c.seq).limit(OPEN_MAX))
    return [StoredOrder(**(dict(row._mapping) | {"stop": StopReason(row.stop) if row.stop else None})) for row in rows]


def _insert(connection: sa.Connection, node_id: str, crew: CrewId, row: dict[str, object], at_ns: int) -> int:
    run_id, fence, number = crew
    whose = {"node_id": node_id, "run_id": run_id, "fence": fence, "crew": number}
    result = connection.execute(orders.insert().values(**whose, **row, created_ns=at_ns))
    key = result.inserted_primary_key
    return int(key[0]) if key is not None else 0
