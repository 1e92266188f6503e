"""Adds sessions of browsers, which are tokens of another kind."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = depends_on = None


def upgrade() -> None:
    """Add the kind of a token and the origin of a session. NULL means a token of the API."""
    op.add_column("tokens", sa.Column("kind", sa.String(16), nullable=True))
    op.add_column("tokens", sa.Column("origin_json", sa.Text(), nullable=True))
