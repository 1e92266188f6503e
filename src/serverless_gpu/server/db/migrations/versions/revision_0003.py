"""Adds join tokens, and bindings between node tokens and nodes."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = depends_on = None

_NODES = sa.table(
    "nodes",
    sa.column("name", sa.String),
    sa.column("machine", sa.String),
    sa.column("token_id", sa.String),
    sa.column("hello_json", sa.Text),
    sa.column("seen_ns", sa.BigInteger),
    sa.column("forgotten_ns", sa.BigInteger),
)
_TOKENS = sa.table("tokens", sa.column("id", sa.String))


def upgrade() -> None:
    """Create the tables, and bind each node token to the last node that used the token."""
    bindings = op.create_table(
        "node_bindings",
        sa.Column("token", sa.String(length=26), nullable=False),
        sa.Column("node", sa.String(length=256), nullable=False),
        sa.Column("machine", sa.String(length=64), nullable=False),
        sa.Column("instance", sa.String(length=64), nullable=False),
        sa.Column("asked_ns", sa.BigInteger(), nullable=False),
        sa.Column("approved_ns", sa.BigInteger(), nullable=True),
        sa.Column("approved_by", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["token"], ["tokens.id"], name=op.f("fk_node_bindings_token_tokens")),
        sa.PrimaryKeyConstraint("token", name=op.f("pk_node_bindings")),
    )
    op.create_index("ix_node_bindings_node", "node_bindings", ["node"], unique=False)
    op.create_table(
        "invitations",
        sa.Column("token", sa.String(length=26), nullable=False),
        sa.Column("node", sa.String(length=256), nullable=False),
        sa.Column("uses_left", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["token"], ["tokens.id"], name=op.f("fk_invitations_token_tokens")),
        sa.PrimaryKeyConstraint("token", name=op.f("pk_invitations")),
    )
    rows = list(_bindings(op.get_bind()).values())
    if rows:
        op.bulk_insert(bindings, rows)


def _bindings(connection: sa.Connection) -> dict[str, dict[str, object]]:
    """Return each node token's binding to the last node that used the token."""
    query = (
        sa.select(_NODES)
        .join(_TOKENS, _TOKENS.c.id == _NODES.c.token_id)
        .where(_NODES.c.forgotten_ns.is_(None))
        .order_by(_NODES.c.seen_ns)
    )
    return {
        row.token_id: {
            "token": row.token_id,
            "node": row.name,
            "machine": row.machine,
            "instance": json.loads(row.hello_json).get("instance", ""),
            "asked_ns": row.seen_ns,
            "approved_ns": row.seen_ns,
            "approved_by": "upgrade",
        }
        for row in connection.execute(query)
    }
