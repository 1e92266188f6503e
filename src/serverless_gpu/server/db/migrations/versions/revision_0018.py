"""Adds passwords, identities at an identity provider, and the creators of tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = depends_on = None


def upgrade() -> None:
    """Add the tables, and take the creators of existing tokens from the audit."""
    op.create_table(
        "passwords",
        sa.Column("principal", sa.String(64), sa.ForeignKey("principals.name"), primary_key=True),
        sa.Column("hash", sa.Text(), nullable=True),
        sa.Column("changed_ns", sa.BigInteger(), nullable=True),
        sa.Column("reset_sha256", sa.String(64), unique=True, nullable=True),
        sa.Column("reset_until_ns", sa.BigInteger(), nullable=True),
    )
    op.create_table(
        "identities",
        sa.Column("id", sa.String(26), primary_key=True),
        sa.Column("issuer", sa.String(512), nullable=False),
        sa.Column("subject", sa.String(256), nullable=False),
        sa.Column("principal", sa.String(64), sa.ForeignKey("principals.name"), nullable=False),
        sa.Column("shown", sa.String(256), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("used_ns", sa.BigInteger(), nullable=True),
        sa.UniqueConstraint("issuer", "subject", name="uq_identities_issuer"),
    )
    op.create_index("ix_identities_principal", "identities", ["principal"])
    op.add_column("tokens", sa.Column("made_by", sa.String(64), nullable=True))
    op.execute(
        "UPDATE tokens SET made_by = (SELECT MIN(audit.principal) FROM audit"
        " WHERE audit.subject = tokens.id AND audit.action = 'token.create') WHERE kind IS NULL"
    )
