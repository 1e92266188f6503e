"""Repository of budgets, budget warnings and webhook notices.

The notices form an outbox. The server writes each notice in the transaction of the notice's event. The webhook loop
retries each notice until the receiver accepts the notice or the notice is too old. Spending alarms are also notices.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.billing.budget import CLOSED, FULL, Budget, Scope
from serverless_gpu.server.db.tables import budget_warnings, budgets, notices, teams

FORGET_NS = 400 * 86_400 * 1_000_000_000
_decode = msgspec.json.Decoder(Budget).decode


NOTICES_KEPT = 10_000
"""Maximum number of stored notices. The server deletes the oldest notices over this maximum, even if they are
unsent."""
_decode_document = msgspec.json.Decoder(dict[str, object]).decode


class StoredBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A stored budget with its name."""

    name: str
    budget: Budget
    set_ns: int


def every(connection: sa.Connection) -> list[StoredBudget]:
    """Return all budgets by name. A team budget without a time zone uses the team's time zone."""
    found = [_from_row(row) for row in connection.execute(sa.select(budgets).order_by(budgets.c.name))]
    zones = {row.name: row.time_zone or "" for row in connection.execute(sa.select(teams.c.name, teams.c.time_zone))}
    return [_with_zone(one, zones.get(one.budget.scope.name, "")) for one in found]


def count(connection: sa.Connection) -> int:
    """Return the number of budgets."""
    return connection.execute(sa.select(sa.func.count()).select_from(budgets)).scalar_one()


def find(connection: sa.Connection, name: str) -> StoredBudget | None:
    """Return a budget by name, or None."""
    row = connection.execute(sa.select(budgets).where(budgets.c.name == name)).first()
    return None if row is None else _from_row(row)


def find_in_force(connection: sa.Connection, name: str) -> StoredBudget | None:
    """Return a budget by name with its effective time zone, as `every` does."""
    found = find(connection, name)
    return None if found is None else _with_zone(found, team_zone(connection, found.budget.scope))


def team_zone(connection: sa.Connection, scope: Scope) -> str:
    """Return the time zone of a budget's team, or "" for UTC."""
    if scope.kind != "team":
        return ""
    return connection.scalar(sa.select(teams.c.time_zone).where(teams.c.name == scope.name)) or ""


def _with_zone(one: StoredBudget, zone: str) -> StoredBudget:
    if one.budget.time_zone or one.budget.scope.kind != "team":
        return one
    return msgspec.structs.replace(one, budget=msgspec.structs.replace(one.budget, time_zone=zone))


def put(connection: sa.Connection, budget: StoredBudget) -> None:
    """Insert or replace a budget."""
    said = {"document_json": msgspec.json.encode(budget.budget).decode(), "set_ns": budget.set_ns}
    if connection.execute(budgets.update().where(budgets.c.name == budget.name).values(**said)).rowcount == 0:
        connection.execute(budgets.insert(), {"name": budget.name, **said})


def remove(connection: sa.Connection, name: str) -> bool:
    """Remove a budget, and return True if the budget existed."""
    forget_said(connection, name)
    return connection.execute(budgets.delete().where(budgets.c.name == name)).rowcount == 1


def say(connection: sa.Connection, name: str, *, start_ns: int, percent: int, at_ns: int) -> bool:
    """Store a budget warning for a percentage and period, and return False if the warning already exists.

    The function also deletes warnings that are older than any period.
    """
    this = {"budget": name, "start_ns": start_ns, "percent": percent}
    there = sa.select(budget_warnings.c.at_ns).where(*(budget_warnings.c[key] == value for key, value in this.items()))
    if connection.execute(there).first() is not None:
        return False
    connection.execute(budget_warnings.delete().where(budget_warnings.c.at_ns < at_ns - FORGET_NS))
    connection.execute(budget_warnings.insert(), {**this, "at_ns": at_ns})
    return True


def said(connection: sa.Connection, *, since_ns: int) -> set[tuple[str, int, int]]:
    """Return warnings as budget, period start and percentage, for periods that began at a time or later."""
    query = sa.select(budget_warnings.c.budget, budget_warnings.c.start_ns, budget_warnings.c.percent)
    query = query.where(budget_warnings.c.start_ns >= since_ns)
    return {(name, start_ns, percent) for name, start_ns, percent in connection.execute(query)}


class BudgetWarning(NamedTuple):
    """A stored budget warning with its period's start and its time, in nanoseconds since 1970."""

    start_ns: int
    percent: int
    at_ns: int


