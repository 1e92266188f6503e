"""Nodes: the query room of machines that have joined. Nobody else reads or writes their table.

What a node said last is kept as it was said (`AgentHello` without its attempts), so that a server that starts again
knows what there is, and what it waits for, before anybody has said anything. Whether a node is *there* is not here: a
column would be as old as its last write. `liveness.py` knows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from serverless_gpu.server.db.tables import nodes
from serverless_gpu.wire.agents import AgentHello
from serverless_gpu.wire.nodes import NodeRules

CREWS = "crews"
"""What a node says that takes a part of a gang that has others on other nodes."""
_HELLOS_MAX = 4_096
_decoder = msgspec.json.Decoder(AgentHello)
_rules_decoder = msgspec.json.Decoder(NodeRules)
_NO_RULES = "{}"


class StoredNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node as it is written down.

    Attributes:
        principal: whose token its agent has.
        hello: what it said of itself last, without its attempts.
        seen_ns: its last sign of life that was written, nanoseconds since 1970; some seconds behind.
        forgotten_ns: since when an operator says that it is dead; None for a node.
        token_id: of the token with which it said hello last.
        rules: what people decided about it; only `rule` writes that.
    """

    id: str
    name: str
    machine: str
    boot_id: str
    principal: str
    pool: str
    hello: AgentHello
    seen_ns: int
    forgotten_ns: int | None
    token_id: str = ""
    rules: NodeRules = NodeRules()

    @property
    def unavailable(self) -> tuple[str, ...]:
        """Return the devices that cannot be counted on: what the node says, and what people left out."""
        left_out = (one.uuid for one in self.rules.quarantined if one.uuid not in self.hello.unavailable)
        return (*self.hello.unavailable, *left_out)

    @property
    def takes_crews(self) -> bool:
        """Return whether it may have a part of a gang, and be told to look."""
        return CREWS in self.hello.takes


class RuledNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node about which people decided something, without what it says of itself."""

    id: str
    name: str
    rules: NodeRules


def every(connection: sa.Connection) -> list[StoredNode]:
    """Return all nodes that are not forgotten, by name."""
    query = sa.select(nodes).where(nodes.c.forgotten_ns.is_(None)).order_by(nodes.c.name)
    return [_from_row(row._mapping) for row in connection.execute(query)]


def get(connection: sa.Connection, node_id: str) -> StoredNode | None:
    """Return a node by its identifier, also a forgotten one."""
    return _first(connection, nodes.c.id == node_id)


def pool_of(connection: sa.Connection, node_id: str) -> str:
    """Return the pool that a node is in now, or "" where there is no such node."""
    return connection.scalar(sa.select(nodes.c.pool).where(nodes.c.id == node_id)) or ""


def named(connection: sa.Connection, name: str) -> StoredNode | None:
    """Return a node by its name, also a forgotten one."""
    return _first(connection, nodes.c.name == name)


def ruled(connection: sa.Connection) -> list[RuledNode]:
    """Return the nodes about which people decided something; seldom many, and what nodes say is not read for it."""
    query = sa.select(nodes.c.id, nodes.c.name, nodes.c.rules_json).where(nodes.c.forgotten_ns.is_(None))
    rows = connection.execute(query.where(nodes.c.rules_json != _NO_RULES).order_by(nodes.c.name))
    return [RuledNode(id=row.id, name=row.name, rules=_rules_decoder.decode(row.rules_json)) for row in rows]


def rule(connection: sa.Connection, node_id: str, rules: NodeRules) -> None:
    """Write down what people decided about a node."""
    text = _NO_RULES if rules == NodeRules() else msgspec.json.encode(rules).decode()
    connection.execute(nodes.update().where(nodes.c.id == node_id).values(rules_json=text))


def insert(connection: sa.Connection, node: StoredNode) -> None:
    """Write down a node that is new."""
    connection.execute(nodes.insert(), {"id": node.id, "name": node.name, **_columns(node)})


def change(connection: sa.Connection, node: StoredNode) -> None:
    """Write down what a node is now: all but its identifier and name may be another one."""
    connection.execute(nodes.update().where(nodes.c.id == node.id).values(**_columns(node)))


def heard(connection: sa.Connection, node: StoredNode, *, hello: AgentHello, seen_ns: int) -> None:
    """Write down what a node says of itself in a heartbeat, and nothing that others decide: its pool, that it is dead.

    Args:
        node: as it was read in this transaction. Of another boot than that, nothing is written.
        hello: what it says now.
        seen_ns: now, nanoseconds since 1970.
    """
    same = sa.and_(nodes.c.id == node.id, nodes.c.boot_id == node.boot_id, nodes.c.forgotten_ns.is_(None))
    values = {"hello_json": _hello_json(hello), "seen_ns": seen_ns}
    connection.execute(nodes.update().where(same).values(**values))


def drain(connection: sa.Connection, node_id: str, why: str) -> None:
    """Write down that nothing is to be placed on a node until its next sign of life says otherwise."""
    node = get(connection, node_id)
    if node is not None:
        hello = msgspec.structs.replace(node.hello, draining=node.hello.draining or why)
        connection.execute(nodes.update().where(nodes.c.id == node_id).values(hello_json=_hello_json(hello)))


def is_still(connection: sa.Connection, node: StoredNode) -> bool:
    """Return whether a node is as it was read: not forgotten, the same boot of the same machine, in the same pool, and
    nobody has decided anything else about it.

    That is asked with a write that changes nothing, so that on PostgreSQL too a transaction that says otherwise at the
    same time does not see the node as it was before this one: one of the two is tried again.
    """
    same = sa.and_(
        nodes.c.id == node.id,
        nodes.c.boot_id == node.boot_id,
        nodes.c.machine == node.machine,
        nodes.c.pool == node.pool,
        nodes.c.forgotten_ns.is_(None),
    )
    if connection.execute(nodes.update().where(same).values(boot_id=node.boot_id)).rowcount != 1:
        return False
    found = get(connection, node.id)
    return found is not None and found.rules == node.rules


def forget(connection: sa.Connection, node_id: str, *, at_ns: int) -> None:
    """Write down that a node is dead; should it come back, it is a node again."""
    connection.execute(nodes.update().where(nodes.c.id == node_id).values(forgotten_ns=at_ns))


def _columns(node: StoredNode) -> dict[str, object]:
    return {
        "machine": node.machine,
        "boot_id": node.boot_id,
        "principal": node.principal,
        "token_id": node.token_id,
        "pool": node.pool,
        "hello_json": _hello_json(node.hello),
        "seen_ns": node.seen_ns,
        "forgotten_ns": node.forgotten_ns,
    }


def _hello_json(hello: AgentHello) -> str:
    return msgspec.json.encode(msgspec.structs.replace(hello, attempts=())).decode()


def _first(connection: sa.Connection, which: sa.ColumnElement[bool]) -> StoredNode | None:
    row = connection.execute(sa.select(nodes).where(which)).first()
    return None if row is None else _from_row(row._mapping)


def _from_row(fields: sa.RowMapping) -> StoredNode:
    own = {name: fields[name] for name in StoredNode.__struct_fields__ if name not in ("hello", "rules")}
    text = fields["rules_json"]
    rules = NodeRules() if text == _NO_RULES else _rules_decoder.decode(text)
    return StoredNode(**own, hello=_hello(fields["hello_json"]), rules=rules)


@functools.lru_cache(maxsize=_HELLOS_MAX)
def _hello(text: str) -> AgentHello:
    """Return what a node said: the same value for the same text, as nodes are read many times before they say more."""
    return _decoder.decode(text)


def by_id(found: Sequence[StoredNode]) -> dict[str, StoredNode]:
    """Return nodes by their identifiers."""
    return {node.id: node for node in found}
