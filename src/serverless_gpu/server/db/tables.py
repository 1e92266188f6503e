"""Defines the tables of the database. `migrations/` creates the tables.

Times are nanoseconds since 1970 (`*_ns`). Columns without SQL conditions contain JSON (`*_json`), in formats of `wire`
or `model`. A column has a foreign key where a row without its parent row would be wrong. Data that grows with use, such
as log bytes and large outputs, is in files and the store.
"""

from __future__ import annotations

import sqlalchemy as sa

NAMES = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}
metadata = sa.MetaData(naming_convention=NAMES)
RETURN_S = 300.0
"""Default seconds within which borrowing runs must return a pool's lent devices."""

principals = sa.Table(
    "principals",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),  # kind of principal: user or service
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("disabled_ns", sa.BigInteger),
    sa.Column("runs", sa.String(8)),  # action for running runs of a disabled principal: finish or stop
)

teams = sa.Table(
    "teams",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("time_zone", sa.String(64)),  # time zone for the periods of the team's budgets; NULL for UTC
)

members = sa.Table(
    "members",
    metadata,
    sa.Column("team", sa.ForeignKey("teams.name"), primary_key=True),
    sa.Column("principal", sa.ForeignKey("principals.name"), primary_key=True),
)

tokens = sa.Table(
    "tokens",
    metadata,
    sa.Column("id", sa.String(26), primary_key=True),
    # hash of the secret; the server never stores the secret itself
    sa.Column("sha256", sa.String(64), nullable=False, unique=True),
    sa.Column("principal", sa.ForeignKey("principals.name"), nullable=False, index=True),
    sa.Column("label", sa.String(256), nullable=False, default=""),
    sa.Column("scopes_json", sa.Text, nullable=False, default="[]"),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("expires_ns", sa.BigInteger),
    sa.Column("revoked_ns", sa.BigInteger),
    sa.Column("used_ns", sa.BigInteger),  # last use of the token, written at most once per minute
    sa.Column("renews", sa.Boolean),  # True for a node's token: each use extends the token's validity.
)

pools = sa.Table(
    "pools",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),  # kind of pool: on-demand or reserved
    # A reserved pool lends its idle devices to BEST_EFFORT runs.
    sa.Column("lends", sa.Boolean, nullable=False, default=False),
    # seconds within which borrowing runs must return lent devices
    sa.Column("return_s", sa.Float, nullable=False, default=RETURN_S),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    # isolation of the pool; none: principals may share a uid; unset: no sharing; NULL: undecided
    sa.Column("isolation", sa.String(16)),
)

shares = sa.Table(  # weights of the fair share; a principal without a row has weight 1
    "shares",
    metadata,
    sa.Column("kind", sa.String(8), primary_key=True),  # kind of holder: team or user
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("weight", sa.Float, nullable=False),
    sa.Column("set_ns", sa.BigInteger, nullable=False),
)

policies = sa.Table(
    "policies",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("document_json", sa.Text, nullable=False),  # JSON of model.usage_policy.UsagePolicy
    sa.Column("set_ns", sa.BigInteger, nullable=False),
)

policy_holders = sa.Table(  # assignments of usage policies to principals and teams
    "policy_holders",
    metadata,
    sa.Column("policy", sa.ForeignKey("policies.name"), primary_key=True),
    sa.Column("kind", sa.String(8), primary_key=True),  # kind of holder: user, service or team
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Index("ix_policy_holders_name", "kind", "name"),
)

prices = sa.Table(  # price book; the server only adds rows and sets their end times
    "prices",
    metadata,
    sa.Column("resource", sa.String(256), primary_key=True),  # a GPU type, "core" or "memory"
    sa.Column("pool", sa.String(64), primary_key=True, default=""),  # pool of the price; "" for every pool
    sa.Column("from_ns", sa.BigInteger, primary_key=True),
    sa.Column("until_ns", sa.BigInteger),
    sa.Column("micros_per_hour", sa.BigInteger, nullable=False),
    sa.Column("dbu_micros_per_hour", sa.BigInteger, nullable=False, default=0),
    sa.Column("set_ns", sa.BigInteger, nullable=False),
)

budgets = sa.Table(
    "budgets",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("document_json", sa.Text, nullable=False),  # JSON of model.billing.budget.Budget
    sa.Column("set_ns", sa.BigInteger, nullable=False),
)

