"""The audit: which principal did what. The server only adds rows, in the transaction of the action.

A loop (`AuditChainWriter`) adds each row to the chain (`model/audit_chain.py`) later. Row numbers have gaps and arrive
out of order under concurrent writes. A chain inside the transactions would force them to run one after the other.
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
    """Kind of an audited action. The noun before the dot names the kind of `subject`."""

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
    NODE_DRAIN = "node.drain"
    NODE_RESUME = "node.resume"
    NODE_CALENDAR = "node.calendar"
    NODE_QUARANTINE = "node.quarantine"
    NODE_RELEASE = "node.release"
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
    SERVER_DRAIN = "server.drain"
    SERVER_RESUME = "server.resume"
    SERVER_RESTORE = "server.restore"
    SERVER_ROTATE = "server.rotate"
    SECRET_SET = "secret.set"
    SECRET_DELETE = "secret.delete"


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One row.

    Attributes:
        seq: number of the row; later rows have higher numbers.
        at_ns: nanoseconds since 1970.
        principal: name of the principal that acted; "server" for the server itself.
        detail: details of the action; never a secret or the value of a variable.
        token: identifier of the token that was used, or "".
    """

    seq: int
    at_ns: int
    principal: str
    action: str
    subject: str
    detail: dict[str, object]
    token: str


_INSERT = sa.insert(audit)
_BACK = 10_000
"""The maximum number of rows that others may insert between the start of a transaction and its commit."""
SERVER = Caller(name="server", kind="service")
"""The actor of actions that no principal asked for."""


def record(
    connection: sa.Connection,
    *,
    who: Caller,
    action: Action,
    subject: str,
    now_ns: int,
    detail: Mapping[str, object] | None = None,
) -> None:
    """Record an action in the transaction that performs it.

    Args:
        connection: the connection of that transaction.
        who: the principal that acts.
        action: the kind of the action.
        subject: the identifier or name of the object of the action.
        now_ns: nanoseconds since 1970.
        detail: JSON values; no secrets.
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
    """Return entries after row `after`, in the order of their rows, with or without a place in the chain."""
    query = sa.select(audit).where(audit.c.seq > after).order_by(audit.c.seq).limit(limit)
    return [
        AuditEntry(
            seq=row.seq,
            at_ns=row.at_ns,
            principal=row.principal,
            action=row.action,
            subject=row.subject,
            detail=_decode(row.detail_json),
            token=row.token,
        )
        for row in connection.execute(query)
    ]


class AuditFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of entries; "" matches any value.

    Attributes:
        after: number of the last entry that the caller already has.
        limit: maximum number of entries.
        newest: True for the last entries instead of the next ones.
    """

    after: int = 0
    limit: int = 500
    newest: bool = False
    principal: str = ""
    action: str = ""
    subject: str = ""


def links(connection: sa.Connection, wanted: AuditFilter) -> list[ChainedEntry]:
    """Return entries of the chain in order. An entry without a row has only its number and digest."""
    number = audit_links.c.number
    query = sa.select(audit_links, *_TOLD).select_from(audit_links.outerjoin(audit)).where(number > wanted.after)
    for column in (audit.c.principal, audit.c.action, audit.c.subject):
        value = getattr(wanted, column.name)
        query = query.where(column == value) if value else query
    rows = connection.execute(query.order_by(number.desc() if wanted.newest else number).limit(wanted.limit)).all()
    return [_link(row) for row in (reversed(rows) if wanted.newest else rows)]


def head(connection: sa.Connection) -> ChainHead:
    """Return the last entry of the chain."""
    query = sa.select(audit_links.c.number, audit_links.c.sha256).order_by(audit_links.c.number.desc()).limit(1)
    row = connection.execute(query).first()
    return ChainHead() if row is None else ChainHead(row.number, row.sha256)


def chained_seq(connection: sa.Connection) -> int:
    """Return a row number up to which the chain is complete, except for rows of a killed server."""
    return max(0, (connection.scalar(sa.select(sa.func.max(audit_links.c.seq))) or 0) - _BACK)


def is_pending(connection: sa.Connection, *, after_seq: int) -> bool:
    """Return True if a row is not in the chain yet; a faster form of `pending`."""
    unlinked = sa.select(audit.c.seq).select_from(_UNLINKED)
    wanted = unlinked.where(audit_links.c.number.is_(None), audit.c.seq > after_seq).limit(1)
    return connection.execute(wanted).first() is not None


def pending(connection: sa.Connection, *, after_seq: int) -> tuple[int, int | None]:
    """Return the number of rows that are not in the chain yet, and the time of the oldest."""
    query = sa.select(sa.func.count(), sa.func.min(audit.c.at_ns)).select_from(_UNLINKED)
    row = connection.execute(query.where(audit_links.c.number.is_(None), audit.c.seq > after_seq)).one()
    return row[0], row[1]


def chain(connection: sa.Connection, *, after_seq: int, limit: int) -> int:
    """Add the oldest rows that are not in the chain to it; return their number.

    Args:
        connection: of a write transaction; only one may run at a time.
        after_seq: rows up to this number are known to be in the chain.
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


_TOLD = [column for column in audit.c if column.name != "seq"]
_UNLINKED = audit.outerjoin(audit_links)
_decode = msgspec.json.Decoder(dict[str, object]).decode


def _plain(row: sa.Row[Any]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("seq", "at_ns", "principal", "action", "subject", "token")}


def _link(row: sa.Row[Any]) -> ChainedEntry:
    said = {name: getattr(row, name) for name in ("number", "seq", "sha256")}
    if row.action is None:  # The row was removed; the check of the chain detects that.
        return ChainedEntry(at_ns=0, principal="", action="", subject="", detail={}, token="", **said)
    return ChainedEntry(detail=_decode(row.detail_json), **{**_plain(row), **said})
