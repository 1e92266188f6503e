"""Creates the tables of the first version."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = depends_on = None


def upgrade() -> None:
    """Create all tables."""
    _people()
    _nodes()
    _runs()
    _accounts()
    _attempts()
    _outcomes()
    _audit()
    _secrets()
    _queue()
    _ledger()
    _reports()
    _spending()


def _people() -> None:
    op.create_table(
        "principals",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("disabled_ns", sa.BigInteger(), nullable=True),
        sa.Column("runs", sa.String(length=8), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_principals")),
    )
    op.create_table(
        "teams",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_teams")),
    )
    op.create_table(
        "members",
        sa.Column("team", sa.String(length=64), nullable=False),
        sa.Column("principal", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["principal"], ["principals.name"], name=op.f("fk_members_principal_principals")),
        sa.ForeignKeyConstraint(["team"], ["teams.name"], name=op.f("fk_members_team_teams")),
        sa.PrimaryKeyConstraint("team", "principal", name=op.f("pk_members")),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=26), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("principal", sa.String(length=64), nullable=False),
        sa.Column("label", sa.String(length=256), nullable=False),
        sa.Column("scopes_json", sa.Text(), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("expires_ns", sa.BigInteger(), nullable=True),
        sa.Column("revoked_ns", sa.BigInteger(), nullable=True),
        sa.Column("used_ns", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["principal"], ["principals.name"], name=op.f("fk_tokens_principal_principals")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("sha256", name=op.f("uq_tokens_sha256")),
    )
    op.create_index(op.f("ix_tokens_principal"), "tokens", ["principal"], unique=False)


def _nodes() -> None:
    op.create_table(
        "drains",
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("principal", sa.String(length=64), nullable=False),
        sa.Column("since_ns", sa.BigInteger(), nullable=False),
        sa.Column("note", sa.String(length=256), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_drains")),
    )
    op.create_table(
        "pools",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("lends", sa.Boolean(), nullable=False),
        sa.Column("return_s", sa.Float(), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_pools")),
    )
    op.create_table(
        "nodes",
        sa.Column("id", sa.String(length=26), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("machine", sa.String(length=64), nullable=False),
        sa.Column("boot_id", sa.String(length=64), nullable=False),
        sa.Column("principal", sa.String(length=64), nullable=False),
        sa.Column("token_id", sa.String(length=26), nullable=False),
        sa.Column("pool", sa.String(length=64), nullable=False),
        sa.Column("hello_json", sa.Text(), nullable=False),
        sa.Column("seen_ns", sa.BigInteger(), nullable=False),
        sa.Column("forgotten_ns", sa.BigInteger(), nullable=True),
        sa.Column("rules_json", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["pool"], ["pools.name"], name=op.f("fk_nodes_pool_pools")),
        sa.ForeignKeyConstraint(["principal"], ["principals.name"], name=op.f("fk_nodes_principal_principals")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
        sa.UniqueConstraint("name", name=op.f("uq_nodes_name")),
    )


def _runs() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.String(length=26), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("team", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("pool", sa.String(length=64), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=32), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("stop", sa.String(length=16), nullable=True),
        sa.Column("retries_used", sa.Integer(), nullable=False),
        sa.Column("infra_retries_used", sa.Integer(), nullable=False),
        sa.Column("fault_retries_used", sa.Integer(), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("queued_ns", sa.BigInteger(), nullable=False),
        sa.Column("started_ns", sa.BigInteger(), nullable=True),
        sa.Column("ended_ns", sa.BigInteger(), nullable=True),
        sa.Column("settled_ns", sa.BigInteger(), nullable=True),
        sa.Column("events", sa.Integer(), nullable=False),
        sa.Column("request_sha256", sa.String(length=64), nullable=False),
        sa.Column("spec_json", sa.Text(), nullable=False),
        sa.Column("target_json", sa.Text(), nullable=False),
        sa.Column("tags_json", sa.Text(), nullable=False),
        sa.Column("snapshot", sa.String(length=64), nullable=False),
        sa.Column("context_sealed", sa.LargeBinary(), nullable=False),
        sa.Column("call", sa.LargeBinary(), nullable=True),
        sa.Column("client_version", sa.String(length=32), nullable=False),
        sa.Column("tracked", sa.Text(), nullable=False),
        sa.Column("promised_json", sa.Text(), nullable=True),
        sa.Column("restored_ns", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["owner"], ["principals.name"], name=op.f("fk_runs_owner_principals")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
    )
    op.create_index("ix_runs_owner", "runs", ["owner", "id"], unique=False)
    op.create_index(
        "ix_runs_succeeded",
        "runs",
        ["owner", "name", "id"],
        unique=False,
        sqlite_where=sa.text("state = 'SUCCEEDED'"),
        postgresql_where=sa.text("state = 'SUCCEEDED'"),
    )
    op.create_index("ix_runs_queue", "runs", ["state", "priority", "queued_ns"], unique=False)


def _accounts() -> None:
    op.create_table(
        "accounts",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("team", sa.String(length=64), nullable=False),
        sa.Column("pool", sa.String(length=64), nullable=False),
        sa.Column("reserved", sa.Boolean(), nullable=False),
        sa.Column("policy", sa.String(length=64), nullable=False),
        sa.Column("gpu_type", sa.String(length=256), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("workload", sa.String(length=16), nullable=False),
        sa.Column("environment", sa.String(length=64), nullable=False),
        sa.Column("currency", sa.String(length=8), nullable=False),
        sa.Column("tags_json", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_accounts")),
        sa.UniqueConstraint("sha256", name=op.f("uq_accounts_sha256")),
    )


def _attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("gpu_type", sa.String(length=256), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("num_nodes", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("before", sa.String(length=16), nullable=True),
        sa.Column("reason", sa.String(length=32), nullable=True),
        sa.Column("began", sa.Boolean(), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("started_ns", sa.BigInteger(), nullable=True),
        sa.Column("ended_ns", sa.BigInteger(), nullable=True),
        sa.Column("settled_ns", sa.BigInteger(), nullable=True),
        sa.Column("secrets_json", sa.Text(), nullable=False),
        sa.Column("tariff_json", sa.Text(), nullable=False),
        sa.Column("account_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("nonce", sa.String(length=64), nullable=False),
        sa.Column("chosen_json", sa.Text(), nullable=True),
        sa.Column("called_off", sa.Boolean(), nullable=False),
        sa.Column("released", sa.Boolean(), nullable=False),
        sa.Column("cause_json", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_attempts_account_id_accounts")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_attempts_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "fence", name=op.f("pk_attempts")),
    )
    _crews()
    op.create_table(
        "orders",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("node_id", sa.String(length=26), nullable=False),
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("crew", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("stop", sa.String(length=16), nullable=True),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("taken_ns", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_orders_node_id_nodes")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_orders")),
        sa.UniqueConstraint("run_id", "fence", "crew", "kind", "stop", name=op.f("uq_orders_run_id")),
    )
    op.create_index("ix_orders_open", "orders", ["node_id", "taken_ns", "seq"], unique=False)


def _crews() -> None:
    op.create_table(
        "crews",
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("crew", sa.Integer(), nullable=False),
        sa.Column("node_id", sa.String(length=26), nullable=False),
        sa.Column("boot_id", sa.String(length=64), nullable=False),
        sa.Column("first_rank", sa.Integer(), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("token_sha256", sa.String(length=64), nullable=False),
        sa.Column("lease_ns", sa.BigInteger(), nullable=False),
        sa.Column("grace_s", sa.Float(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("before", sa.String(length=16), nullable=True),
        sa.Column("began", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.String(length=32), nullable=True),
        sa.Column("proven", sa.Boolean(), nullable=False),
        sa.Column("sentence", sa.Text(), nullable=False),
        sa.Column("leave_ns", sa.BigInteger(), nullable=True),
        sa.Column("started_ns", sa.BigInteger(), nullable=True),
        sa.Column("ended_ns", sa.BigInteger(), nullable=True),
        sa.Column("settled_ns", sa.BigInteger(), nullable=True),
        sa.Column("late_reason", sa.String(length=32), nullable=True),
        sa.Column("stopped_json", sa.Text(), nullable=True),
        sa.Column("receipt_json", sa.Text(), nullable=True),
        sa.Column("halt_json", sa.Text(), nullable=True),
        sa.Column("returned", sa.Boolean(), nullable=False),
        sa.Column("uncharged", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_crews_node_id_nodes")),
        sa.ForeignKeyConstraint(
            ["run_id", "fence"], ["attempts.run_id", "attempts.fence"], name=op.f("fk_crews_run_id_attempts")
        ),
        sa.PrimaryKeyConstraint("run_id", "fence", "crew", name=op.f("pk_crews")),
        sa.UniqueConstraint("run_id", "fence", "node_id", name=op.f("uq_crews_run_id")),
        sa.UniqueConstraint("token_sha256", name=op.f("uq_crews_token_sha256")),
    )
    op.create_index(op.f("ix_crews_node_id"), "crews", ["node_id"], unique=False)
    some = sa.text("uncharged")
    op.create_index("ix_crews_uncharged", "crews", ["uncharged"], sqlite_where=some, postgresql_where=some)


def _outcomes() -> None:
    op.create_table(
        "events",
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("at_ns", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=32), nullable=True),
        sa.Column("sentence", sa.Text(), nullable=False),
        sa.Column("node", sa.String(length=256), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_events_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "seq", name=op.f("pk_events")),
    )
    op.create_table(
        "files",
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("inline", sa.LargeBinary(), nullable=True),
        sa.Column("parts_json", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id", "fence"], ["attempts.run_id", "attempts.fence"], name=op.f("fk_files_run_id_attempts")
        ),
        sa.PrimaryKeyConstraint("run_id", "fence", "name", name=op.f("pk_files")),
    )
    op.create_table(
        "facts",
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("crew", sa.Integer(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("fact_json", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "fence", "crew"],
            ["crews.run_id", "crews.fence", "crews.crew"],
            name=op.f("fk_facts_run_id_crews"),
        ),
        sa.PrimaryKeyConstraint("run_id", "fence", "crew", "seq", name=op.f("pk_facts")),
    )


def _audit() -> None:
    op.create_table(
        "audit",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at_ns", sa.BigInteger(), nullable=False),
        sa.Column("principal", sa.String(length=64), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.String(length=256), nullable=False),
        sa.Column("detail_json", sa.Text(), nullable=False),
        sa.Column("token", sa.String(length=26), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_audit")),
    )
    op.create_index("ix_audit_subject", "audit", ["subject"], unique=False)
    op.create_table(
        "audit_links",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["seq"], ["audit.seq"], name=op.f("fk_audit_links_seq_audit")),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit_links")),
        sa.UniqueConstraint("seq", name=op.f("uq_audit_links_seq")),
    )


def _secrets() -> None:
    op.create_table(
        "secrets",
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=True),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("by", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("kind", "owner", "name", "version", name=op.f("pk_secrets")),
    )


def _queue() -> None:
    op.create_table(
        "shares",
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("set_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "name", name=op.f("pk_shares")),
    )
    op.create_table(
        "policies",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("document_json", sa.Text(), nullable=False),
        sa.Column("set_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_policies")),
    )


def _ledger() -> None:
    op.create_table(
        "charges",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("crew", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("provisional", sa.Boolean(), nullable=False),
        sa.Column("account_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("posted_ns", sa.BigInteger(), nullable=False),
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("start_ns", sa.BigInteger(), nullable=False),
        sa.Column("end_ns", sa.BigInteger(), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("queued_ms", sa.BigInteger(), nullable=False),
        sa.Column("environment_ms", sa.BigInteger(), nullable=False),
        sa.Column("start_ms", sa.BigInteger(), nullable=False),
        sa.Column("run_ms", sa.BigInteger(), nullable=False),
        sa.Column("stop_ms", sa.BigInteger(), nullable=False),
        sa.Column("gate_ms", sa.BigInteger(), nullable=False),
        sa.Column("idle_ms", sa.BigInteger(), nullable=False),
        sa.Column("gpu_ms", sa.BigInteger(), nullable=False),
        sa.Column("billed_ms", sa.BigInteger(), nullable=False),
        sa.Column("core_ms", sa.BigInteger(), nullable=False),
        sa.Column("memory_mib_ms", sa.BigInteger(), nullable=False),
        sa.Column("micros", sa.BigInteger(), nullable=True),
        sa.Column("dbu_micros", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_charges_account_id_accounts")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_charges")),
        sa.UniqueConstraint("run_id", "fence", "crew", "number", name=op.f("uq_charges_run_id")),
    )
    op.create_index("ix_charges_day", "charges", ["day", "account_id"], unique=False)
    op.create_table(
        "utilisations",
        sa.Column("run_id", sa.String(length=26), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("crew", sa.Integer(), nullable=False),
        sa.Column("account_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("gpu_ms", sa.BigInteger(), nullable=False),
        sa.Column("observed_ms", sa.BigInteger(), nullable=False),
        sa.Column("busy_ms", sa.BigInteger(), nullable=False),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_utilisations_account_id_accounts")),
        sa.PrimaryKeyConstraint("run_id", "fence", "crew", name=op.f("pk_utilisations")),
    )
    columns = ["day", "account_id", "observed_ms", "busy_ms"]
    op.create_index("ix_utilisations_day", "utilisations", columns, unique=False)


def _reports() -> None:
    op.create_table(
        "used_days",
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("account_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("runs", sa.BigInteger(), nullable=False),
        sa.Column("queued_ms", sa.BigInteger(), nullable=False),
        sa.Column("environment_ms", sa.BigInteger(), nullable=False),
        sa.Column("start_ms", sa.BigInteger(), nullable=False),
        sa.Column("run_ms", sa.BigInteger(), nullable=False),
        sa.Column("stop_ms", sa.BigInteger(), nullable=False),
        sa.Column("gate_ms", sa.BigInteger(), nullable=False),
        sa.Column("idle_ms", sa.BigInteger(), nullable=False),
        sa.Column("gpu_ms", sa.BigInteger(), nullable=False),
        sa.Column("billed_ms", sa.BigInteger(), nullable=False),
        sa.Column("unpriced_ms", sa.BigInteger(), nullable=False),
        sa.Column("provisional_ms", sa.BigInteger(), nullable=False),
        sa.Column("core_ms", sa.BigInteger(), nullable=False),
        sa.Column("memory_mib_ms", sa.BigInteger(), nullable=False),
        sa.Column("micros", sa.BigInteger(), nullable=True),
        sa.Column("dbu_micros", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_used_days_account_id_accounts")),
        sa.PrimaryKeyConstraint("day", "account_id", name=op.f("pk_used_days")),
    )
    op.create_table(
        "folded",
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_folded")),
    )


def _spending() -> None:
    op.create_table(
        "budget_warnings",
        sa.Column("budget", sa.String(length=64), nullable=False),
        sa.Column("start_ns", sa.BigInteger(), nullable=False),
        sa.Column("percent", sa.Integer(), nullable=False),
        sa.Column("at_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("budget", "start_ns", "percent", name=op.f("pk_budget_warnings")),
    )
    op.create_table(
        "budgets",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("document_json", sa.Text(), nullable=False),
        sa.Column("set_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_budgets")),
    )
    op.create_table(
        "notices",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at_ns", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("document_json", sa.Text(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("sent_ns", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_notices")),
    )
    op.create_index("ix_notices_open", "notices", ["sent_ns", "seq"], unique=False)
    op.create_table(
        "prices",
        sa.Column("resource", sa.String(length=256), nullable=False),
        sa.Column("pool", sa.String(length=64), nullable=False),
        sa.Column("from_ns", sa.BigInteger(), nullable=False),
        sa.Column("until_ns", sa.BigInteger(), nullable=True),
        sa.Column("micros_per_hour", sa.BigInteger(), nullable=False),
        sa.Column("dbu_micros_per_hour", sa.BigInteger(), nullable=False),
        sa.Column("set_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("resource", "pool", "from_ns", name=op.f("pk_prices")),
    )
    op.create_table(
        "policy_holders",
        sa.Column("policy", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["policy"], ["policies.name"], name=op.f("fk_policy_holders_policy_policies")),
        sa.PrimaryKeyConstraint("policy", "kind", "name", name=op.f("pk_policy_holders")),
    )
    op.create_index("ix_policy_holders_name", "policy_holders", ["kind", "name"], unique=False)
