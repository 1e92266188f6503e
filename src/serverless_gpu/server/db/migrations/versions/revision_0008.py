"""Adds accounts without tags (plain accounts) and their ledger sums."""

from __future__ import annotations

import hashlib

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = depends_on = None

_SUMS = (
    "runs",
    "queued_ms",
    "environment_ms",
    "start_ms",
    "run_ms",
    "stop_ms",
    "gate_ms",
    "idle_ms",
    "gpu_ms",
    "billed_ms",
    "unpriced_ms",
    "provisional_ms",
    "core_ms",
    "memory_mib_ms",
    "micros",
    "dbu_micros",
)
_VALUES = (
    "owner",
    "gpu_type",
    "team",
    "pool",
    "reserved",
    "policy",
    "name",
    "workload",
    "environment",
    "currency",
    "tags",
)
"""Account columns in the digest of an account."""
_ACCOUNTS_AT_ONCE = 10_000


def upgrade() -> None:
    """Set the plain account of each account, and delete outdated ledger sums."""
    for table in ("accounts", "utilisations"):
        op.add_column(table, sa.Column("plain_id", sa.BigInteger(), nullable=False, server_default="0"))
    _fill(op.get_bind())
    op.create_index(
        op.f("ix_utilisations_plain"), "utilisations", ["day", "plain_id", "observed_ms", "busy_ms"], unique=False
    )
    op.create_table(
        "used_plain_days",
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("account_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=name == "micros") for name in _SUMS),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_used_plain_days_account_id_accounts")),
        sa.PrimaryKeyConstraint("day", "account_id", name=op.f("pk_used_plain_days")),
    )
    op.execute("DELETE FROM used_days")
    op.execute("DELETE FROM folded")


def _fill(connection: sa.Connection) -> None:
    accounts = sa.Table("accounts", sa.MetaData(), autoload_with=connection)
    utilisations = sa.Table("utilisations", sa.MetaData(), autoload_with=connection)
    encode = msgspec.json.Encoder(order="sorted").encode
    plain: dict[str, int] = {}
    after = 0
    while True:
        query = sa.select(accounts).where(accounts.c.id > after).order_by(accounts.c.id).limit(_ACCOUNTS_AT_ONCE)
        rows = [dict(row._mapping) for row in connection.execute(query)]
        if not rows:
            break
        after = rows[-1]["id"]
        changes = []
        for row in rows:
            values = {**row, "tags": {}, "environment": "", "tags_json": "{}", "reserved": bool(row["reserved"])}
            digest = hashlib.sha256(encode({name: values[name] for name in _VALUES})).hexdigest()
            if digest not in plain:
                plain[digest] = _plain(connection, accounts, values, digest)
            changes.append({"of": row["id"], "plain": plain[digest]})
        own = accounts.c.id == sa.bindparam("of")
        connection.execute(accounts.update().where(own).values(plain_id=sa.bindparam("plain")), changes)
    plain_id = sa.select(accounts.c.plain_id).where(accounts.c.id == utilisations.c.account_id).scalar_subquery()
    connection.execute(utilisations.update().values(plain_id=plain_id))


def _plain(connection: sa.Connection, accounts: sa.Table, values: dict[str, object], digest: str) -> int:
    """Return a plain account's number, and create the account if it is missing."""
    found = connection.scalar(sa.select(accounts.c.id).where(accounts.c.sha256 == digest))
    if found is None:
        row = {name: value for name, value in values.items() if name not in ("id", "tags", "plain_id")}
        found = connection.execute(accounts.insert().returning(accounts.c.id), row | {"sha256": digest}).scalar_one()
    number = int(found)
    connection.execute(accounts.update().where(accounts.c.id == number).values(plain_id=number))
    return number
