"""Adds a table of account tags, so that reports need not parse JSON."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = depends_on = None

_ACCOUNTS_AT_ONCE = 10_000


def upgrade() -> None:
    """Create the table of account tags, and fill the table from the accounts."""
    op.create_table(
        "account_tags",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("account_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_account_tags_account_id_accounts")),
        sa.PrimaryKeyConstraint("key", "account_id", name=op.f("pk_account_tags")),
        sqlite_with_rowid=False,
    )
    _fill(op.get_bind())
    op.create_index(op.f("ix_account_tags_value"), "account_tags", ["key", "value"], unique=False)


def _fill(connection: sa.Connection) -> None:
    accounts = sa.table("accounts", sa.column("id"), sa.column("tags_json"))
    tags = sa.table("account_tags", sa.column("key"), sa.column("account_id"), sa.column("value"))
    decode = msgspec.json.Decoder(dict[str, str]).decode
    after = 0
    while True:
        some = sa.select(accounts).where(accounts.c.id > after, accounts.c.tags_json != "{}")
        found = list(connection.execute(some.order_by(accounts.c.id).limit(_ACCOUNTS_AT_ONCE)))
        if not found:
            return
        after = found[-1].id
        rows = [
            {"key": key, "account_id": row.id, "value": value}
            for row in found
            for key, value in decode(row.tags_json).items()
            if value and "\0" not in key + value
        ]
        if rows:
            connection.execute(tags.insert(), rows)
