"""Adds what administrators decided about the isolation of each pool, and which tokens are renewed by their use."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = depends_on = None


def upgrade() -> None:
    """Add the columns; NULL says that nobody has decided yet, and that a token is not renewed."""
    op.add_column("pools", sa.Column("isolation", sa.String(length=16), nullable=True))
    op.add_column("tokens", sa.Column("renews", sa.Boolean(), nullable=True))
