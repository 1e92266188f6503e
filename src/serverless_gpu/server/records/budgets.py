"""Budgets: the query room of `model/billing/budget.py`, of what was said of each in a period, and of alarms."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.billing.budget import CLOSED, FULL, Budget, Scope
from serverless_gpu.server.db.tables import budget_warnings, budgets, teams

FORGET_NS = 400 * 86_400 * 1_000_000_000
_decode = msgspec.json.Decoder(Budget).decode


class StoredBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A budget and its name."""

    name: str
    budget: Budget
    set_ns: int


def every(connection: sa.Connection) -> list[StoredBudget]:
    """Return all budgets by name; one of a team without a time zone of its own has the team's."""
    found = [_from_row(row) for row in connection.execute(sa.select(budgets).order_by(budgets.c.name))]
    zones = {row.name: row.time_zone or "" for row in connection.execute(sa.select(teams.c.name, teams.c.time_zone))}
    return [_with_zone(one, zones.get(one.budget.scope.name, "")) for one in found]


def count(connection: sa.Connection) -> int:
    """Return how many budgets there are."""
    return connection.execute(sa.select(sa.func.count()).select_from(budgets)).scalar_one()


def find(connection: sa.Connection, name: str) -> StoredBudget | None:
    """Return a budget."""
    row = connection.execute(sa.select(budgets).where(budgets.c.name == name)).first()
    return None if row is None else _from_row(row)


def find_in_force(connection: sa.Connection, name: str) -> StoredBudget | None:
    """Return a budget as `every` does."""
    found = find(connection, name)
    return None if found is None else _with_zone(found, team_zone(connection, found.budget.scope))


def team_zone(connection: sa.Connection, scope: Scope) -> str:
    """Return the time zone of the team that a budget is for; "" for UTC, and where it is for no team."""
    if scope.kind != "team":
        return ""
    return connection.scalar(sa.select(teams.c.time_zone).where(teams.c.name == scope.name)) or ""


def _with_zone(one: StoredBudget, zone: str) -> StoredBudget:
    if one.budget.time_zone or one.budget.scope.kind != "team":
        return one
    return msgspec.structs.replace(one, budget=msgspec.structs.replace(one.budget, time_zone=zone))


def put(connection: sa.Connection, budget: StoredBudget) -> None:
    """Make a budget, or put another one in its place."""
    said = {"document_json": msgspec.json.encode(budget.budget).decode(), "set_ns": budget.set_ns}
    if connection.execute(budgets.update().where(budgets.c.name == budget.name).values(**said)).rowcount == 0:
        connection.execute(budgets.insert(), {"name": budget.name, **said})


def remove(connection: sa.Connection, name: str) -> bool:
    """Take a budget away; return whether there was one."""
    forget_said(connection, name)
    return connection.execute(budgets.delete().where(budgets.c.name == name)).rowcount == 1


def say(connection: sa.Connection, name: str, *, start_ns: int, percent: int, at_ns: int) -> bool:
    """Note that a mark of a budget was said in a period; return False when that was noted before.

    What is older than any period is forgotten, so that there is never more of it than a year says.
    """
    this = {"budget": name, "start_ns": start_ns, "percent": percent}
    there = sa.select(budget_warnings.c.at_ns).where(*(budget_warnings.c[key] == value for key, value in this.items()))
    if connection.execute(there).first() is not None:
        return False
    connection.execute(budget_warnings.delete().where(budget_warnings.c.at_ns < at_ns - FORGET_NS))
    connection.execute(budget_warnings.insert(), {**this, "at_ns": at_ns})
    return True


def said(connection: sa.Connection, *, since_ns: int) -> set[tuple[str, int, int]]:
    """Return what was said of periods that began at a moment, or later: budget, start of the period, per cent."""
    query = sa.select(budget_warnings.c.budget, budget_warnings.c.start_ns, budget_warnings.c.percent)
    query = query.where(budget_warnings.c.start_ns >= since_ns)
    return {(name, start_ns, percent) for name, start_ns, percent in connection.execute(query)}


def closed(connection: sa.Connection) -> frozenset[tuple[str, int]]:
    """Return which budgets were used up, in which period: the start of it."""
    query = sa.select(budget_warnings.c.budget, budget_warnings.c.start_ns).distinct()
    query = query.where(budget_warnings.c.percent.in_((FULL, CLOSED)))
    return frozenset((name, start_ns) for name, start_ns in connection.execute(query))


def reopen(connection: sa.Connection, name: str, *, start_ns: int) -> bool:
    """Forget that a budget was closed in a period; return whether it was."""
    marks = budget_warnings.c.percent.in_((FULL, CLOSED))
    own = sa.and_(budget_warnings.c.budget == name, budget_warnings.c.start_ns == start_ns, marks)
    return connection.execute(budget_warnings.delete().where(own)).rowcount > 0


def forget_said(connection: sa.Connection, name: str) -> None:
    """Forget what was said of a budget."""
    connection.execute(budget_warnings.delete().where(budget_warnings.c.budget == name))


def _from_row(row: sa.Row[tuple[str, str, int]]) -> StoredBudget:
    return StoredBudget(name=row.name, budget=_decode(row.document_json), set_ns=row.set_ns)
