"""Repository of nodes that have joined, and of the bindings of their tokens.

    nodes           the last hello of a node, unchanged (`AgentHello` without its attempts)
    node_bindings   token ─▶ its node; without approval, the node waits for an administrator
    invitations     join token ─▶ the number of homes that may still join

After a restart, the server reads its nodes from the database and waits for messages of the nodes. The database does not
store the presence of nodes, which `lifecycle/liveness.py` tracks in memory. `model/access_control.py` contains the
rules for token bindings.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.access_control import NodeIdentity, TokenBinding
from serverless_gpu.model.node_keys import NodeKeys
from serverless_gpu.server.db.tables import invitations, node_bindings, nodes, tokens
from serverless_gpu.wire.agents import AgentHello
from serverless_gpu.wire.nodes import NodeRules

CREWS = "crews"
"""Capability of nodes that support gangs on several nodes."""
_HELLOS_MAX = 4_096
_decoder = msgspec.json.Decoder(AgentHello)
_rules_decoder = msgspec.json.Decoder(NodeRules)
_NO_RULES = "{}"


PENDING_MAX = 1_000
"""Maximum number of nodes that may wait for an administrator's approval."""
UPGRADE = "upgrade"
"""Approver of nodes that joined before the server bound tokens to nodes."""


class StoredNode(msgspec.Struct, frozen=True, kw_only=True):
    """Stored node with its last hello and rules.

    Attributes:
        principal: the principal of the agent's token.
        hello: the node's last hello, without attempts.
        seen_ns: stored time of the last message, nanoseconds since 1970, up to some seconds old.
        forgotten_ns: time when an operator declared the node dead, or None.
        token_id: identifier of the token of the node's last hello.
        rules: decisions of operators about the node. Only the function `rule` writes this field.
        revoked_ns: time when an administrator revoked the node, or None. An admitted hello ends the revocation.
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
    revoked_ns: int | None = None

    @property
    def unavailable(self) -> tuple[str, ...]:
        """Return the devices that the node or an operator has excluded from scheduling."""
        left_out = (one.uuid for one in self.rules.quarantined if one.uuid not in self.hello.unavailable)
        return (*self.hello.unavailable, *left_out)

    @property
    def takes_crews(self) -> bool:
        """Return True if the node supports gangs on several nodes and requests to report."""
        return CREWS in self.hello.takes


class RuledNode(msgspec.Struct, frozen=True, kw_only=True):
    """Compact form of a node with rules from operators."""

    id: str
    name: str
    rules: NodeRules


def every(connection: sa.Connection) -> list[StoredNode]:
    """Return all nodes except forgotten nodes, by name."""
    query = sa.select(nodes).where(nodes.c.forgotten_ns.is_(None)).order_by(nodes.c.name)
    return [_from_row(row._mapping) for row in connection.execute(query)]


def get(connection: sa.Connection, node_id: str) -> StoredNode | None:
    """Return a node by its identifier, including forgotten nodes, or None."""
    return _first(connection, nodes.c.id == node_id)


def pool_of(connection: sa.Connection, node_id: str) -> str:
    """Return the current pool of a node, or "" for an unknown node."""
    return connection.scalar(sa.select(nodes.c.pool).where(nodes.c.id == node_id)) or ""


def named(connection: sa.Connection, name: str) -> StoredNode | None:
    """Return a node by its name, including forgotten nodes, or None."""
    return _first(connection, nodes.c.name == name)


def ruled(connection: sa.Connection) -> list[RuledNode]:
    """Return the nodes with rules from operators, except forgotten nodes."""
    query = sa.select(nodes.c.id, nodes.c.name, nodes.c.rules_json).where(nodes.c.forgotten_ns.is_(None))
    rows = connection.execute(query.where(nodes.c.rules_json != _NO_RULES).order_by(nodes.c.name))
    return [RuledNode(id=row.id, name=row.name, rules=_rules_decoder.decode(row.rules_json)) for row in rows]


def rule(connection: sa.Connection, node_id: str, rules: NodeRules) -> None:
    """Store the rules of a node."""
    text = _NO_RULES if rules == NodeRules() else msgspec.json.encode(rules).decode()
    connection.execute(nodes.update().where(nodes.c.id == node_id).values(rules_json=text))


def insert(connection: sa.Connection, node: StoredNode) -> None:
    """Insert a new node."""
    connection.execute(nodes.insert(), {"id": node.id, "name": node.name, **_columns(node)})


def change(connection: sa.Connection, node: StoredNode) -> None:
    """Update all columns of a node except its identifier and name."""
    connection.execute(nodes.update().where(nodes.c.id == node.id).values(**_columns(node)))


def heard(connection: sa.Connection, node: StoredNode, *, hello: AgentHello, seen_ns: int) -> None:
    """Update a node's hello after a heartbeat.

    A heartbeat does not change columns that operators set, such as the pool.

    Args:
        node: the row as read in this transaction. If the node has rebooted since, the function writes nothing.
        hello: the new hello.
        seen_ns: now, nanoseconds since 1970.
    """
    same = sa.and_(nodes.c.id == node.id, nodes.c.boot_id == node.boot_id, nodes.c.forgotten_ns.is_(None))
    values = {"hello_json": _hello_json(hello), "seen_ns": seen_ns}
    connection.execute(nodes.update().where(same).values(**values))


def drain(connection: sa.Connection, node_id: str, why: str) -> None:
    """Prevent placements on a node until the node's next heartbeat allows placements."""
    node = get(connection, node_id)
    if node is not None:
        hello = msgspec.structs.replace(node.hello, draining=node.hello.draining or why)
        connection.execute(nodes.update().where(nodes.c.id == node_id).values(hello_json=_hello_json(hello)))