budget_warnings = sa.Table(  # thresholds already announced for a budget in a period
    "budget_warnings",
    metadata,
    sa.Column("budget", sa.String(64), primary_key=True),
    sa.Column("start_ns", sa.BigInteger, primary_key=True),  # start of the budget period
    sa.Column("percent", sa.Integer, primary_key=True),
    sa.Column("at_ns", sa.BigInteger, nullable=False),
)

notices = sa.Table(  # outbox of notices for the webhook
    "notices",
    metadata,
    sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("at_ns", sa.BigInteger, nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),  # kind of notice: budget.warning, budget.reached or spend.alarm
    sa.Column("document_json", sa.Text, nullable=False),
    sa.Column("tries", sa.Integer, nullable=False, default=0),
    sa.Column("sent_ns", sa.BigInteger),
    sa.Index("ix_notices_open", "sent_ns", "seq"),
)

drains = sa.Table(  # existence of this row means that the server starts no new runs
    "drains",
    metadata,
    sa.Column("name", sa.String(16), primary_key=True),
    sa.Column("principal", sa.String(64), nullable=False),
    sa.Column("since_ns", sa.BigInteger, nullable=False),
    sa.Column("note", sa.String(256), nullable=False, default=""),
)

nodes = sa.Table(
    "nodes",
    metadata,
    sa.Column("id", sa.String(26), primary_key=True),
    sa.Column("name", sa.String(256), nullable=False, unique=True),
    sa.Column("machine", sa.String(64), nullable=False),
    sa.Column("boot_id", sa.String(64), nullable=False),
    sa.Column("principal", sa.ForeignKey("principals.name"), nullable=False),  # owner of the agent's token
    sa.Column("token_id", sa.String(26), nullable=False, default=""),  # token of the agent's last registration
    sa.Column("pool", sa.ForeignKey("pools.name"), nullable=False),
    sa.Column("hello_json", sa.Text, nullable=False),  # last wire.agents.AgentHello of the node, without its attempts
    sa.Column("seen_ns", sa.BigInteger, nullable=False),  # coalesced
    sa.Column("forgotten_ns", sa.BigInteger),
    sa.Column("rules_json", sa.Text, nullable=False, default="{}"),  # JSON of wire.nodes.NodeRules
)

node_bindings = sa.Table(  # bindings of agent tokens to nodes that an administrator has approved
    "node_bindings",
    metadata,
    sa.Column("token", sa.ForeignKey("tokens.id"), primary_key=True),
    # node name; "" binds the token to the first node that registers
    sa.Column("node", sa.String(256), nullable=False, default=""),
    sa.Column("machine", sa.String(64), nullable=False, default=""),
    sa.Column("instance", sa.String(64), nullable=False, default=""),
    sa.Column("asked_ns", sa.BigInteger, nullable=False),
    sa.Column("approved_ns", sa.BigInteger),
    sa.Column(
        "approved_by", sa.String(64), nullable=False, default=""
    ),  # origin of the approval: a principal, a join token, "server" or "upgrade"
    sa.Index("ix_node_bindings_node", "node"),
)

