"""Defines the database tables. `migrations/` creates the tables.

Times are nanoseconds since 1970 (`*_ns`). JSON columns (`*_json`) contain structs of `wire` or `model`. SQL conditions
never use JSON columns. A foreign key protects rows that are invalid without their parent row. Data that grows with use,
such as log bytes and large outputs, is in files and the store.
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
"""Default number of seconds within which borrowing runs must release lent devices."""

principals = sa.Table(
    "principals",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),  # Kind of the principal: user or service.
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("disabled_ns", sa.BigInteger),
    sa.Column("runs", sa.String(8)),  # Action for a disabled principal's running runs: finish or stop.
    sa.Column("rights_json", sa.Text),  # Granted rights of `model.access_control.Right`; NULL for none.
)

teams = sa.Table(
    "teams",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("time_zone", sa.String(64)),  # Time zone of the team's budget periods; NULL for UTC.
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
    # Hash of the token's secret. The server never stores the secret.
    sa.Column("sha256", sa.String(64), nullable=False, unique=True),
    sa.Column("principal", sa.ForeignKey("principals.name"), nullable=False, index=True),
    sa.Column("label", sa.String(256), nullable=False, default=""),
    sa.Column("scopes_json", sa.Text, nullable=False, default="[]"),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("expires_ns", sa.BigInteger),
    sa.Column("revoked_ns", sa.BigInteger),
    sa.Column("used_ns", sa.BigInteger),  # Time of the token's last use, updated at most once per minute.
    sa.Column("renews", sa.Boolean),  # True if each use extends the token's validity.
    # Kind of the token: NULL for a token of the API, "session" for a browser's session.
    sa.Column("kind", sa.String(16)),
    # How and where a session began: the way of signing in, the browser and the address, as JSON; NULL for API tokens.
    sa.Column("origin_json", sa.Text),
    sa.Column("made_by", sa.String(64)),  # Principal that created an API token; NULL for sessions and if unknown.
)

passwords = sa.Table(
    "passwords",
    metadata,
    sa.Column("principal", sa.ForeignKey("principals.name"), primary_key=True),
    sa.Column("hash", sa.Text),  # Argon2 hash with its parameters; NULL before the first use of a reset link.
    sa.Column("changed_ns", sa.BigInteger),
    # Hash and expiry of a one-time link with which the user sets a password; NULL without a valid link.
    sa.Column("reset_sha256", sa.String(64), unique=True),
    sa.Column("reset_until_ns", sa.BigInteger),
)

identities = sa.Table(  # Accounts at an identity provider with which users sign in.
    "identities",
    metadata,
    sa.Column("id", sa.String(26), primary_key=True),
    sa.Column("issuer", sa.String(512), nullable=False),
    sa.Column("subject", sa.String(256), nullable=False),
    sa.Column("principal", sa.ForeignKey("principals.name"), nullable=False, index=True),
    sa.Column("shown", sa.String(256), nullable=False, default=""),  # Name or e-mail at the provider, for display only.
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("used_ns", sa.BigInteger),
    sa.UniqueConstraint("issuer", "subject", name="uq_identities_issuer"),
)

pools = sa.Table(
    "pools",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),  # Kind of the pool: on-demand or reserved.
    # A reserved pool lends its idle devices to BEST_EFFORT runs.
    sa.Column("lends", sa.Boolean, nullable=False, default=False),
    # Seconds within which borrowing runs must release lent devices.
    sa.Column("return_s", sa.Float, nullable=False, default=RETURN_S),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    # Isolation of the pool. The value "none" allows principals to share a uid. NULL means that the isolation is
    # undecided.
    sa.Column("isolation", sa.String(16)),
    # Network policy of the pool's runs. NULL means `open`.
    sa.Column("egress", sa.String(8)),
    sa.Column("allow_json", sa.Text),  # JSON list of destinations in the notation of model.egress
)

shares = sa.Table(  # Fair-share weights with a default of 1.
    "shares",
    metadata,
    sa.Column("kind", sa.String(8), primary_key=True),  # Kind of the share holder: team or user.
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

policy_holders = sa.Table(  # Assignments of usage policies to principals and teams.
    "policy_holders",
    metadata,
    sa.Column("policy", sa.ForeignKey("policies.name"), primary_key=True),
    sa.Column("kind", sa.String(8), primary_key=True),  # Kind of the policy holder: user, service or team.
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Index("ix_policy_holders_name", "kind", "name"),
)

prices = sa.Table(  # Price book. The server never deletes prices.
    "prices",
    metadata,
    sa.Column("resource", sa.String(256), primary_key=True),  # GPU type, "core" or "memory".
    sa.Column("pool", sa.String(64), primary_key=True, default=""),  # Pool of the price; "" for all pools.
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

budget_warnings = sa.Table(  # Announced thresholds of each budget period.
    "budget_warnings",
    metadata,
    sa.Column("budget", sa.String(64), primary_key=True),
    sa.Column("start_ns", sa.BigInteger, primary_key=True),  # Start of the budget period.
    sa.Column("percent", sa.Integer, primary_key=True),
    sa.Column("at_ns", sa.BigInteger, nullable=False),
)

notices = sa.Table(  # Outbox of webhook notices.
    "notices",
    metadata,
    sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("at_ns", sa.BigInteger, nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),  # Kind of the notice, such as budget.warning.
    sa.Column("document_json", sa.Text, nullable=False),
    sa.Column("tries", sa.Integer, nullable=False, default=0),
    sa.Column("sent_ns", sa.BigInteger),
    sa.Index("ix_notices_open", "sent_ns", "seq"),
)

drains = sa.Table(  # Drain of the whole server. The server starts no runs while this table has a row.
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
    sa.Column("principal", sa.ForeignKey("principals.name"), nullable=False),  # Owner of the agent's token.
    sa.Column("token_id", sa.String(26), nullable=False, default=""),  # Token of the agent's last registration.
    sa.Column("pool", sa.ForeignKey("pools.name"), nullable=False),
    sa.Column("hello_json", sa.Text, nullable=False),  # Last wire.agents.AgentHello of the node, without attempts.
    sa.Column("seen_ns", sa.BigInteger, nullable=False),  # Coalesced.
    sa.Column("forgotten_ns", sa.BigInteger),
    sa.Column("rules_json", sa.Text, nullable=False, default="{}"),  # JSON of wire.nodes.NodeRules
    sa.Column("revoked_ns", sa.BigInteger),
)

node_bindings = sa.Table(  # Bindings between agent tokens and nodes.
    "node_bindings",
    metadata,
    sa.Column("token", sa.ForeignKey("tokens.id"), primary_key=True),
    # Node name; "" until the first node registers with the token.
    sa.Column("node", sa.String(256), nullable=False, default=""),
    sa.Column("machine", sa.String(64), nullable=False, default=""),
    sa.Column("instance", sa.String(64), nullable=False, default=""),
    sa.Column("asked_ns", sa.BigInteger, nullable=False),
    sa.Column("approved_ns", sa.BigInteger),
    sa.Column(
        "approved_by", sa.String(64), nullable=False, default=""
    ),  # Approver: a principal, a join token, "server" or "upgrade".
    # Fingerprint of the node's keys; "" until a hello message in a session of a key.
    sa.Column("key", sa.String(64), nullable=False, default="", server_default=""),
    sa.Column("enrolled_ns", sa.BigInteger),  # Time when the server bound the key.
    sa.Column("rotate_ns", sa.BigInteger),  # Time of an unanswered request for another key.
    sa.Index("ix_node_bindings_node", "node"),
)

invitations = sa.Table(  # Join tokens for registering new machines.
    "invitations",
    metadata,
    sa.Column("token", sa.ForeignKey("tokens.id"), primary_key=True),
    # Node name that may join with this token; "" for any name.
    sa.Column("node", sa.String(256), nullable=False, default=""),
    sa.Column("uses_left", sa.Integer, nullable=False),
)

_LISTED = ("created_ns", "name", "state", "owner", "team", "gpu_type", "said")
"""Columns of `runs` that filters of a list compare."""
runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", sa.String(26), primary_key=True),
    sa.Column("owner", sa.ForeignKey("principals.name"), nullable=False),
    sa.Column("team", sa.String(64), nullable=False, default=""),
    sa.Column("name", sa.String(256), nullable=False, default=""),
    sa.Column("pool", sa.String(64), nullable=False, default=""),
    sa.Column("priority", sa.Integer, nullable=False),  # Priority of the run. Lower values start first.
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("reason", sa.String(32)),
    sa.Column("detail", sa.Text, nullable=False, default=""),
    # Number of the current attempt; 0 before the first attempt.
    sa.Column("fence", sa.Integer, nullable=False, default=0),
    sa.Column("stop", sa.String(16)),  # Reason for the requested stop.
    sa.Column("retries_used", sa.Integer, nullable=False, default=0),
    sa.Column("infra_retries_used", sa.Integer, nullable=False, default=0),
    sa.Column("fault_retries_used", sa.Integer, nullable=False, default=0),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    # Start of the run's queue age, unchanged by requeueing.
    sa.Column("queued_ns", sa.BigInteger, nullable=False),
    sa.Column("started_ns", sa.BigInteger),
    sa.Column("ended_ns", sa.BigInteger),
    sa.Column("settled_ns", sa.BigInteger),
    sa.Column("events", sa.Integer, nullable=False, default=0),  # Sequence number of the last event.
    # Keyed hash of the canonical request, for comparing repeated requests.
    sa.Column("request_sha256", sa.String(64), nullable=False),
    sa.Column("spec_json", sa.Text, nullable=False),
    sa.Column("target_json", sa.Text, nullable=False),
    sa.Column("tags_json", sa.Text, nullable=False, default="{}"),
    sa.Column("snapshot", sa.String(64), nullable=False, default=""),
    # Encrypted request with the caller's variables.
    sa.Column("context_sealed", sa.LargeBinary, nullable=False),
    sa.Column("call", sa.LargeBinary),
    sa.Column("client_version", sa.String(32), nullable=False, default=""),
    sa.Column("tracked", sa.Text, nullable=False, default=""),  # Address of the run in MLflow.
    sa.Column("promised_json", sa.Text),  # Latest promised start, as model.scheduling.values.Reservation.
    sa.Column("restored_ns", sa.BigInteger),  # Time at which an operator restored this unfinished run from a backup.
    sa.Column("member_of_json", sa.Text),  # Teams of the owner at submission, for a run without a team.
    sa.Column("saved", sa.Integer, nullable=False, default=0, server_default="0"),  # Newest attempt with a checkpoint.
    # Number of consecutive attempts without a checkpoint.
    sa.Column("unsaved", sa.Integer, nullable=False, default=0, server_default="0"),
    # Number of attempts that the usage policy's limit counts.
    sa.Column("ran", sa.Integer, nullable=False, default=0, server_default="0"),
    # Milliseconds of user code in earlier attempts.
    sa.Column("ran_ms", sa.BigInteger, nullable=False, default=0, server_default="0"),
    # Device type of the current attempt, or the requested type, shortened.
    sa.Column("gpu_type", sa.String(40), nullable=False, default="", server_default=""),
    # Final sentence of the run for searches, in lower case and shortened (`runs.searchable`).
    sa.Column("said", sa.String(200), nullable=False, default="", server_default=""),
    sa.Column("arguments_json", sa.Text),  # Arguments of the call as text; NULL if the client sent none.
    sa.Index("ix_runs_queue", "state", "priority", "queued_ns"),
    # Covering indexes of `run_list.page`, one for each order. PostgreSQL limits an index entry to 2,704 bytes.
    sa.Index("ix_runs_list", "id", *_LISTED),
    sa.Index(
        "ix_runs_ended",
        "ended_ns",
        "id",
        *_LISTED,
        sqlite_where=sa.text("ended_ns IS NOT NULL"),
        postgresql_where=sa.text("ended_ns IS NOT NULL"),
    ),
    sa.Index("ix_runs_owner", "owner", "id"),
    sa.Index("ix_runs_snapshot", "snapshot", "created_ns", "owner"),  # Covers the list of environments.
    sa.Index(  # Index for the query of charges that are not complete.
        "ix_runs_unsettled",
        "id",
        sqlite_where=sa.text("settled_ns IS NULL"),
        postgresql_where=sa.text("settled_ns IS NULL"),
    ),
    sa.Index(  # index that `duration_history.durations_s` uses
        "ix_runs_succeeded",
        "owner",
        "name",
        "id",
        sqlite_where=sa.text("state = 'SUCCEEDED'"),
        postgresql_where=sa.text("state = 'SUCCEEDED'"),
    ),
)

run_tags = sa.Table(  # Tags of runs as rows for `run_list.page`.
    "run_tags",
    metadata,
    sa.Column("key", sa.String(256), primary_key=True),
    sa.Column("value", sa.String(256), primary_key=True),
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Index("ix_run_tags_run", "run_id"),
    sqlite_with_rowid=False,
)

attempts = sa.Table(  # Common data of an attempt's supervisors.
    "attempts",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("fence", sa.Integer, primary_key=True),
    sa.Column("gpu_type", sa.String(256), nullable=False),
    sa.Column("world_size", sa.Integer, nullable=False),
    sa.Column("num_nodes", sa.Integer, nullable=False, default=1),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("before", sa.String(16)),  # State of the attempt before UNREACHABLE.
    sa.Column("reason", sa.String(32)),
    sa.Column("began", sa.Boolean, nullable=False, default=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("started_ns", sa.BigInteger),
    sa.Column("ended_ns", sa.BigInteger),
    sa.Column("settled_ns", sa.BigInteger),
    # Versions of the attempt's secrets, as model.secrets.Pinned.
    sa.Column("secrets_json", sa.Text, nullable=False, default="[]"),
    # Prices at placement, as model.billing.pricing.Tariff.
    sa.Column("tariff_json", sa.Text, nullable=False, default="{}"),
    sa.Column("account_id", sa.ForeignKey("accounts.id")),  # Account of the attempt's charges, chosen at placement.
    # Version of the attempt, incremented by each change.
    sa.Column("version", sa.Integer, nullable=False, default=0),
    # Nonce with which the gang's supervisors identify each other.
    sa.Column("nonce", sa.String(64), nullable=False, default=""),
    sa.Column("chosen_json", sa.Text),  # Chosen rendezvous of the gang, as model.lifecycle.rendezvous.Chosen.
    sa.Column("called_off", sa.Boolean, nullable=False, default=False),  # True if the server cancelled the rendezvous.
    sa.Column("released", sa.Boolean, nullable=False, default=False),  # True once all ranks have returned and may exit.
    sa.Column("cause_json", sa.Text),  # First failure of the gang, as model.lifecycle.gang_lifecycle.Cause.
)

crews = sa.Table(  # Supervisors of attempts, one row per attempt and node.
    "crews",
    metadata,
    sa.Column("run_id", sa.String(26), primary_key=True),
    sa.Column("fence", sa.Integer, primary_key=True),
    sa.Column("crew", sa.Integer, primary_key=True),  # Number of the supervisor within the attempt, from 0.
    sa.Column("node_id", sa.ForeignKey("nodes.id"), nullable=False, index=True),
    sa.Column("boot_id", sa.String(64), nullable=False),  # Boot identifier of the node at placement.
    sa.Column("first_rank", sa.Integer, nullable=False, default=0),
    sa.Column("gpus", sa.Integer, nullable=False),
    sa.Column("token_sha256", sa.String(64), nullable=False, unique=True),
    # Last stored lease renewal. The server does not store every renewal.
    sa.Column("lease_ns", sa.BigInteger, nullable=False),
    # Maximum seconds that the supervisor continues without contact to the server.
    sa.Column("grace_s", sa.Float, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("before", sa.String(16)),  # State of the supervisor before UNREACHABLE.
    sa.Column("began", sa.Boolean, nullable=False, default=False),
    sa.Column("reason", sa.String(32)),
    # True if the node has no remaining process of the ended attempt.
    sa.Column("proven", sa.Boolean, nullable=False, default=True),
    sa.Column("sentence", sa.Text, nullable=False, default=""),
    sa.Column("leave_ns", sa.BigInteger),  # Announced stop deadline of the supervisor.
    sa.Column("started_ns", sa.BigInteger),
    sa.Column("ended_ns", sa.BigInteger),
    sa.Column("settled_ns", sa.BigInteger),
    # End reason that the node reported for an abandoned attempt.
    sa.Column("late_reason", sa.String(32)),
    sa.Column("stopped_json", sa.Text),  # Stop record, as model.lifecycle.attempt.Stopped.
    sa.Column("receipt_json", sa.Text),
    sa.Column("halt_json", sa.Text),  # Requested halt, as model.lifecycle.gang_lifecycle.Halt.
    sa.Column("returned", sa.Boolean, nullable=False, default=False),
    # True if the attempt has ended with incomplete charges.
    sa.Column("uncharged", sa.Boolean, nullable=False, default=False),
    sa.ForeignKeyConstraint(["run_id", "fence"], ["attempts.run_id", "attempts.fence"]),
    sa.UniqueConstraint("run_id", "fence", "node_id"),
    sa.Index(  # Index for the query of uncharged attempts in `charging.py`.
        "ix_crews_uncharged",
        "uncharged",
        sqlite_where=sa.text("uncharged"),
        postgresql_where=sa.text("uncharged"),
    ),
)

secrets = sa.Table(
    "secrets",
    metadata,
    sa.Column("kind", sa.String(8), primary_key=True),  # Kind of the secret's owner: user or team.
    sa.Column("owner", sa.String(64), primary_key=True),
    sa.Column("name", sa.String(64), primary_key=True),
    # Version number of the secret, from 1. The deletion of a secret is also a version.
    sa.Column("version", sa.Integer, primary_key=True),
    # Encrypted value of the secret; NULL for deleted or outdated values.
    sa.Column("sealed", sa.LargeBinary),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("by", sa.String(64), nullable=False),
    sa.Column("used_ns", sa.BigInteger),  # Last time at which the node of an attempt received the secret.
)

indexes = sa.Table(  # Package indexes of the index proxy.
    "indexes",
    metadata,
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("hosts_json", sa.Text, nullable=False),  # Further hosts of files.
    sa.Column("private", sa.Boolean, nullable=False),
    sa.Column("secret", sa.String(64), nullable=False),  # Name of the secret with the credentials, or "".
    sa.Column("secret_kind", sa.String(8), nullable=False),
    sa.Column("secret_owner", sa.String(64), nullable=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("by", sa.String(64), nullable=False),
)

orders = sa.Table(  # Outbox of orders to nodes. The server repeats each order until the node's acknowledgement.
    "orders",
    metadata,
    sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("node_id", sa.ForeignKey("nodes.id"), nullable=False),
    sa.Column("run_id", sa.String(26), nullable=False),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("crew", sa.Integer, nullable=False, default=0),
    sa.Column("kind", sa.String(8), nullable=False),  # Kind of the order: start or stop.
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
    sa.Column("seq", sa.Integer, primary_key=True),  # Sequence number of the event within the run, from 1.
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

accounts = sa.Table(  # Usage dimensions that charges share, such as owner, pool and tags.
    "accounts",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("sha256", sa.String(64), nullable=False, unique=True),  # Hash of the account's following columns.
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("team", sa.String(64), nullable=False),
    sa.Column("pool", sa.String(64), nullable=False),
    sa.Column("reserved", sa.Boolean, nullable=False),  # True if the attempt used a reserved pool.
    sa.Column("policy", sa.String(64), nullable=False),
    sa.Column("gpu_type", sa.String(256), nullable=False),
    sa.Column("name", sa.String(256), nullable=False),  # Name of the run.
    sa.Column("workload", sa.String(16), nullable=False),  # Kind of workload: function, command or kernel.
    sa.Column("environment", sa.String(64), nullable=False),  # Key of the environment snapshot, or "".
    sa.Column("currency", sa.String(8), nullable=False),
    sa.Column("tags_json", sa.Text, nullable=False),
    sa.Column("member_of_json", sa.Text),  # Teams that share the usage of a run without a team.
    # Plain account: the account with the same values but without tags and environment.
    sa.Column("plain_id", sa.BigInteger, nullable=False, server_default="0"),
)

charges = sa.Table(  # Append-only ledger of `LedgerEntry` rows.
    "charges",
    metadata,
    sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("run_id", sa.String(26), nullable=False),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("crew", sa.Integer, nullable=False, default=0),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),  # Kind of the ledger entry: original, reversal or restated.
    sa.Column("provisional", sa.Boolean, nullable=False),
    sa.Column("account_id", sa.ForeignKey("accounts.id"), nullable=False),
    sa.Column("posted_ns", sa.BigInteger, nullable=False),
    sa.Column("day", sa.Integer, nullable=False),
    sa.Column("start_ns", sa.BigInteger, nullable=False),
    sa.Column("end_ns", sa.BigInteger, nullable=False),
    sa.Column("gpus", sa.Integer, nullable=False),
    # Queue time of the run, only in the first ledger entry of supervisor 0.
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

account_tags = sa.Table(  # Account tags as rows for reports, without empty tags.
    "account_tags",
    metadata,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("account_id", sa.ForeignKey("accounts.id"), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
    sa.Index("ix_account_tags_value", "key", "value"),
    sqlite_with_rowid=False,
)

utilisations = sa.Table(  # Device utilisation from telemetry, one row per receipt.
    "utilisations",
    metadata,
    sa.Column("run_id", sa.String(26), primary_key=True),
    sa.Column("fence", sa.Integer, primary_key=True),
    sa.Column("crew", sa.Integer, primary_key=True, default=0),
    sa.Column("account_id", sa.ForeignKey("accounts.id"), nullable=False),
    sa.Column("day", sa.Integer, nullable=False),  # Day on which the attempt ended.
    sa.Column("gpus", sa.Integer, nullable=False),
    sa.Column("gpu_ms", sa.BigInteger, nullable=False),
    sa.Column("observed_ms", sa.BigInteger, nullable=False),  # Observed device-milliseconds.
    sa.Column("busy_ms", sa.BigInteger, nullable=False),  # Observed device-milliseconds with a busy device.
    sa.Column("peak_memory_bytes", sa.BigInteger),  # Maximum memory use of a single device.
    sa.Column("plain_id", sa.BigInteger, nullable=False, server_default="0"),  # `plain_id` of the account.
    # Covering index for utilisation reports.
    sa.Index("ix_utilisations_day", "day", "account_id", "observed_ms", "busy_ms"),
    sa.Index("ix_utilisations_plain", "day", "plain_id", "observed_ms", "busy_ms"),  # alike
)


def _sums() -> list[sa.Column[int]]:
    """Return the columns for sums of `charges`."""
    names = (
        "runs",  # Number of runs with an included first ledger entry.
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


# Daily sums of `charges` for reports. The server can rebuild the daily sums from `charges` (`usage_rollup.py`).
used_days = sa.Table(
    "used_days",
    metadata,
    sa.Column("day", sa.Integer, primary_key=True),
    sa.Column("account_id", sa.ForeignKey("accounts.id"), primary_key=True),
    *_sums(),
)

# Daily sums by plain account. Tags therefore do not increase the number of rows.
used_plain_days = sa.Table(
    "used_plain_days",
    metadata,
    sa.Column("day", sa.Integer, primary_key=True),
    sa.Column("account_id", sa.ForeignKey("accounts.id"), primary_key=True),
    *_sums(),
)

folded = sa.Table(  # Number of the last ledger entry that `used_days` includes, in one row.
    "folded",
    metadata,
    sa.Column("name", sa.String(16), primary_key=True),
    sa.Column("seq", sa.BigInteger, nullable=False),
)

audit = sa.Table(  # Append-only record of principals' actions.
    "audit",
    metadata,
    sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("at_ns", sa.BigInteger, nullable=False),
    sa.Column("principal", sa.String(64), nullable=False),
    sa.Column("action", sa.String(64), nullable=False),  # Audited action, such as "run.create" or "token.revoke".
    sa.Column("subject", sa.String(256), nullable=False),
    sa.Column("detail_json", sa.Text, nullable=False, default="{}"),
    sa.Column("token", sa.String(26), nullable=False, default=""),
    sa.Index("ix_audit_subject", "subject"),
    sa.Index("ix_audit_principal", "principal"),
    sa.Index("ix_audit_action", "action"),
    sa.Index("ix_audit_at", "at_ns"),
)

audit_links = sa.Table(  # Append-only hash chain of the audit entries.
    "audit_links",
    metadata,
    sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=False),
    sa.Column("seq", sa.ForeignKey("audit.seq"), nullable=False, unique=True),
    sa.Column("sha256", sa.String(64), nullable=False),
)

server_identity = sa.Table(  # Database identity and owning server, in one row (`leader_lock.py`).
    "server_identity",
    metadata,
    sa.Column("name", sa.String(16), primary_key=True),
    sa.Column("database_id", sa.String(32), nullable=False),  # Permanent random identifier.
    # Generation of the owning server.
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("holder", sa.String(64), nullable=False),  # `LeaderLock.name` of the owning server process.
    sa.Column("claimed_ns", sa.BigInteger, nullable=False),
    # Number of commits in SQLite; unused in PostgreSQL.
    sa.Column("commits", sa.BigInteger, nullable=False, default=0),
    sa.Column("probed_ns", sa.BigInteger, nullable=False, default=0),  # Time of the last probe write by `/health`.
)
