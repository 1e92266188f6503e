"""Repository of the audit of principals' actions.

The transaction of an action also adds the action's audit row. Later, a loop (`AuditChainWriter`) adds each audit row to
the hash chain (`model/audit_chain.py`). Concurrent transactions may commit audit rows out of order. A hash chain inside
the transactions would force all audited actions to run one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.audit_chain import ChainedEntry, ChainHead, digest
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.tables import audit, audit_links


class Action(StrEnum):
    """Kind of an audited action. The noun before the dot names the kind of the action's `subject`."""

    RUN_CREATE = "run.create"
    RUN_STOP = "run.stop"
    RUN_STALE = "run.stale"
    RUN_EXPIRE = "run.expire"
    RUN_LOGS_EXPIRE = "run.logs.expire"
    NODE_JOIN = "node.join"
    NODE_PENDING = "node.pending"
    NODE_APPROVE = "node.approve"
    NODE_BIND = "node.bind"
    NODE_MOVE = "node.move"
    NODE_REFUSE = "node.refuse"
    NODE_INVITE = "node.invite"
    NODE_FORGET = "node.forget"
    NODE_ROTATE = "node.rotate"
    NODE_KEY = "node.key"
    NODE_REVOKE = "node.revoke"
    NODE_DRAIN = "node.drain"
    NODE_RESUME = "node.resume"
    NODE_CALENDAR = "node.calendar"
    NODE_QUARANTINE = "node.quarantine"
    NODE_RELEASE = "node.release"
    NODE_CANARY = "node.canary"
    TUNNEL_OPEN = "tunnel.open"
    POOL_PUT = "pool.put"
    POOL_DELETE = "pool.delete"
    SHARE_SET = "share.set"
    SHARE_REMOVE = "share.remove"
    POLICY_SET = "policy.set"
    POLICY_DELETE = "policy.delete"
    POLICY_ATTACH = "policy.attach"
    POLICY_DETACH = "policy.detach"
    PRICE_SET = "price.set"
    PRICE_END = "price.end"
    BUDGET_SET = "budget.set"
    BUDGET_DELETE = "budget.delete"
    BUDGET_WARNING = "budget.warning"
    BUDGET_REACHED = "budget.reached"
    BUDGET_CLOSED = "budget.closed"
    BUDGET_REOPEN = "budget.reopen"
    SPEND_ALARM = "spend.alarm"
    ENVIRONMENT_DELETE = "environment.delete"
    USER_CREATE = "user.create"
    USER_CHANGE = "user.change"
    USER_DELETE = "user.delete"
    TEAM_CREATE = "team.create"
    TEAM_CHANGE = "team.change"
    TEAM_DELETE = "team.delete"
    TEAM_ADD = "team.add"
    TEAM_REMOVE = "team.remove"
    TOKEN_CREATE = "token.create"
    TOKEN_REVOKE = "token.revoke"
    SESSION_OPEN = "session.open"
    SESSION_END = "session.end"
    DEVICE_REFUSE = "device.refuse"
    PASSWORD_SET = "password.set"
    PASSWORD_RESET = "password.reset"
    PASSWORD_REMOVE = "password.remove"
    IDENTITY_LINK = "identity.link"
    IDENTITY_UNLINK = "identity.unlink"
    SERVER_DRAIN = "server.drain"
    SERVER_RESUME = "server.resume"
    SERVER_RESTORE = "server.restore"
    SERVER_ROTATE = "server.rotate"
    SECRET_SET = "secret.set"
    SECRET_DELETE = "secret.delete"
    INDEX_SET = "index.set"
    INDEX_DELETE = "index.delete"


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the audit.

    Attributes:
        seq: number of the row, which increases with time.
        at_ns: nanoseconds since 1970.
        principal: name of the principal that acted; "server" for actions of the server.
        detail: details of the action, without secrets and values of variables.
        token: identifier of the caller's token, or "".
    """

    seq: int
    at_ns: int
    principal: str
    action: str
    subject: str
    detail: dict[str, object]
    token: str


_INSERT = sa.insert(audit)
FEW = 5_000
"""Maximum number of rows with one value for which a search uses the value's index."""
_BACK = 10_000
"""Maximum number of audit rows that other transactions insert while one transaction is open."""
SERVER = Caller(name="server", kind="service")
"""Actor of audited actions without a requesting principal."""


