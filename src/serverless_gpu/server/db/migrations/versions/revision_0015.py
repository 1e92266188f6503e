"""Adds columns, tags and indexes for searches of runs, and the arguments of calls."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = depends_on = None

_RUNS_AT_ONCE = 2_000


def upgrade() -> None:
    """Add and fill the columns, the table of tags, and the indexes."""
    op.add_column("runs", sa.Column("gpu_type", sa.String(40), server_default="", nullable=False))
    op.add_column("runs", sa.Column("said", sa.String(200), server_default="", nullable=False))
    op.add_column("runs", sa.Column("arguments_json", sa.Text(), nullable=True))
    op.create_table(
        "run_tags",
        sa.Column("key", sa.String(256), nullable=False),
        sa.Column("value", sa.String(256), nullable=False),
        sa.Column("run_id", sa.String(26), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_tags_run_id_runs")),
        sa.PrimaryKeyConstraint("key", "value", "run_id", name=op.f("pk_run_tags")),
        sqlite_with_rowid=False,
    )
    _fill(op.get_bind())
    op.create_index("ix_run_tags_run", "run_tags", ["run_id"], unique=False)
    listed = ["created_ns", "name", "state", "owner", "team", "gpu_type", "said"]
    op.create_index("ix_runs_list", "runs", ["id", *listed], unique=False)
    op.create_index(
        "ix_runs_ended",
        "runs",
        ["ended_ns", "id", *listed],
        unique=False,
        sqlite_where=sa.text("ended_ns IS NOT NULL"),
        postgresql_where=sa.text("ended_ns IS NOT NULL"),
    )


def _fill(connection: sa.Connection) -> None:
    names = ("id", "fence", "detail", "spec_json", "tags_json", "gpu_type", "said")
    runs = sa.table("runs", *map(sa.column, names))
    attempts = sa.table("attempts", *map(sa.column, ("run_id", "fence", "gpu_type")))
    tags = sa.table("run_tags", *map(sa.column, ("key", "value", "run_id")))
    current = sa.and_(attempts.c.run_id == runs.c.id, attempts.c.fence == runs.c.fence)
    query = sa.select(*(runs.c[name] for name in names[:5]), attempts.c.gpu_type.label("placed_type")).select_from(
        runs.outerjoin(attempts, current)
    )
    change = runs.update().where(runs.c.id == sa.bindparam("run"))
    change = change.values(gpu_type=sa.bindparam("kind"), said=sa.bindparam("text"))
    decode_tags = msgspec.json.Decoder(dict[str, str]).decode
    after = ""
    while True:
        found = connection.execute(query.where(runs.c.id > after).order_by(runs.c.id).limit(_RUNS_AT_ONCE)).all()
        if not found:
            return
        after = found[-1].id
        connection.execute(
            change,
            [
                {
                    "run": row.id,
                    "kind": (row.placed_type or _requested_type(row.spec_json))[:40],
                    "text": row.detail.lower()[:200],
                }
                for row in found
            ],
        )
        rows = [
            {"key": key, "value": value, "run_id": row.id}
            for row in found
            for key, value in decode_tags(row.tags_json).items()
        ]
        if rows:
            connection.execute(tags.insert(), rows)


def _requested_type(spec: str) -> str:
    resources = msgspec.json.decode(spec).get("resources") or {}
    return resources.get("gpu_type") or ""
