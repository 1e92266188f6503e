"""Adds the package indexes of the index proxy."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = depends_on = None


def upgrade() -> None:
    """Create the table of package indexes."""
    op.create_table(
        "indexes",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("hosts_json", sa.Text(), nullable=False),
        sa.Column("private", sa.Boolean(), nullable=False),
        sa.Column("secret", sa.String(length=64), nullable=False),
        sa.Column("secret_kind", sa.String(length=8), nullable=False),
        sa.Column("secret_owner", sa.String(length=64), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("by", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_indexes")),
    )