def record(
    connection: sa.Connection,
    *,
    who: Caller,
    action: Action,
    subject: str,
    now_ns: int,
    detail: Mapping[str, object] | None = None,
) -> None:
    """Record an action in the transaction that performs the action.

    Args:
        connection: the connection of the action's transaction.
        who: the acting principal.
        action: the kind of the action.
        subject: the identifier or name of the object of the action.
        now_ns: nanoseconds since 1970.
        detail: JSON values without secrets.
    """
    values = {
        "at_ns": now_ns,
        "principal": who.name or "attempt",
        "action": action.value,
        "subject": subject,
        "detail_json": msgspec.json.encode(detail or {}).decode(),
        "token": who.token_id,
    }
    connection.execute(_INSERT, values)


def entries(connection: sa.Connection, *, after: int = 0, limit: int = 500) -> list[AuditEntry]:
    """Return audit entries after row `after`, including entries that are not in the audit chain."""
    query = sa.select(audit).where(audit.c.seq > after).order_by(audit.c.seq).limit(limit)
    return [_entry(row) for row in connection.execute(query)]


def of_subject(connection: sa.Connection, subject: str, action: Action, *, limit: int) -> list[AuditEntry]:
    """Return the entries of one action on one object, oldest first."""
    query = sa.select(audit).where(audit.c.subject == subject, audit.c.action == action.value)
    return [_entry(row) for row in connection.execute(query.order_by(audit.c.seq).limit(limit))]


class AuditFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of audit entries. The value "" of a field matches any entry.

    Attributes:
        after: number of the last audit entry that the caller has already read.
        before: number of the first audit entry that the result omits, or None for no end.
        limit: maximum number of entries.
        newest: True to return the newest entries instead of the entries after `after`.
        from_ns: start of the interval in nanoseconds since 1970, or None. `to_ns` is the end of the interval.
    """

    after: int = 0
    before: int | None = None
    limit: int = 500
    newest: bool = False
    principal: str = ""
    action: str = ""
    subject: str = ""
    from_ns: int | None = None
    to_ns: int | None = None


def links(connection: sa.Connection, wanted: AuditFilter) -> list[ChainedEntry]:
    """Return entries of the audit chain in order. Entries with a removed row have only number and digest."""
    number = audit_links.c.number
    query = sa.select(audit_links, *_TOLD).select_from(audit_links.outerjoin(audit)).where(number > wanted.after)
    for column in (audit.c.principal, audit.c.action, audit.c.subject):
        value = getattr(wanted, column.name)
        query = query.where(_equals(connection, column, value)) if value else query
    if wanted.before is not None:
        query = query.where(number < wanted.before)
    if wanted.from_ns is not None:
        first = connection.scalar(_next(wanted.from_ns))
        query = query.where(_at >= wanted.from_ns, number >= _number(connection, first) - 2 * _BACK)
    if wanted.to_ns is not None:
        last = connection.scalar(_next(wanted.to_ns))
        query = query.where(_at < wanted.to_ns)
        query = query if last is None else query.where(number <= _number(connection, last) + 2 * _BACK)
    rows = connection.execute(query.order_by(number.desc() if wanted.newest else number).limit(wanted.limit)).all()
    return [_link(row) for row in (reversed(rows) if wanted.newest else rows)]


def _equals(connection: sa.Connection, column: sa.Column[str], value: str) -> sa.ColumnElement[bool]:
    """Return the condition on a column, which uses the column's index only for rare values.

    With the index, a query reads and sorts every matching row. Without the index, the query reads the chain in order
    and stops after the requested number of entries, which is faster for frequent values.
    """
    some = sa.select(sa.literal(1)).where(column == value).limit(FEW + 1).subquery()
    is_rare = (connection.scalar(sa.select(sa.func.count()).select_from(some)) or 0) <= FEW
    return column == value if is_rare else sa.func.coalesce(column, "") == value


def _next(at_ns: int) -> sa.Select[Any]:
    """Return a query for the first row at a time or later."""
    return sa.select(audit.c.seq).where(audit.c.at_ns >= at_ns).order_by(audit.c.at_ns).limit(1)


def _number(connection: sa.Connection, seq: int | None) -> int:
    """Return the number of the last entry up to a row. Times, rows and numbers have almost the same order."""
    query = sa.select(audit_links.c.number).order_by(audit_links.c.seq.desc()).limit(1)
    return connection.scalar(query if seq is None else query.where(audit_links.c.seq <= seq)) or 0


def head(connection: sa.Connection) -> ChainHead:
    """Return the last entry of the audit chain."""
    query = sa.select(audit_links.c.number, audit_links.c.sha256).order_by(audit_links.c.number.desc()).limit(1)
    row = connection.execute(query).first()
    return ChainHead() if row is None else ChainHead(row.number, row.sha256)


def chained_seq(connection: sa.Connection) -> int:
    """Return a row number up to which the audit chain is complete."""
    return max(0, (connection.scalar(sa.select(sa.func.max(audit_links.c.seq))) or 0) - _BACK)


def is_pending(connection: sa.Connection, *, after_seq: int) -> bool:
    """Return True if the audit chain lacks an audit row, with a faster query than `pending`."""
    unlinked = sa.select(audit.c.seq).select_from(_UNLINKED)
    wanted = unlinked.where(audit_links.c.number.is_(None), audit.c.seq > after_seq).limit(1)
    return connection.execute(wanted).first() is not None


def pending(connection: sa.Connection, *, after_seq: int) -> tuple[int, int | None]:
    """Return the number of audit rows outside the audit chain, and the time of the oldest of these rows."""
    query = sa.select(sa.func.count(), sa.func.min(audit.c.at_ns)).select_from(_UNLINKED)
    row = connection.execute(query.where(audit_links.c.number.is_(None), audit.c.seq > after_seq)).one()
    return row[0], row[1]


def chain(connection: sa.Connection, *, after_seq: int, limit: int) -> int:
    """Add the oldest rows outside the audit chain to the chain, and return their number.

    Args:
        connection: connection of a write transaction. Only one transaction that calls `chain` may run at a time.
        after_seq: row number up to which the chain is complete.
        limit: maximum number of rows.
    """
    query = sa.select(audit).select_from(_UNLINKED).where(audit_links.c.number.is_(None), audit.c.seq > after_seq)
    last = head(connection)
    made = []
    for row in connection.execute(query.order_by(audit.c.seq).limit(limit)).all():
        link = ChainedEntry(number=last.number + 1, detail=_decode(row.detail_json), **_plain(row))
        last = ChainHead(link.number, digest(last.sha256, link))
        made.append({"number": last.number, "seq": row.seq, "sha256": last.sha256})
    if made:
        connection.execute(sa.insert(audit_links), made)
    return len(made)


_at = sa.func.coalesce(audit.c.at_ns, 0)
"""Time of a row in a form that hides the index `ix_audit_at`, because the numbers already limit the rows."""
_TOLD = [column for column in audit.c if column.name != "seq"]
_UNLINKED = audit.outerjoin(audit_links)
_decode = msgspec.json.Decoder(dict[str, object]).decode


def _entry(row: sa.Row[Any]) -> AuditEntry:
    return AuditEntry(detail=_decode(row.detail_json), **_plain(row))


def _plain(row: sa.Row[Any]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("seq", "at_ns", "principal", "action", "subject", "token")}


def _link(row: sa.Row[Any]) -> ChainedEntry:
    said = {name: getattr(row, name) for name in ("number", "seq", "sha256")}
    if row.action is None:  # The verification of the audit chain detects a removed audit row.
        return ChainedEntry(at_ns=0, principal="", action="", subject="", detail={}, token="", **said)
    return ChainedEntry(detail=_decode(row.detail_json), **{**_plain(row), **said})
