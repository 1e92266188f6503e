"""The audit: who did what, and to what. Rows are only ever added, in the transaction of what they tell of."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec
import sqlalchemy as sa

from serverless_gpu.server.callers import Caller
from serverless_gpu.server.tables import audit


class Action(StrEnum):
    """What is written down; the noun before the dot says what `subject` names."""

    RUN_CREATE = "run.create"
    RUN_STOP = "run.stop"
    RUN_STALE = "run.stale"
    RUN_EXPIRE = "run.expire"
    RUN_LOGS_EXPIRE = "run.logs.expire"
    NODE_JOIN = "node.join"
    NODE_FORGET = "node.forget"
    POOL_PUT = "pool.put"
    ENVIRONMENT_DELETE = "environment.delete"
    USER_CREATE = "user.create"
    USER_CHANGE = "user.change"
    TEAM_CREATE = "team.create"
    TEAM_ADD = "team.add"
    TEAM_REMOVE = "team.remove"
    TOKEN_CREATE = "token.create"
    TOKEN_REVOKE = "token.revoke"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One row.

    Attributes:
        seq: grows.
        at_ns: nanoseconds since 1970.
        principal: who did it; "server" for the server itself.
        detail: never a secret, never a value of a variable.
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
SERVER = Caller(name="server", kind="service")
"""Who does what nobody asked for."""


def record(
    connection: sa.Connection,
    *,
    who: Caller,
    action: Action,
    subject: str,
    now_ns: int,
    detail: Mapping[str, object] | None = None,
) -> None:
    """Write down what somebody did.

    Args:
        connection: of the transaction that does it.
        who: did it.
        action: what.
        subject: to what: an identifier or a name.
        now_ns: nanoseconds since 1970.
        detail: values of JSON; no secrets.
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


def entries(connection: sa.Connection, *, after: int = 0, limit: int = 500) -> list[Entry]:
    """Return entries in the order they were written, from the one after `after` on."""
    query = sa.select(audit).where(audit.c.seq > after).order_by(audit.c.seq).limit(limit)
    return [
        Entry(
            seq=row.seq,
            at_ns=row.at_ns,
            principal=row.principal,
            action=row.action,
            subject=row.subject,
            detail=msgspec.json.decode(row.detail_json, type=dict[str, object]),
            token=row.token,
        )
        for row in connection.execute(query)
    ]
