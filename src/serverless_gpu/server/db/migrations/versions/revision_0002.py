"""Adds pool isolation and a flag for tokens that each use renews."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = depends_on = None


def upgrade() -> None:
    """Add the columns for pool isolation and token renewal."""
    op.add_column("pools", sa.Column("isolation", sa.String(length=16), nullable=True))
    op.add_column("tokens", sa.Column("renews", sa.Boolean(), nullable=True))
