"""Adds the database identity and the generation of the owning server."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0003"
branch_labels = depends_on = None


def upgrade() -> None:
    """Create the empty server identity table."""
    op.create_table(
        "server_identity",
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("database_id", sa.String(length=32), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.String(length=64), nullable=False),
        sa.Column("claimed_ns", sa.BigInteger(), nullable=False),
        sa.Column("commits", sa.BigInteger(), nullable=False),
        sa.Column("probed_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_server_identity")),
    )
