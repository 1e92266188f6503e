"""Finds references to a principal, team or pool, which prevent its deletion.

Usage and audit entries do not prevent the deletion of an object, because the entries may keep the object's name.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.lifecycle.attempt import TERMINAL
from serverless_gpu.server.db.tables import nodes, policy_holders, runs, secrets
from serverless_gpu.server.records import budgets, policies, prices

_NAMED_MAX = 5
_UNENDED = runs.c.state.not_in([state.value for state in TERMINAL])


def refuse(what: str, referring: Sequence[str], *, also: str = "") -> None:
    """Raise InvalidValue if references prevent a deletion.

    Args:
        what: kind and name of the object.
        referring: the references to the object.
        also: a further remedy for the hint.
    """
    if not referring:
        return
    more = len(referring) - _NAMED_MAX
    named = ", ".join(referring[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
    hint = "remove these references first"
    raise InvalidValue(
        f"{what} cannot be deleted because of references: {named}", hint=f"{hint}; {also}" if also else hint
    )


def of_principal(connection: sa.Connection, name: str) -> list[str]:
    """Return the references to a user or service: its runs, nodes, secrets, policies and budgets."""
    return [
        *_count(connection, runs, runs.c.owner == name, "run"),
        *_names(connection, nodes.c.name, nodes.c.principal == name, "node"),
        *_secrets(connection, "user", name),
        *_holder(connection, ("user", "service"), name),
        *_budgets(connection, ("user",), name),
    ]


def of_team(connection: sa.Connection, name: str) -> list[str]:
    """Return the references to a team: its unended runs, secrets, policies and budgets."""
    return [
        *_count(connection, runs, sa.and_(runs.c.team == name, _UNENDED), "unended run"),
        *_secrets(connection, "team", name),
        *_holder(connection, ("team",), name),
        *(f"policy {each.name}" for each in policies.every(connection) if each.policy.team == name),
        *_budgets(connection, ("team",), name),
    ]


def of_pool(connection: sa.Connection, name: str, *, now_ns: int) -> list[str]:
    """Return the references to a pool: its nodes, unended runs, prices, policies and budgets."""
    return [
        *_names(connection, nodes.c.name, nodes.c.pool == name, "node"),
        *_count(connection, runs, sa.and_(runs.c.pool == name, _UNENDED), "unended run"),
        *(
            f"price of {each.price.resource}"
            for each in prices.every(connection, from_ns=now_ns)
            if each.price.pool == name
        ),
        *(
            f"policy {each.name}"
            for each in policies.every(connection)
            if name in (each.policy.pool, *each.policy.pools)
        ),
        *_budgets(connection, ("pool",), name),
    ]


def _count(connection: sa.Connection, table: sa.Table, which: sa.ColumnElement[bool], noun: str) -> list[str]:
    count = connection.execute(sa.select(sa.func.count()).select_from(table).where(which)).scalar_one()
    return [f"{count} {noun}{'' if count == 1 else 's'}"] if count else []


def _names(connection: sa.Connection, column: sa.Column[str], which: sa.ColumnElement[bool], noun: str) -> list[str]:
    return [f"{noun} {name}" for name in connection.scalars(sa.select(column).where(which).order_by(column))]


def _secrets(connection: sa.Connection, kind: str, owner: str) -> list[str]:
    theirs = sa.and_(secrets.c.kind == kind, secrets.c.owner == owner, secrets.c.sealed.is_not(None))
    query = sa.select(secrets.c.name).where(theirs).distinct().order_by(secrets.c.name)
    return [f"secret {name}" for name in connection.scalars(query)]


def _holder(connection: sa.Connection, kinds: tuple[str, ...], name: str) -> list[str]:
    attached = sa.and_(policy_holders.c.kind.in_(kinds), policy_holders.c.name == name)
    return _names(connection, policy_holders.c.policy, attached, "policy")


def _budgets(connection: sa.Connection, kinds: tuple[str, ...], name: str) -> list[str]:
    scopes = ((each.name, each.budget.scope) for each in budgets.every(connection))
    return [f"budget {budget}" for budget, scope in scopes if scope.kind in kinds and scope.name == name]
