"""Budgets, policies and priority classes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = depends_on = None


def upgrade() -> None:
    """Count what attempts of a run saved, how many there were and how long they took."""
    for name, kind in (
        ("saved", sa.Integer),
        ("unsaved", sa.Integer),
        ("ran", sa.Integer),
        ("ran_ms", sa.BigInteger),
    ):
        op.add_column("runs", sa.Column(name, kind, nullable=False, server_default="0"))
