"""Grants and checks rights, which principals hold in addition to their roles.

The first administrator holds every right and cannot lose a right. Other principals get a right from a holder of the
right. An administrator without a right can neither grant the right nor create a token that carries the right.

Without a first administrator, for example after its demotion, only principals with a grant hold a right. To regain a
right without a holder, an administrator gives the oldest user the role `admin` again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue, NotAllowed
from serverless_gpu.model.access_control import AccessReach, Resource, Right, may_use, reach
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.records import principals
from serverless_gpu.wire.access import PrincipalChange, PrincipalView

_NAMED_MAX = 5


def check(connection: sa.Connection, who: Caller, right: Right, action: str) -> None:
    """Raise NotAllowed unless a caller may use a right. `action` describes what the right permits."""
    held = principals.principal(connection, who.name).rights
    if may_use(right, held=held, scopes=who.scopes):
        return
    message = f"{who.name} may not {action} without the right {right.value}"
    if right in held:
        raise NotAllowed(message, hint=f"use a token without scopes, or with the additional scope {right.value}")
    raise NotAllowed(message, hint=_remedy(connection, who.name, right))


def change(connection: sa.Connection, who: Caller, before: PrincipalView, asked: PrincipalChange) -> None:
    """Grant rights to a principal, or revoke granted rights."""
    for text in (*asked.grant, *asked.revoke):
        if text not in set(Right):
            raise InvalidValue(f"there is no right {text[:64]!r}", hint=f"rights: {', '.join(Right)}")
        check(connection, who, Right(text), f"grant or revoke {text}")
    if both := set(asked.grant) & set(asked.revoke):
        raise InvalidValue(f"the request grants and revokes the same right: {', '.join(sorted(both))}")
    if asked.revoke and before.name == principals.first_administrator(connection):
        raise InvalidValue(
            f"{before.name} is the first administrator, who always holds every right",
            hint="to end the access, make another user an administrator and disable the first administrator",
        )
    if asked.grant and reach(asked.role or before.role, Resource.POOLS, write=True) is AccessReach.NONE:
        raise InvalidValue(
            f"{before.name} has the role {asked.role or before.role}, which cannot change pools",
            hint="grant the right to an operator or an administrator",
        )
    principals.set_rights(connection, before.name, {*before.rights, *asked.grant} - {*asked.revoke})


def check_new_token(connection: sa.Connection, who: Caller, owner: str, scopes: Collection[str]) -> None:
    """Raise NotAllowed if a new token would carry a right that the caller does not hold."""
    if owner == who.name:
        return
    own = principals.principal(connection, who.name).rights
    carried = [
        right
        for right in principals.principal(connection, owner).rights
        if right not in own and may_use(right, held=(right,), scopes=scopes)
    ]
    if carried:
        raise NotAllowed(
            f"a token of {owner} would carry the right {', '.join(carried)}, which {who.name} does not hold",
            hint="limit the token with --scope, for example --scope read --scope submit",
        )


def _remedy(connection: sa.Connection, name: str, right: Right) -> str:
    holders = [each.name for each in _holders(connection, right)]
    if not holders:
        return "no user holds the right. Give the oldest user the role admin: sgpu user set NAME --role admin"
    more = f" or {len(holders) - _NAMED_MAX} others" if len(holders) > _NAMED_MAX else ""
    return f"ask {', '.join(holders[:_NAMED_MAX])}{more} to run: sgpu user set {name} --grant {right.value}"


def _holders(connection: sa.Connection, right: Right) -> Sequence[PrincipalView]:
    return [each for each in principals.all_principals(connection) if right in each.rights and not each.disabled]