invitations = sa.Table(  # join tokens, with which new machines register
    "invitations",
    metadata,
    sa.Column("token", sa.ForeignKey("tokens.id"), primary_key=True),
    # only node name that may join with this token, or ""
    sa.Column("node", sa.String(256), nullable=False, default=""),
    sa.Column("uses_left", sa.Integer, nullable=False),
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", sa.String(26), primary_key=True),
    sa.Column("owner", sa.ForeignKey("principals.name"), nullable=False),
    sa.Column("team", sa.String(64), nullable=False, default=""),
    sa.Column("name", sa.String(256), nullable=False, default=""),
    sa.Column("pool", sa.String(64), nullable=False, default=""),
    sa.Column("priority", sa.Integer, nullable=False),  # priority of the run; runs with lower values start first
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("reason", sa.String(32)),
    sa.Column("detail", sa.Text, nullable=False, default=""),
    # number of the current attempt; 0 before the first attempt
    sa.Column("fence", sa.Integer, nullable=False, default=0),
    sa.Column("stop", sa.String(16)),  # reason for a requested stop
    sa.Column("retries_used", sa.Integer, nullable=False, default=0),
    sa.Column("infra_retries_used", sa.Integer, nullable=False, default=0),
    sa.Column("fault_retries_used", sa.Integer, nullable=False, default=0),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    # time from which the queue counts the run's age; requeueing does not change this time
    sa.Column("queued_ns", sa.BigInteger, nullable=False),
    sa.Column("started_ns", sa.BigInteger),
    sa.Column("ended_ns", sa.BigInteger),
    sa.Column("settled_ns", sa.BigInteger),
    sa.Column("events", sa.Integer, nullable=False, default=0),  # sequence number of the last event
    # keyed hash of the canonical request, to detect a repeated id with another body
    sa.Column("request_sha256", sa.String(64), nullable=False),
    sa.Column("spec_json", sa.Text, nullable=False),
    sa.Column("target_json", sa.Text, nullable=False),
    sa.Column("tags_json", sa.Text, nullable=False, default="{}"),
    sa.Column("snapshot", sa.String(64), nullable=False, default=""),
    # encrypted request, because the request contains the caller's variables
    sa.Column("context_sealed", sa.LargeBinary, nullable=False),
    sa.Column("call", sa.LargeBinary),
    sa.Column("client_version", sa.String(32), nullable=False, default=""),
    sa.Column("tracked", sa.Text, nullable=False, default=""),  # Link to the run in MLflow.
    sa.Column("promised_json", sa.Text),  # The latest start promised to the run, a model.scheduling.values.Reservation.
    sa.Column("restored_ns", sa.BigInteger),  # Time of a restore from a backup in which this run had not ended.
    sa.Column("member_of_json", sa.Text),  # For a run without a team: the teams of its owner at submission.
    sa.Column("saved", sa.Integer, nullable=False, default=0, server_default="0"),  # Newest attempt with a checkpoint.
    # consecutive attempts without a checkpoint.
    sa.Column("unsaved", sa.Integer, nullable=False, default=0, server_default="0"),
    # number of attempts that count against the maximum of the usage policy
    sa.Column("ran", sa.Integer, nullable=False, default=0, server_default="0"),
    # milliseconds of user code in earlier attempts
    sa.Column("ran_ms", sa.BigInteger, nullable=False, default=0, server_default="0"),
    sa.Index("ix_runs_queue", "state", "priority", "queued_ns"),
    sa.Index("ix_runs_owner", "owner", "id"),
    sa.Index(  # index that `duration_history.durations_s` uses
        "ix_runs_succeeded",
        "owner",
        "name",
        "id",
        sqlite_where=sa.text("state = 'SUCCEEDED'"),
        postgresql_where=sa.text("state = 'SUCCEEDED'"),
    ),
)

