"""Sets, lists and deletes secrets, and serves their routes.

Each change of a secret adds an entry to the audit log. Neither the audit log nor a response contains the value of a
secret.
"""

from __future__ import annotations

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import NotFound
from serverless_gpu.model.access_control import AccessReach
from serverless_gpu.model.secrets import check_name, check_value
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.server_key import Sealer
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Query, Routes, reading, writing
from serverless_gpu.server.records import audit, principals, stored_secrets
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.stored_secrets import ChangedBy, SecretOwner
from serverless_gpu.wire.access import SecretList, SecretRequest, SecretView


class SecretService:
    """Sets, deletes and lists secrets."""

    def __init__(self, *, clock: Clock, database: Transactions, sealer: Sealer) -> None:
        self._clock = clock
        self._database = database
        self._sealer = sealer

    def set(self, who: Caller, name: str, request: SecretRequest, *, reach: str) -> SecretView:
        """Set a secret of the caller, or of a team whose secrets the caller may change."""
        check_value(check_name(name), request.value)
        now_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> SecretView:
            whose = _whose(connection, who, request.team, reach)
            made, is_new = stored_secrets.put(
                connection, self._sealer, whose, name, request.value, ChangedBy(who.name, now_ns)
            )
            if is_new:
                _record(connection, who, Action.SECRET_SET, made, now_ns)
            return made

        return self._database.write(work)

    def delete(self, who: Caller, name: str, team: str, *, reach: str) -> SecretView:
        """Delete all versions of a secret."""
        now_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> SecretView:
            whose = _whose(connection, who, team, reach)
            gone = stored_secrets.delete(connection, whose, name, ChangedBy(who.name, now_ns))
            _record(connection, who, Action.SECRET_DELETE, gone, now_ns)
            return gone

        return self._database.write(work)

    def list_visible(self, who: Caller, *, reach: str) -> list[SecretView]:
        """Return the secrets that the caller may see, without their values."""
        teams = who.teams if reach == AccessReach.TEAM else ()
        return self._database.read(
            lambda connection: stored_secrets.listed(connection, who.name, teams, everybodys=reach == AccessReach.ALL)
        )

    def remove_replaced(self) -> None:
        """Delete replaced versions of secrets that no attempt uses."""
        for whose, name in self._database.read(stored_secrets.replaced):

            def work(connection: sa.Connection, whose: SecretOwner = whose, name: str = name) -> None:
                stored_secrets.tidy(connection, whose, name)

            self._database.write(work)


def _whose(connection: sa.Connection, who: Caller, team: str, reach: str) -> SecretOwner:
    if not team:
        return SecretOwner("user", who.name)
    if reach != AccessReach.ALL and not (reach == AccessReach.TEAM and team in who.teams):
        raise NotFound(f"there is no team {team[:64]!r}")
    principals.team(connection, team)
    return SecretOwner("team", team)


def _record(connection: sa.Connection, who: Caller, action: Action, view: SecretView, now_ns: int) -> None:
    detail = {"version": view.version, "team": view.team}
    audit.record(connection, who=who, action=action, subject=view.name, now_ns=now_ns, detail=detail)


REQUEST_BYTES_MAX = 128 << 10
routes = Routes("secrets")


class SecretQuery(Query, frozen=True, kw_only=True):
    """Query parameter with the team that owns the secret, or "" for the caller's own secret."""

    team: str = ""


@routes.get("/secrets", needs=reading("secrets"))
def list_secrets(call: Call, secrets: SecretService) -> SecretList:
    """List the secrets of the caller and of the caller's teams, without their values."""
    return SecretList(secrets=tuple(secrets.list_visible(call.who, reach=call.reach)))


@routes.put("/secrets/{name}", needs=writing("secrets"), limit=REQUEST_BYTES_MAX)
def set_secret(call: Call, secrets: SecretService, name: str, body: SecretRequest) -> SecretView:
    """Set a secret. Attempts that start later receive the new value."""
    return secrets.set(call.who, name, body, reach=call.reach)


@routes.delete("/secrets/{name}", needs=writing("secrets"))
def delete_secret(call: Call, secrets: SecretService, name: str, query: SecretQuery) -> SecretView:
    """Delete a secret with all of its versions."""
    return secrets.delete(call.who, name, query.team, reach=call.reach)
