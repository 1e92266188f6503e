"""Adds checkpoint and duration counters to runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = depends_on = None


def upgrade() -> None:
    """Add columns for the number, duration and checkpoints of a run's attempts."""
    for name, kind in (
        ("saved", sa.Integer),
        ("unsaved", sa.Integer),
        ("ran", sa.Integer),
        ("ran_ms", sa.BigInteger),
    ):
        op.add_column("runs", sa.Column(name, kind, nullable=False, server_default="0"))
