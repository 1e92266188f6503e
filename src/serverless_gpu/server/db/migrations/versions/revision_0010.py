"""Adds the keys of nodes, and the revocation of nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = depends_on = None


def upgrade() -> None:
    """Add columns for keys and revocations. Nodes without a key stay valid until they have one."""
    op.add_column("node_bindings", sa.Column("key", sa.String(length=64), nullable=False, server_default=""))
    op.add_column("node_bindings", sa.Column("enrolled_ns", sa.BigInteger(), nullable=True))
    op.add_column("node_bindings", sa.Column("rotate_ns", sa.BigInteger(), nullable=True))
    op.add_column("nodes", sa.Column("revoked_ns", sa.BigInteger(), nullable=True))