def is_still(connection: sa.Connection, node: StoredNode) -> bool:
    """Return True if a node still has the boot, machine, pool and rules that the caller has read.

    The check rewrites the node's row without a change. Because of the rewrite, a concurrent change of the node causes a
    conflict on PostgreSQL. After a write conflict, the database layer retries one of the transactions.
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
    """Mark a node as dead. If a dead node reconnects, the node becomes a member again."""
    connection.execute(nodes.update().where(nodes.c.id == node_id).values(forgotten_ns=at_ns))


def revoke(connection: sa.Connection, node_id: str, *, at_ns: int) -> None:
    """Mark a node as revoked. The server then accepts no reports about the node's attempts."""
    connection.execute(nodes.update().where(nodes.c.id == node_id).values(revoked_ns=at_ns))


def replace_keys(connection: sa.Connection, node: StoredNode, keys: NodeKeys) -> None:
    """Store the new public keys of a node in its last hello."""
    hello = msgspec.structs.replace(node.hello, keys=keys)
    connection.execute(nodes.update().where(nodes.c.id == node.id).values(hello_json=_hello_json(hello)))


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
        "revoked_ns": node.revoked_ns,
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
    """Decode a node's hello, with a cache because the server reads nodes often."""
    return _decoder.decode(text)


def by_id(found: Sequence[StoredNode]) -> dict[str, StoredNode]:
    """Return nodes by identifier."""
    return {node.id: node for node in found}


class StoredBinding(msgspec.Struct, frozen=True, kw_only=True):
    """Stored binding of a token to a node, with request time, approval time and approver.

    Attributes:
        enrolled_ns: time when the server bound the node's key, nanoseconds since 1970, or None without a key.
        rotate_ns: time of an administrator's request for another key, or None if the node has followed the request.
    """

    token: str
    node: NodeIdentity
    asked_ns: int
    approved_ns: int | None = None
    by: str = ""
    enrolled_ns: int | None = None
    rotate_ns: int | None = None

    @property
    def binding(self) -> TokenBinding:
        """Return the binding as a `TokenBinding` for the rules in `model/`."""
        return TokenBinding(node=self.node, approved=self.approved_ns is not None)


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """Join token with its remaining uses, and the only allowed node name or ""."""

    token: str
    node: str
    uses_left: int


def find(connection: sa.Connection, token_id: str) -> StoredBinding | None:
    """Return the binding of a token to a node, or None."""
    row = connection.execute(sa.select(node_bindings).where(node_bindings.c.token == token_id)).first()
    return None if row is None else _binding(row)


def bind(connection: sa.Connection, token_id: str, node: NodeIdentity, *, by: str, at_ns: int) -> None:
    """Bind a token to an approved node, in place of the token's previous binding.

    Args:
        connection: connection of the transaction.
        token_id: identifier of the token.
        node: the node of the token. With the name "", the token is bound to the first node that uses it in a hello.
        by: the approver: a principal, the identifier of a join token, or "server".
        at_ns: now, nanoseconds since 1970.
    """
    there = find(connection, token_id)
    before = there or StoredBinding(token=token_id, node=node, asked_ns=at_ns)
    _write(connection, msgspec.structs.replace(before, approved_ns=at_ns, by=by), node, there, at_ns=at_ns)


def rebind(connection: sa.Connection, binding: StoredBinding, node: NodeIdentity, *, at_ns: int) -> None:
    """Update the node identity in a token's binding without a new approval."""
    _write(connection, binding, node, binding, at_ns=at_ns)


def suspend(connection: sa.Connection, binding: StoredBinding, node: NodeIdentity, *, at_ns: int) -> None:
    """Update the node identity in a token's binding, which then needs another approval."""
    _write(connection, msgspec.structs.replace(binding, approved_ns=None, by=""), node, binding, at_ns=at_ns)


