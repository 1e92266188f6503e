"""Adds the last use of secrets, and indexes for pages about environments and the audit."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0015"
branch_labels = depends_on = None


def upgrade() -> None:
    """Add the time of a secret's last use, which is NULL before the first use, and the indexes."""
    op.add_column("secrets", sa.Column("used_ns", sa.BigInteger(), nullable=True))
    op.create_index("ix_runs_snapshot", "runs", ["snapshot", "created_ns", "owner"])
    unsettled = sa.text("settled_ns IS NULL")
    op.create_index("ix_runs_unsettled", "runs", ["id"], sqlite_where=unsettled, postgresql_where=unsettled)
    op.create_index("ix_audit_principal", "audit", ["principal"])
    op.create_index("ix_audit_action", "audit", ["action"])
    op.create_index("ix_audit_at", "audit", ["at_ns"])
