"""Adds the rights of principals."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = depends_on = None


def upgrade() -> None:
    """Add a column for granted rights. NULL means that a principal has no granted right."""
    op.add_column("principals", sa.Column("rights_json", sa.Text(), nullable=True))