def request_rotation(connection: sa.Connection, token_id: str, *, at_ns: int) -> None:
    """Record that a node must replace its key."""
    connection.execute(node_bindings.update().where(node_bindings.c.token == token_id).values(rotate_ns=at_ns))


def enrolled(connection: sa.Connection) -> dict[str, StoredBinding]:
    """Return the bindings of all tokens to nodes with a key, by token identifier."""
    query = sa.select(node_bindings).where(node_bindings.c.key != "")
    return {row.token: _binding(row) for row in connection.execute(query)}


def valid_bindings(connection: sa.Connection, name: str, *, now_ns: int) -> list[StoredBinding]:
    """Return the bindings of a node name, approved or not, whose tokens are valid."""
    query = _of_valid_tokens(now_ns).where(node_bindings.c.node == name).order_by(node_bindings.c.token)
    return [_binding(row) for row in connection.execute(query)]


def ask(connection: sa.Connection, token_id: str, node: NodeIdentity, *, at_ns: int, by: str = "") -> bool:
    """Store a node that waits for approval, and return False if too many nodes already wait.

    `by` is the join token with which the node joined, or "".
    """
    waiting = sa.select(sa.func.count()).select_from(node_bindings).where(node_bindings.c.approved_ns.is_(None))
    if (connection.scalar(waiting) or 0) >= PENDING_MAX:
        return False
    _write(connection, StoredBinding(token=token_id, node=node, asked_ns=at_ns, by=by), node, None, at_ns=at_ns)
    return True


def pending(connection: sa.Connection, *, now_ns: int) -> list[StoredBinding]:
    """Return the nodes with valid tokens that wait for approval, by name."""
    query = _of_valid_tokens(now_ns).where(node_bindings.c.approved_ns.is_(None))
    query = query.order_by(node_bindings.c.node, node_bindings.c.token)
    return [_binding(row) for row in connection.execute(query)]


def _of_valid_tokens(now_ns: int) -> sa.Select[Any]:
    in_time = sa.or_(tokens.c.expires_ns.is_(None), tokens.c.expires_ns > now_ns)
    query = sa.select(node_bindings).join(tokens, tokens.c.id == node_bindings.c.token)
    return query.where(tokens.c.revoked_ns.is_(None), in_time)


def of_home(connection: sa.Connection, node: NodeIdentity, *, by: str = "") -> list[StoredBinding]:
    """Return the token bindings of one installation under a given node name."""
    same = sa.and_(node_bindings.c.node == node.name, node_bindings.c.instance == node.instance)
    query = sa.select(node_bindings).where(same, node_bindings.c.approved_by == by if by else sa.true())
    return [_binding(row) for row in connection.execute(query)]


def invite(connection: sa.Connection, invitation: Invitation) -> None:
    """Insert the invitation of a join token."""
    values = {"token": invitation.token, "node": invitation.node, "uses_left": invitation.uses_left}
    connection.execute(invitations.insert().values(values))


def invitation(connection: sa.Connection, token_id: str) -> Invitation | None:
    """Return the invitation of a join token, or None for a token of another kind."""
    row = connection.execute(sa.select(invitations).where(invitations.c.token == token_id)).first()
    return None if row is None else Invitation(token=row.token, node=row.node, uses_left=row.uses_left)


def use(connection: sa.Connection, token_id: str) -> bool:
    """Consume one use of a join token, and return False if no use is left.

    Only one of several concurrent callers gets the last use of a token.
    """
    left = sa.and_(invitations.c.token == token_id, invitations.c.uses_left > 0)
    done = connection.execute(invitations.update().where(left).values(uses_left=invitations.c.uses_left - 1))
    return done.rowcount == 1


def _write(
    connection: sa.Connection, binding: StoredBinding, node: NodeIdentity, there: StoredBinding | None, *, at_ns: int
) -> None:
    """Store a binding with the identity of `node`. `there` is the stored binding, or None for a new one."""
    values: dict[str, object] = {
        "node": node.name,
        "machine": node.machine,
        "instance": node.instance,
        "asked_ns": binding.asked_ns,
        "approved_ns": binding.approved_ns,
        "approved_by": binding.by,
    }
    if node.key != ("" if there is None else there.node.key):
        values |= {"key": node.key, "enrolled_ns": at_ns if node.key else None, "rotate_ns": None}
    if there is None:
        connection.execute(node_bindings.insert().values(token=binding.token, **values))
    else:
        connection.execute(node_bindings.update().where(node_bindings.c.token == binding.token).values(**values))


def _binding(row: sa.Row[tuple[object, ...]]) -> StoredBinding:
    return StoredBinding(
        token=row.token,
        node=NodeIdentity(name=row.node, machine=row.machine, instance=row.instance, key=row.key),
        asked_ns=row.asked_ns,
        approved_ns=row.approved_ns,
        by=row.approved_by,
        enrolled_ns=row.enrolled_ns,
        rotate_ns=row.rotate_ns,
    )
