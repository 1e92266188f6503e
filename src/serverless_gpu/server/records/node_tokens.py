"""Repository of what nodes' tokens are bound to, and of join tokens: `model/access/node_identity.py` decides with it.

node_bindings   token ─▶ the node that it is for; not approved: it waits for an administrator
invitations     join token ─▶ how many homes may still join with it
"""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.access.node_identity import Binding, Identity
from serverless_gpu.server.db.tables import invitations, node_bindings, tokens

PENDING_MAX = 1_000
"""Nodes that may wait for an administrator at a time."""
UPGRADE = "upgrade"
"""Who approved what was there before tokens were bound."""


class StoredBinding(msgspec.Struct, frozen=True, kw_only=True):
    """A row: whose a token is, since when it says so, who approved that and when."""

    token: str
    node: Identity
    asked_ns: int
    approved_ns: int | None = None
    by: str = ""

    @property
    def binding(self) -> Binding:
        """Return what is decided with."""
        return Binding(node=self.node, approved=self.approved_ns is not None)


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """A join token: the only name that it lets in, or "", and how many homes it still lets in."""

    token: str
    node: str
    uses_left: int


def find(connection: sa.Connection, token_id: str) -> StoredBinding | None:
    """Return what a token is bound to, or None."""
    row = connection.execute(sa.select(node_bindings).where(node_bindings.c.token == token_id)).first()
    return None if row is None else _binding(row)


def bind(connection: sa.Connection, token_id: str, node: Identity, *, by: str, at_ns: int) -> None:
    """Bind a token to a node that is approved, in place of what it was bound to.

    Args:
        connection: of the transaction.
        token_id: of the token.
        node: whose it is; a name of "" for the first node that says hello with it.
        by: who approved it: a principal, the identifier of a join token, or "server".
        at_ns: now, nanoseconds since 1970.
    """
    there = find(connection, token_id)
    asked_ns = at_ns if there is None else there.asked_ns
    _write(connection, StoredBinding(token=token_id, node=node, asked_ns=asked_ns, approved_ns=at_ns, by=by), there)


def rebind(connection: sa.Connection, binding: StoredBinding, node: Identity) -> None:
    """Write down what a node says it is by now; who approved it stays."""
    _write(connection, msgspec.structs.replace(binding, node=node), binding)


def ask(connection: sa.Connection, token_id: str, node: Identity, *, at_ns: int) -> bool:
    """Note that a node waits for an administrator; return whether there was room."""
    waiting = sa.select(sa.func.count()).select_from(node_bindings).where(node_bindings.c.approved_ns.is_(None))
    if (connection.scalar(waiting) or 0) >= PENDING_MAX:
        return False
    _write(connection, StoredBinding(token=token_id, node=node, asked_ns=at_ns), None)
    return True


def pending(connection: sa.Connection, *, now_ns: int) -> list[StoredBinding]:
    """Return the nodes that wait for an administrator and whose tokens are still good, by name."""
    query = (
        sa.select(node_bindings)
        .join(tokens, tokens.c.id == node_bindings.c.token)
        .where(
            node_bindings.c.approved_ns.is_(None),
            tokens.c.revoked_ns.is_(None),
            sa.or_(tokens.c.expires_ns.is_(None), tokens.c.expires_ns > now_ns),
        )
        .order_by(node_bindings.c.node, node_bindings.c.token)
    )
    return [_binding(row) for row in connection.execute(query)]


def of_home(connection: sa.Connection, node: Identity, *, by: str = "") -> list[StoredBinding]:
    """Return the bindings of tokens to a home under a name.

    Args:
        connection: reading is enough.
        node: the name, and the home's instance.
        by: only those that this join token approved; "" for all.
    """
    same = sa.and_(node_bindings.c.node == node.name, node_bindings.c.instance == node.instance)
    query = sa.select(node_bindings).where(same, node_bindings.c.approved_by == by if by else sa.true())
    return [_binding(row) for row in connection.execute(query)]


def invite(connection: sa.Connection, invitation: Invitation) -> None:
    """Write down what a join token lets in."""
    values = {"token": invitation.token, "node": invitation.node, "uses_left": invitation.uses_left}
    connection.execute(invitations.insert().values(values))


def invitation(connection: sa.Connection, token_id: str) -> Invitation | None:
    """Return what a join token lets in, or None where it is none."""
    row = connection.execute(sa.select(invitations).where(invitations.c.token == token_id)).first()
    return None if row is None else Invitation(token=row.token, node=row.node, uses_left=row.uses_left)


def use(connection: sa.Connection, token_id: str) -> bool:
    """Use a join token once; return whether a use was left. Of two that come at once, one gets the last."""
    left = sa.and_(invitations.c.token == token_id, invitations.c.uses_left > 0)
    done = connection.execute(invitations.update().where(left).values(uses_left=invitations.c.uses_left - 1))
    return done.rowcount == 1


def _write(connection: sa.Connection, binding: StoredBinding, there: StoredBinding | None) -> None:
    values = {
        "node": binding.node.name,
        "machine": binding.node.machine,
        "instance": binding.node.instance,
        "asked_ns": binding.asked_ns,
        "approved_ns": binding.approved_ns,
        "approved_by": binding.by,
    }
    if there is None:
        connection.execute(node_bindings.insert().values(token=binding.token, **values))
    else:
        connection.execute(node_bindings.update().where(node_bindings.c.token == binding.token).values(**values))


def _binding(row: sa.Row[tuple[object, ...]]) -> StoredBinding:
    return StoredBinding(
        token=row.token,
        node=Identity(name=row.node, machine=row.machine, instance=row.instance),
        asked_ns=row.asked_ns,
        approved_ns=row.approved_ns,
        by=row.approved_by,
    )