attempts = sa.Table(  # data shared by all supervisors of an attempt
    "attempts",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("fence", sa.Integer, primary_key=True),
    sa.Column("gpu_type", sa.String(256), nullable=False),
    sa.Column("world_size", sa.Integer, nullable=False),
    sa.Column("num_nodes", sa.Integer, nullable=False, default=1),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("before", sa.String(16)),  # state of the attempt before UNREACHABLE
    sa.Column("reason", sa.String(32)),
    sa.Column("began", sa.Boolean, nullable=False, default=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("started_ns", sa.BigInteger),
    sa.Column("ended_ns", sa.BigInteger),
    sa.Column("settled_ns", sa.BigInteger),
    # versions of secrets without values, as model.secrets.Pinned
    sa.Column("secrets_json", sa.Text, nullable=False, default="[]"),
    # prices at placement, as model.billing.pricing.Tariff
    sa.Column("tariff_json", sa.Text, nullable=False, default="{}"),
    sa.Column("account_id", sa.ForeignKey("accounts.id")),  # account of all charges, chosen at placement
    # version of the attempt and its supervisors, incremented by each change
    sa.Column("version", sa.Integer, nullable=False, default=0),
    # shared nonce with which the gang's supervisors identify each other
    sa.Column("nonce", sa.String(64), nullable=False, default=""),
    sa.Column("chosen_json", sa.Text),  # Chosen rendezvous of the gang, as model.lifecycle.rendezvous.Chosen.
    sa.Column("called_off", sa.Boolean, nullable=False, default=False),  # True if the rendezvous was cancelled.
    sa.Column("released", sa.Boolean, nullable=False, default=False),  # True once all ranks have returned and may exit.
    sa.Column("cause_json", sa.Text),  # First failure of the gang, as model.lifecycle.gang_lifecycle.Cause.
)

crews = sa.Table(  # the part of an attempt on one node: a supervisor and its ranks
    "crews",
    metadata,
    sa.Column("run_id", sa.String(26), primary_key=True),
    sa.Column("fence", sa.Integer, primary_key=True),
    sa.Column("crew", sa.Integer, primary_key=True),  # number of the supervisor within the attempt: 0, 1, 2 …
    sa.Column("node_id", sa.ForeignKey("nodes.id"), nullable=False, index=True),
    sa.Column("boot_id", sa.String(64), nullable=False),  # boot id of the node at placement
    sa.Column("first_rank", sa.Integer, nullable=False, default=0),
    sa.Column("gpus", sa.Integer, nullable=False),
    sa.Column("token_sha256", sa.String(64), nullable=False, unique=True),
    # last lease renewal in the database; the server does not store every renewal
    sa.Column("lease_ns", sa.BigInteger, nullable=False),
    # maximum seconds that the supervisor continues without an answer of the server
    sa.Column("grace_s", sa.Float, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("before", sa.String(16)),  # state of the supervisor before UNREACHABLE
    sa.Column("began", sa.Boolean, nullable=False, default=False),
    sa.Column("reason", sa.String(32)),
    # true if no process of the ended attempt remains on the node
    sa.Column("proven", sa.Boolean, nullable=False, default=True),
    sa.Column("sentence", sa.Text, nullable=False, default=""),
    sa.Column("leave_ns", sa.BigInteger),  # announced deadline for stopping on the node
    sa.Column("started_ns", sa.BigInteger),
    sa.Column("ended_ns", sa.BigInteger),
    sa.Column("settled_ns", sa.BigInteger),
    # end reason that the node reported after the server had abandoned the attempt
    sa.Column("late_reason", sa.String(32)),
    sa.Column("stopped_json", sa.Text),  # record of the stop, as model.lifecycle.attempt.Stopped
    sa.Column("receipt_json", sa.Text),
    sa.Column("halt_json", sa.Text),  # requested halt, as model.lifecycle.gang_lifecycle.Halt
    sa.Column("returned", sa.Boolean, nullable=False, default=False),
    # true if the attempt has ended and its charges are incomplete
    sa.Column("uncharged", sa.Boolean, nullable=False, default=False),
    sa.ForeignKeyConstraint(["run_id", "fence"], ["attempts.run_id", "attempts.fence"]),
    sa.UniqueConstraint("run_id", "fence", "node_id"),
    sa.Index(  # index for the search of uncharged attempts in `charging.py`
        "ix_crews_uncharged",
        "uncharged",
        sqlite_where=sa.text("uncharged"),
        postgresql_where=sa.text("uncharged"),
    ),
)

secrets = sa.Table(
    "secrets",
    metadata,
    sa.Column("kind", sa.String(8), primary_key=True),  # kind of owner: user or team
    sa.Column("owner", sa.String(64), primary_key=True),
    sa.Column("name", sa.String(64), primary_key=True),
    # version number of a secret, from 1; a deletion also has a number
    sa.Column("version", sa.Integer, primary_key=True),
    # encrypted value; NULL after a deletion, or after a replacement once no attempt uses the value
    sa.Column("sealed", sa.LargeBinary),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("by", sa.String(64), nullable=False),
)

orders = sa.Table(  # outbox of orders, written with each decision and delivered until acknowledged
    "orders",
    metadata,
    sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("node_id", sa.ForeignKey("nodes.id"), nullable=False),
    sa.Column("run_id", sa.String(26), nullable=False),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("crew", sa.Integer, nullable=False, default=0),
    sa.Column("kind", sa.String(8), nullable=False),  # kind of order: start or stop
    sa.Column("stop", sa.String(16)),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("taken_ns", sa.BigInteger),
    sa.Index("ix_orders_open", "node_id", "taken_ns", "seq"),
    sa.UniqueConstraint("run_id", "fence", "crew", "kind", "stop"),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("seq", sa.Integer, primary_key=True),  # sequence number within the run, from 1
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("at_ns", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("reason", sa.String(32)),
    sa.Column("sentence", sa.Text, nullable=False, default=""),
    sa.Column("node", sa.String(256), nullable=False, default=""),
)

files = sa.Table(  # outputs of attempts
    "files",
    metadata,
    sa.Column("run_id", sa.String(26), primary_key=True),
    sa.Column("fence", sa.Integer, primary_key=True),
    sa.Column("name", sa.String(256), primary_key=True),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("inline", sa.LargeBinary),
    sa.Column("parts_json", sa.Text),
    sa.ForeignKeyConstraint(["run_id", "fence"], ["attempts.run_id", "attempts.fence"]),
)

facts = sa.Table(
    "facts",
    metadata,
    sa.Column("run_id", sa.String(26), primary_key=True),
    sa.Column("fence", sa.Integer, primary_key=True),
    sa.Column("crew", sa.Integer, primary_key=True, default=0),
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("fact_json", sa.Text, nullable=False),
    sa.ForeignKeyConstraint(["run_id", "fence", "crew"], ["crews.run_id", "crews.fence", "crews.crew"]),
)

accounts = sa.Table(  # dimensions of usage: owner, pool, tags and other values that charges share
    "accounts",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("sha256", sa.String(64), nullable=False, unique=True),  # hash of all following columns of the account
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("team", sa.String(64), nullable=False),
    sa.Column("pool", sa.String(64), nullable=False),
    sa.Column("reserved", sa.Boolean, nullable=False),  # true if the attempt used a reserved pool
    sa.Column("policy", sa.String(64), nullable=False),
    sa.Column("gpu_type", sa.String(256), nullable=False),
    sa.Column("name", sa.String(256), nullable=False),  # name of the run
    sa.Column("workload", sa.String(16), nullable=False),  # kind of workload: function, command or kernel
    sa.Column("environment", sa.String(64), nullable=False),  # address of the snapshot, or ""
    sa.Column("currency", sa.String(8), nullable=False),
    sa.Column("tags_json", sa.Text, nullable=False),
    sa.Column("member_of_json", sa.Text),  # For a run without a team: the teams to which its usage counts.
    # Account with the same values but without tags and environment. An account without tags and environment refers to
    # itself.
    sa.Column("plain_id", sa.BigInteger, nullable=False, server_default="0"),
)

charges = sa.Table(  # append-only ledger of `LedgerEntry` rows; retention does not remove these rows
    "charges",
    metadata,
    sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("run_id", sa.String(26), nullable=False),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("crew", sa.Integer, nullable=False, default=0),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),  # kind of entry: original, reversal or restated
    sa.Column("provisional", sa.Boolean, nullable=False),
    sa.Column("account_id", sa.ForeignKey("accounts.id"), nullable=False),
    sa.Column("posted_ns", sa.BigInteger, nullable=False),
    sa.Column("day", sa.Integer, nullable=False),
    sa.Column("start_ns", sa.BigInteger, nullable=False),
    sa.Column("end_ns", sa.BigInteger, nullable=False),
    sa.Column("gpus", sa.Integer, nullable=False),
    # wall time of the run in the queue, only in the first entry of supervisor 0
    sa.Column("queued_ms", sa.BigInteger, nullable=False),
    sa.Column("environment_ms", sa.BigInteger, nullable=False),
    sa.Column("start_ms", sa.BigInteger, nullable=False),
    sa.Column("run_ms", sa.BigInteger, nullable=False),
    sa.Column("stop_ms", sa.BigInteger, nullable=False),
    sa.Column("gate_ms", sa.BigInteger, nullable=False),
    sa.Column("idle_ms", sa.BigInteger, nullable=False),
    sa.Column("gpu_ms", sa.BigInteger, nullable=False),
    sa.Column("billed_ms", sa.BigInteger, nullable=False),
    sa.Column("core_ms", sa.BigInteger, nullable=False),
    sa.Column("memory_mib_ms", sa.BigInteger, nullable=False),
    sa.Column("micros", sa.BigInteger),
    sa.Column("dbu_micros", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("run_id", "fence", "crew", "number"),
    sa.Index("ix_charges_day", "day", "account_id"),
)

account_tags = (
    sa.Table(  # `accounts.tags_json` as rows for reports, without empty values and text that PostgreSQL cannot store
        "account_tags",
        metadata,
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("account_id", sa.ForeignKey("accounts.id"), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
        sa.Index("ix_account_tags_value", "key", "value"),
        sqlite_with_rowid=False,
    )
)

utilisations = sa.Table(  # device utilisation from telemetry, one row per receipt; retention does not remove these rows
    "utilisations",
    metadata,
    sa.Column("run_id", sa.String(26), primary_key=True),
    sa.Column("fence", sa.Integer, primary_key=True),
    sa.Column("crew", sa.Integer, primary_key=True, default=0),
    sa.Column("account_id", sa.ForeignKey("accounts.id"), nullable=False),
    sa.Column("day", sa.Integer, nullable=False),  # day on which the attempt ended
    sa.Column("gpus", sa.Integer, nullable=False),
    sa.Column("gpu_ms", sa.BigInteger, nullable=False),
    sa.Column("observed_ms", sa.BigInteger, nullable=False),  # Device-milliseconds that telemetry observed.
    sa.Column("busy_ms", sa.BigInteger, nullable=False),  # Observed device-milliseconds in which a device was busy.
    sa.Column("peak_memory_bytes", sa.BigInteger),  # Maximum memory use of any single device.
    sa.Column("plain_id", sa.BigInteger, nullable=False, server_default="0"),  # `plain_id` of the account.
    # Index that covers all columns of a report.
    sa.Index("ix_utilisations_day", "day", "account_id", "observed_ms", "busy_ms"),
    sa.Index("ix_utilisations_plain", "day", "plain_id", "observed_ms", "busy_ms"),  # alike
)


def _sums() -> list[sa.Column[int]]:
    """Return the columns of a table with sums of `charges`."""
    names = (
        "runs",  # number of runs whose first entry is included
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
    return [sa.Column(name, sa.BigInteger, nullable=name == "micros") for name in names]


# sums of `charges` up to an entry, for reports (`usage_rollup.py`); the server can rebuild the sums from `charges`
used_days = sa.Table(
    "used_days",
    metadata,
    sa.Column("day", sa.Integer, primary_key=True),
    sa.Column("account_id", sa.ForeignKey("accounts.id"), primary_key=True),
    *_sums(),
)

# sums of `used_days` by `accounts.plain_id`; the number of rows does not grow with the number of tags
used_plain_days = sa.Table(
    "used_plain_days",
    metadata,
    sa.Column("day", sa.Integer, primary_key=True),
    sa.Column("account_id", sa.ForeignKey("accounts.id"), primary_key=True),
    *_sums(),
)

folded = sa.Table(  # one row with the number of the last entry of `charges` that the sums include
    "folded",
    metadata,
    sa.Column("name", sa.String(16), primary_key=True),
    sa.Column("seq", sa.BigInteger, nullable=False),
)

audit = sa.Table(  # append-only record of actions by principals
    "audit",
    metadata,
    sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("at_ns", sa.BigInteger, nullable=False),
    sa.Column("principal", sa.String(64), nullable=False),
    sa.Column("action", sa.String(64), nullable=False),  # kind of action: "run.create", "token.revoke" …
    sa.Column("subject", sa.String(256), nullable=False),
    sa.Column("detail_json", sa.Text, nullable=False, default="{}"),
    sa.Column("token", sa.String(26), nullable=False, default=""),
    sa.Index("ix_audit_subject", "subject"),
)

audit_links = sa.Table(  # append-only hash chain of the audit: order and digest of each entry
    "audit_links",
    metadata,
    sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=False),
    sa.Column("seq", sa.ForeignKey("audit.seq"), nullable=False, unique=True),
    sa.Column("sha256", sa.String(64), nullable=False),
)

server_identity = sa.Table(  # one row: identity of the database, and the server that owns it (`leader_lock.py`)
    "server_identity",
    metadata,
    sa.Column("name", sa.String(16), primary_key=True),
    sa.Column("database_id", sa.String(32), nullable=False),  # random identifier, assigned once
    # generation, incremented by each server that claims the database
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("holder", sa.String(64), nullable=False),  # `LeaderLock.name` of the owner, different for each process
    sa.Column("claimed_ns", sa.BigInteger, nullable=False),
    # number of commits in SQLite; in PostgreSQL, concurrent writers must not share a row
    sa.Column("commits", sa.BigInteger, nullable=False, default=0),
    sa.Column("probed_ns", sa.BigInteger, nullable=False, default=0),  # time of the last probe write by `/health`
)
