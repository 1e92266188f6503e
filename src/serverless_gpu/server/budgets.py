"""Budgets: the query room of `model/budget.py`, of what was said of each in a period, and of alarms."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.budget import FULL, Budget
from serverless_gpu.server.tables import budget_warnings, budgets

FORGET_NS = 400 * 86_400 * 1_000_000_000
_decode = msgspec.json.Decoder(Budget).decode


class StoredBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A budget and its name."""

    name: str
    budget: Budget
    set_ns: int


def every(connection: sa.Connection) -> list[StoredBudget]:
    """Return all budgets by name."""
    return [_from_row(row) for row in connection.execute(sa.select(budgets).order_by(budgets.c.name))]


def count(connection: sa.Connection) -> int:
    """Return how many budgets there are."""
    return connection.execute(sa.select(sa.func.count()).select_from(budgets)).scalar_one()


def find(connection: sa.Connection, name: str) -> StoredBudget | None:
    """Return a budget."""
    row = connection.execute(sa.select(budgets).where(budgets.c.name == name)).first()
    return None if row is None else _from_row(row)


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
    query = sa.select(budget_warnings.c.budget, budget_warnings.c.start_ns).where(budget_warnings.c.percent == FULL)
    return frozenset((name, start_ns) for name, start_ns in connection.execute(query))


def forget_said(connection: sa.Connection, name: str) -> None:
    """Forget what was said of a budget."""
    connection.execute(budget_warnings.delete().where(budget_warnings.c.budget == name))


def _from_row(row: sa.Row[tuple[str, str, int]]) -> StoredBudget:
    return StoredBudget(name=row.name, budget=_decode(row.document_json), set_ns=row.set_ns)
