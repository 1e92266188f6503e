"""Adds the network policy of pools."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = depends_on = None


def upgrade() -> None:
    """Add the columns for the mode and the allow-list."""
    op.add_column("pools", sa.Column("egress", sa.String(length=8), nullable=True))
    op.add_column("pools", sa.Column("allow_json", sa.Text(), nullable=True))
