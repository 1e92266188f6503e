"""The tables of the database. `migrations/` makes and changes them; `records/` reads and writes them.

Times are nanoseconds since 1970 (`*_ns`). Values that only travel are JSON (`*_json`) as `wire` or `model` define them.
A foreign key is there where a row without its parent would be a lie. What grows with use (log bytes, large outputs) is
in files and the store, not here.
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
"""Seconds within which a pool has back what it lends, where nothing else was said."""

principals = sa.Table(
    "principals",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),  # user, service
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("disabled_ns", sa.BigInteger),
    sa.Column("runs", sa.String(8)),  # once they may start none: what becomes of those that go on: finish, stop
)

teams = sa.Table(
    "teams",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("time_zone", sa.String(64)),  # of the periods of its budgets; NULL for UTC
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
    sa.Column("sha256", sa.String(64), nullable=False, unique=True),  # of the secret, which is kept nowhere
    sa.Column("principal", sa.ForeignKey("principals.name"), nullable=False, index=True),
    sa.Column("label", sa.String(256), nullable=False, default=""),
    sa.Column("scopes_json", sa.Text, nullable=False, default="[]"),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("expires_ns", sa.BigInteger),
    sa.Column("revoked_ns", sa.BigInteger),
    sa.Column("used_ns", sa.BigInteger),  # coalesced: at most once a minute
    sa.Column("renews", sa.Boolean),  # a node's: each use puts its end off
)

pools = sa.Table(
    "pools",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),  # on-demand, reserved
    sa.Column("lends", sa.Boolean, nullable=False, default=False),  # a reserved one's idle devices, to BEST_EFFORT
    sa.Column("return_s", sa.Float, nullable=False, default=RETURN_S),  # within which they are back
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("isolation", sa.String(16)),  # none: several principals may share a uid; unset: not; NULL: undecided
)

shares = sa.Table(  # of the fair share; 1 without a row
    "shares",
    metadata,
    sa.Column("kind", sa.String(8), primary_key=True),  # team, user
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("weight", sa.Float, nullable=False),
    sa.Column("set_ns", sa.BigInteger, nullable=False),
)

policies = sa.Table(
    "policies",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("document_json", sa.Text, nullable=False),  # model.policy.UsagePolicy
    sa.Column("set_ns", sa.BigInteger, nullable=False),
)

policy_holders = sa.Table(  # whom usage policies are attached to
    "policy_holders",
    metadata,
    sa.Column("policy", sa.ForeignKey("policies.name"), primary_key=True),
    sa.Column("kind", sa.String(8), primary_key=True),  # user, service, team
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Index("ix_policy_holders_name", "kind", "name"),
)

prices = sa.Table(  # the price book; rows are ended, never changed
    "prices",
    metadata,
    sa.Column("resource", sa.String(256), primary_key=True),  # a GPU type, "core", "memory"
    sa.Column("pool", sa.String(64), primary_key=True, default=""),  # "" for every pool
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
    sa.Column("document_json", sa.Text, nullable=False),  # model.budget.Budget
    sa.Column("set_ns", sa.BigInteger, nullable=False),
)

budget_warnings = sa.Table(  # what was said of a budget in a period, each once
    "budget_warnings",
    metadata,
    sa.Column("budget", sa.String(64), primary_key=True),
    sa.Column("start_ns", sa.BigInteger, primary_key=True),  # of the period
    sa.Column("percent", sa.Integer, primary_key=True),
    sa.Column("at_ns", sa.BigInteger, nullable=False),
)

notices = sa.Table(  # what is to be told to the webhook: an outbox
    "notices",
    metadata,
    sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("at_ns", sa.BigInteger, nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),  # budget.warning, budget.reached, spend.alarm
    sa.Column("document_json", sa.Text, nullable=False),
    sa.Column("tries", sa.Integer, nullable=False, default=0),
    sa.Column("sent_ns", sa.BigInteger),
    sa.Index("ix_notices_open", "sent_ns", "seq"),
)

drains = sa.Table(  # a row: nothing new is started
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
    sa.Column("principal", sa.ForeignKey("principals.name"), nullable=False),  # whose token the agent has
    sa.Column("token_id", sa.String(26), nullable=False, default=""),  # with which it said hello last
    sa.Column("pool", sa.ForeignKey("pools.name"), nullable=False),
    sa.Column("hello_json", sa.Text, nullable=False),  # wire.agents.AgentHello without attempts, as last heard
    sa.Column("seen_ns", sa.BigInteger, nullable=False),  # coalesced
    sa.Column("forgotten_ns", sa.BigInteger),
    sa.Column("rules_json", sa.Text, nullable=False, default="{}"),  # wire.nodes.NodeRules
)

node_bindings = sa.Table(  # which node a token is for; one that is not approved waits for an administrator
    "node_bindings",
    metadata,
    sa.Column("token", sa.ForeignKey("tokens.id"), primary_key=True),
    sa.Column("node", sa.String(256), nullable=False, default=""),  # its name; "": the first that says hello
    sa.Column("machine", sa.String(64), nullable=False, default=""),
    sa.Column("instance", sa.String(64), nullable=False, default=""),
    sa.Column("asked_ns", sa.BigInteger, nullable=False),
    sa.Column("approved_ns", sa.BigInteger),
    sa.Column(
        "approved_by", sa.String(64), nullable=False, default=""
    ),  # a principal, a join token, "server", "upgrade"
    sa.Index("ix_node_bindings_node", "node"),
)

invitations = sa.Table(  # join tokens
    "invitations",
    metadata,
    sa.Column("token", sa.ForeignKey("tokens.id"), primary_key=True),
    sa.Column("node", sa.String(256), nullable=False, default=""),  # the only name it lets in, or ""
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
    sa.Column("priority", sa.Integer, nullable=False),  # 0 is the first to be served
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("reason", sa.String(32)),
    sa.Column("detail", sa.Text, nullable=False, default=""),
    sa.Column("fence", sa.Integer, nullable=False, default=0),  # of the current attempt; 0 before the first
    sa.Column("stop", sa.String(16)),  # why it is asked to stop
    sa.Column("retries_used", sa.Integer, nullable=False, default=0),
    sa.Column("infra_retries_used", sa.Integer, nullable=False, default=0),
    sa.Column("fault_retries_used", sa.Integer, nullable=False, default=0),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("queued_ns", sa.BigInteger, nullable=False),  # its age in the queue; a requeued run keeps it
    sa.Column("started_ns", sa.BigInteger),
    sa.Column("ended_ns", sa.BigInteger),
    sa.Column("settled_ns", sa.BigInteger),
    sa.Column("events", sa.Integer, nullable=False, default=0),  # seq of the last one
    sa.Column("request_sha256", sa.String(64), nullable=False),  # keyed, of the canonical request: same id, same body?
    sa.Column("spec_json", sa.Text, nullable=False),
    sa.Column("target_json", sa.Text, nullable=False),
    sa.Column("tags_json", sa.Text, nullable=False, default="{}"),
    sa.Column("snapshot", sa.String(64), nullable=False, default=""),
    sa.Column("context_sealed", sa.LargeBinary, nullable=False),  # encrypted: it holds the caller's variables
    sa.Column("call", sa.LargeBinary),
    sa.Column("client_version", sa.String(32), nullable=False, default=""),
    sa.Column("tracked", sa.Text, nullable=False, default=""),  # link to it in MLflow
    sa.Column("promised_json", sa.Text),  # model.scheduling.values.Reservation: the latest time it was told to start
    sa.Column("restored_ns", sa.BigInteger),  # when the server was restored from a backup in which it went on
    sa.Column("member_of_json", sa.Text),  # of one without a team: the teams of its owner when it was submitted
    sa.Column("saved", sa.Integer, nullable=False, default=0, server_default="0"),  # newest attempt with a checkpoint
    sa.Column("unsaved", sa.Integer, nullable=False, default=0, server_default="0"),  # attempts in a row without one
    sa.Column("ran", sa.Integer, nullable=False, default=0, server_default="0"),  # attempts that count for its policy
    sa.Column("ran_ms", sa.BigInteger, nullable=False, default=0, server_default="0"),  # user code of those before
    sa.Index("ix_runs_queue", "state", "priority", "queued_ns"),
    sa.Index("ix_runs_owner", "owner", "id"),
    sa.Index(  # `past.durations_s`
        "ix_runs_succeeded",
        "owner",
        "name",
        "id",
        sqlite_where=sa.text("state = 'SUCCEEDED'"),
        postgresql_where=sa.text("state = 'SUCCEEDED'"),
    ),
)

attempts = sa.Table(  # what is the same for all crews of one
    "attempts",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("fence", sa.Integer, primary_key=True),
    sa.Column("gpu_type", sa.String(256), nullable=False),
    sa.Column("world_size", sa.Integer, nullable=False),
    sa.Column("num_nodes", sa.Integer, nullable=False, default=1),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("before", sa.String(16)),  # what it was when it became UNREACHABLE
    sa.Column("reason", sa.String(32)),
    sa.Column("began", sa.Boolean, nullable=False, default=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("started_ns", sa.BigInteger),
    sa.Column("ended_ns", sa.BigInteger),
    sa.Column("settled_ns", sa.BigInteger),
    sa.Column("secrets_json", sa.Text, nullable=False, default="[]"),  # model.secrets.Pinned, none of their values
    sa.Column("tariff_json", sa.Text, nullable=False, default="{}"),  # model.pricing.Tariff, as it was placed
    sa.Column("account_id", sa.ForeignKey("accounts.id")),  # of all its charges, as it was placed
    sa.Column("version", sa.Integer, nullable=False, default=0),  # of it and its crews: whoever changes one counts on
    sa.Column("nonce", sa.String(64), nullable=False, default=""),  # by which its crews know each other
    sa.Column("chosen_json", sa.Text),  # rendezvous.Chosen: how its crews meet
    sa.Column("called_off", sa.Boolean, nullable=False, default=False),  # its crews will not meet
    sa.Column("released", sa.Boolean, nullable=False, default=False),  # all of its ranks have returned, and may exit
    sa.Column("cause_json", sa.Text),  # gang_lifecycle.Cause
)

crews = sa.Table(  # what an attempt has on one node
    "crews",
    metadata,
    sa.Column("run_id", sa.String(26), primary_key=True),
    sa.Column("fence", sa.Integer, primary_key=True),
    sa.Column("crew", sa.Integer, primary_key=True),  # 0, 1, 2 … of this attempt
    sa.Column("node_id", sa.ForeignKey("nodes.id"), nullable=False, index=True),
    sa.Column("boot_id", sa.String(64), nullable=False),  # of the node when it was placed there
    sa.Column("first_rank", sa.Integer, nullable=False, default=0),
    sa.Column("gpus", sa.Integer, nullable=False),
    sa.Column("token_sha256", sa.String(64), nullable=False, unique=True),
    sa.Column("lease_ns", sa.BigInteger, nullable=False),  # last renewal that was written (coalesced)
    sa.Column("grace_s", sa.Float, nullable=False),  # the longest it was ever allowed to go on without an answer
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("before", sa.String(16)),  # what it was when it became UNREACHABLE
    sa.Column("began", sa.Boolean, nullable=False, default=False),
    sa.Column("reason", sa.String(32)),
    sa.Column("proven", sa.Boolean, nullable=False, default=True),  # of one that ended: no process of it is left
    sa.Column("sentence", sa.Text, nullable=False, default=""),
    sa.Column("leave_ns", sa.BigInteger),  # when it has to leave its node, as its owner was told
    sa.Column("started_ns", sa.BigInteger),
    sa.Column("ended_ns", sa.BigInteger),
    sa.Column("settled_ns", sa.BigInteger),
    sa.Column("late_reason", sa.String(32)),  # how its node says it ended, after it was given up
    sa.Column("stopped_json", sa.Text),  # node.protocol.Stopped
    sa.Column("receipt_json", sa.Text),
    sa.Column("halt_json", sa.Text),  # gang_lifecycle.Halt
    sa.Column("returned", sa.Boolean, nullable=False, default=False),
    sa.Column("uncharged", sa.Boolean, nullable=False, default=False),  # it has ended, and charges do not say all of it
    sa.ForeignKeyConstraint(["run_id", "fence"], ["attempts.run_id", "attempts.fence"]),
    sa.UniqueConstraint("run_id", "fence", "node_id"),
    sa.Index(  # `charging.py` looks for them
        "ix_crews_uncharged",
        "uncharged",
        sqlite_where=sa.text("uncharged"),
        postgresql_where=sa.text("uncharged"),
    ),
)

secrets = sa.Table(
    "secrets",
    metadata,
    sa.Column("kind", sa.String(8), primary_key=True),  # user, team
    sa.Column("owner", sa.String(64), primary_key=True),
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),  # 1, 2, 3 … of this name, deletions among them
    sa.Column("sealed", sa.LargeBinary),  # encrypted; None: deleted, or replaced and of no attempt any more
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("by", sa.String(64), nullable=False),
)

orders = sa.Table(  # the outbox: written with the decision, delivered until acknowledged
    "orders",
    metadata,
    sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("node_id", sa.ForeignKey("nodes.id"), nullable=False),
    sa.Column("run_id", sa.String(26), nullable=False),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("crew", sa.Integer, nullable=False, default=0),
    sa.Column("kind", sa.String(8), nullable=False),  # start, stop
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
    sa.Column("seq", sa.Integer, primary_key=True),  # 1, 2, 3 … of this run
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

accounts = sa.Table(  # who used something, and as what: charges that are alike in all of it share a row
    "accounts",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("sha256", sa.String(64), nullable=False, unique=True),  # of all that follows
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("team", sa.String(64), nullable=False),
    sa.Column("pool", sa.String(64), nullable=False),
    sa.Column("reserved", sa.Boolean, nullable=False),  # whether that pool was
    sa.Column("policy", sa.String(64), nullable=False),
    sa.Column("gpu_type", sa.String(256), nullable=False),
    sa.Column("name", sa.String(256), nullable=False),  # of the run
    sa.Column("workload", sa.String(16), nullable=False),  # function, command, kernel
    sa.Column("environment", sa.String(64), nullable=False),  # the snapshot, or ""
    sa.Column("currency", sa.String(8), nullable=False),
    sa.Column("tags_json", sa.Text, nullable=False),
    sa.Column("member_of_json", sa.Text),  # of a run without a team: the teams that it counts for
    # The account with the same values, but no tags and no environment; itself for such a one.
    sa.Column("plain_id", sa.BigInteger, nullable=False, server_default="0"),
)

charges = sa.Table(  # the ledger: `LedgerEntry`; only ever added to, and kept when its run is removed
    "charges",
    metadata,
    sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("run_id", sa.String(26), nullable=False),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("crew", sa.Integer, nullable=False, default=0),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),  # original, reversal, restated
    sa.Column("provisional", sa.Boolean, nullable=False),
    sa.Column("account_id", sa.ForeignKey("accounts.id"), nullable=False),
    sa.Column("posted_ns", sa.BigInteger, nullable=False),
    sa.Column("day", sa.Integer, nullable=False),
    sa.Column("start_ns", sa.BigInteger, nullable=False),
    sa.Column("end_ns", sa.BigInteger, nullable=False),
    sa.Column("gpus", sa.Integer, nullable=False),
    sa.Column("queued_ms", sa.BigInteger, nullable=False),  # wall time, of the first entry of crew 0
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
    sa.Table(  # `accounts.tags_json` as rows, for reports; without empty values and what PostgreSQL cannot hold
        "account_tags",
        metadata,
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("account_id", sa.ForeignKey("accounts.id"), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
        sa.Index("ix_account_tags_value", "key", "value"),
        sqlite_with_rowid=False,
    )
)

utilisations = sa.Table(  # what telemetry saw of a crew's devices, by its receipt; kept as charges are
    "utilisations",
    metadata,
    sa.Column("run_id", sa.String(26), primary_key=True),
    sa.Column("fence", sa.Integer, primary_key=True),
    sa.Column("crew", sa.Integer, primary_key=True, default=0),
    sa.Column("account_id", sa.ForeignKey("accounts.id"), nullable=False),
    sa.Column("day", sa.Integer, nullable=False),  # on which it ended
    sa.Column("gpus", sa.Integer, nullable=False),
    sa.Column("gpu_ms", sa.BigInteger, nullable=False),
    sa.Column("observed_ms", sa.BigInteger, nullable=False),  # device-milliseconds that telemetry saw
    sa.Column("busy_ms", sa.BigInteger, nullable=False),  # and those in which a device worked
    sa.Column("peak_memory_bytes", sa.BigInteger),  # the most of one device
    sa.Column("plain_id", sa.BigInteger, nullable=False, server_default="0"),  # of its account
    sa.Index("ix_utilisations_day", "day", "account_id", "observed_ms", "busy_ms"),  # all that a report reads
    sa.Index("ix_utilisations_plain", "day", "plain_id", "observed_ms", "busy_ms"),  # alike
)


def _sums() -> list[sa.Column[int]]:
    """Return the columns of a table of sums of `charges`."""
    names = (
        "runs",  # whose first entry is among them
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


used_days = sa.Table(  # sums of `charges` up to a number, for reports: `usage_rollup.py`; may be made again from them
    "used_days",
    metadata,
    sa.Column("day", sa.Integer, primary_key=True),
    sa.Column("account_id", sa.ForeignKey("accounts.id"), primary_key=True),
    *_sums(),
)

used_plain_days = sa.Table(  # sums of `used_days` by `accounts.plain_id`: few, however many tags there are
    "used_plain_days",
    metadata,
    sa.Column("day", sa.Integer, primary_key=True),
    sa.Column("account_id", sa.ForeignKey("accounts.id"), primary_key=True),
    *_sums(),
)

folded = sa.Table(  # up to which entry of `charges` those sums go: a row
    "folded",
    metadata,
    sa.Column("name", sa.String(16), primary_key=True),
    sa.Column("seq", sa.BigInteger, nullable=False),
)

audit = sa.Table(  # who did what; only ever added to
    "audit",
    metadata,
    sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("at_ns", sa.BigInteger, nullable=False),
    sa.Column("principal", sa.String(64), nullable=False),
    sa.Column("action", sa.String(64), nullable=False),  # "run.create", "token.revoke" …
    sa.Column("subject", sa.String(256), nullable=False),
    sa.Column("detail_json", sa.Text, nullable=False, default="{}"),
    sa.Column("token", sa.String(26), nullable=False, default=""),
    sa.Index("ix_audit_subject", "subject"),
)

audit_links = sa.Table(  # the chain through the audit: its order, and a digest for each entry; only ever added to
    "audit_links",
    metadata,
    sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=False),
    sa.Column("seq", sa.ForeignKey("audit.seq"), nullable=False, unique=True),
    sa.Column("sha256", sa.String(64), nullable=False),
)

server_identity = sa.Table(  # one row: which database this is, and which server has it (`leader_lock.py`)
    "server_identity",
    metadata,
    sa.Column("name", sa.String(16), primary_key=True),
    sa.Column("database_id", sa.String(32), nullable=False),  # random, given once
    sa.Column("generation", sa.BigInteger, nullable=False),  # one higher with each server that claims the database
    sa.Column("holder", sa.String(64), nullable=False),  # `LeaderLock.name` of that server: different in each process
    sa.Column("claimed_ns", sa.BigInteger, nullable=False),
    sa.Column("commits", sa.BigInteger, nullable=False, default=0),  # of SQLite; PostgreSQL's writers share no row
    sa.Column("probed_ns", sa.BigInteger, nullable=False, default=0),  # when `/health` wrote last
)