def warnings_of(connection: sa.Connection, name: str, *, limit: int) -> list[BudgetWarning]:
    """Return the stored warnings of a budget, latest first."""
    columns = (budget_warnings.c.start_ns, budget_warnings.c.percent, budget_warnings.c.at_ns)
    query = sa.select(*columns).where(budget_warnings.c.budget == name)
    query = query.order_by(budget_warnings.c.at_ns.desc(), budget_warnings.c.percent.desc()).limit(limit)
    return [BudgetWarning(*row) for row in connection.execute(query)]


def closed(connection: sa.Connection) -> frozenset[tuple[str, int]]:
    """Return exhausted budgets that the enforcer has closed, each with the start of its period."""
    query = sa.select(budget_warnings.c.budget, budget_warnings.c.start_ns).distinct()
    query = query.where(budget_warnings.c.percent.in_((FULL, CLOSED)))
    return frozenset((name, start_ns) for name, start_ns in connection.execute(query))


def reopen(connection: sa.Connection, name: str, *, start_ns: int) -> bool:
    """Reopen a budget in a period, and return True if the budget was closed."""
    marks = budget_warnings.c.percent.in_((FULL, CLOSED))
    own = sa.and_(budget_warnings.c.budget == name, budget_warnings.c.start_ns == start_ns, marks)
    return connection.execute(budget_warnings.delete().where(own)).rowcount > 0


def forget_said(connection: sa.Connection, name: str) -> None:
    """Delete all stored warnings of a budget."""
    connection.execute(budget_warnings.delete().where(budget_warnings.c.budget == name))


def _from_row(row: sa.Row[tuple[str, str, int]]) -> StoredBudget:
    return StoredBudget(name=row.name, budget=_decode(row.document_json), set_ns=row.set_ns)


class NoticeKind(StrEnum):
    """Kind of a webhook notice."""

    WARNING = "budget.warning"
    REACHED = "budget.reached"
    CLOSED = "budget.closed"
    ALARM = "spend.alarm"


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Stored webhook notice with its delivery state."""

    seq: int
    at_ns: int
    kind: str
    document: dict[str, object]
    tries: int
    sent_ns: int | None = None

    def text(self, name: str) -> str:
        """Return the text of one field of the notice, or ""."""
        return str(self.document.get(name, ""))


def add_notice(connection: sa.Connection, kind: NoticeKind, document: Mapping[str, object], *, at_ns: int) -> None:
    """Insert a notice, and delete the oldest notices over the maximum number."""
    row = {"at_ns": at_ns, "kind": kind.value, "document_json": msgspec.json.encode(document).decode(), "tries": 0}
    seq = connection.execute(notices.insert().values(row)).inserted_primary_key
    assert seq is not None
    connection.execute(notices.delete().where(notices.c.seq <= seq[0] - NOTICES_KEPT))


def open_notices(connection: sa.Connection, *, limit: int) -> list[Notice]:
    """Return unsent notices, ordered by number of delivery attempts and then by age."""
    query = sa.select(notices).where(notices.c.sent_ns.is_(None)).order_by(notices.c.tries, notices.c.seq).limit(limit)
    return [_notice_from_row(row._mapping) for row in connection.execute(query)]


def alarms(connection: sa.Connection, *, since_ns: int, limit: int = 1_000) -> list[Notice]:
    """Return the spending alarms since a given time, latest first."""
    query = sa.select(notices).where(notices.c.kind == NoticeKind.ALARM.value, notices.c.at_ns >= since_ns)
    return [
        _notice_from_row(row._mapping) for row in connection.execute(query.order_by(notices.c.seq.desc()).limit(limit))
    ]


def latest_notices(connection: sa.Connection, *, limit: int) -> list[Notice]:
    """Return the latest notices, newest first."""
    query = sa.select(notices).order_by(notices.c.seq.desc()).limit(limit)
    return [_notice_from_row(row._mapping) for row in connection.execute(query)]


def mark_sent(connection: sa.Connection, seq: int, *, at_ns: int) -> None:
    """Mark a notice as delivered or abandoned."""
    connection.execute(notices.update().where(notices.c.seq == seq).values(sent_ns=at_ns))


def mark_tried(connection: sa.Connection, seq: int) -> None:
    """Count a failed delivery of a notice."""
    connection.execute(notices.update().where(notices.c.seq == seq).values(tries=notices.c.tries + 1))


def _notice_from_row(fields: sa.RowMapping) -> Notice:
    return Notice(
        seq=fields["seq"],
        at_ns=fields["at_ns"],
        kind=fields["kind"],
        document=_decode_document(fields["document_json"]),
        tries=fields["tries"],
        sent_ns=fields["sent_ns"],
    )
