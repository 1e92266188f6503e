"""Manages users, services, teams and tokens, and defines their HTTP routes.

The service writes each change and its audit entry in one transaction. A caller with a scoped token cannot create or
change principals. A scoped token can create only tokens with a subset of its scopes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, NotAllowed, NotFound
from serverless_gpu.model.access_control import AccessReach, covers
from serverless_gpu.server.core.caller import Caller, check_time_zone
from serverless_gpu.server.core.hub import BUDGETS, SCHEDULER, Hub
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import ANY_CALLER, Call, Query, Routes, reading, writing
from serverless_gpu.server.identity import rights
from serverless_gpu.server.lifecycle import owner_suspension
from serverless_gpu.server.records import audit, credentials, principals, references
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.principals import NewToken
from serverless_gpu.wire.access import (
    PrincipalChange,
    PrincipalList,
    PrincipalRequest,
    PrincipalView,
    TeamChange,
    TeamList,
    TeamRequest,
    TeamView,
    TokenList,
    TokenMade,
    TokenRequest,
    TokenView,
)
from serverless_gpu.wire.sign_in import PrincipalDetails

PAGE_MAX = 1_000
TOKEN_EXPIRY_MAX_S = 3650 * 86_400.0
_NS = 1_000_000_000


class PrincipalService:
    """Creates and changes users, services, teams and tokens."""

    def __init__(
        self, *, settings: Settings, clock: Clock, database: Transactions, hub: Hub, budgets_changed: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._hub = hub
        self._budgets_changed = budgets_changed

    def make(self, who: Caller, request: PrincipalRequest) -> TokenMade:
        """Create a user or service with a first token."""
        check_unscoped(who)
        secret, now_ns = principals.new_secret(), self._clock.wall_ns()

        def work(connection: sa.Connection) -> TokenMade:
            made = principals.create_principal(connection, request, now_ns=now_ns)
            detail = {"kind": made.kind, "role": made.role, "teams": made.teams}
            audit.record(
                connection, who=who, action=Action.USER_CREATE, subject=made.name, now_ns=now_ns, detail=detail
            )
            new = NewToken(principal=made.name, label="the first one")
            return create_audited_token(connection, who, new, secret=secret, now_ns=now_ns)

        return self._database.write(work)

    def change(self, who: Caller, name: str, change: PrincipalChange) -> PrincipalView:
        """Change a principal's role or rights, or disable or enable the principal."""
        check_unscoped(who)
        now_ns, otherwise = self._clock.wall_ns(), self._settings.on_owner_disabled

        def work(connection: sa.Connection) -> PrincipalView:
            before = principals.principal(connection, name)
            if change.role is not None:
                principals.change_role(connection, name, change.role)
            if change.disabled is True:
                principals.disable(connection, name, now_ns=now_ns)
            elif change.disabled is False:
                principals.enable(connection, name)
            if change.grant or change.revoke:
                rights.change(connection, who, before, change)
            after = principals.principal(connection, name)
            detail: dict[str, object] = {
                field: (getattr(before, field), getattr(after, field))
                for field in ("role", "disabled", "rights")
                if getattr(before, field) != getattr(after, field)
            }
            policy = owner_suspension.decide_for_runs(
                connection, before, after, wanted=change.runs, otherwise=otherwise
            )
            if policy:
                detail["runs"] = policy
            if detail:
                audit.record(connection, who=who, action=Action.USER_CHANGE, subject=name, now_ns=now_ns, detail=detail)
            return after

        changed = self._database.write(work)
        # The change may allow or forbid the start of the principal's runs.
        self._hub.touch(SCHEDULER)
        return changed

    def delete(self, who: Caller, name: str) -> PrincipalView:
        """Delete a user or service without references, and return the deleted principal."""
        check_unscoped(who)
        if name == who.name:
            raise InvalidValue("you cannot delete your own user", hint="ask another administrator")
        now_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> PrincipalView:
            found = principals.principal(connection, name)
            disabling = f"to keep {name} but end the access: sgpu user set {name} --disable"
            references.refuse(f"user {name!r}", references.of_principal(connection, name), also=disabling)
            principals.delete_principal(connection, name)
            detail = {"kind": found.kind, "role": found.role, "teams": found.teams}
            audit.record(connection, who=who, action=Action.USER_DELETE, subject=name, now_ns=now_ns, detail=detail)
            return found

        deleted = self._database.write(work)
        self._hub.touch(SCHEDULER)
        return deleted

    def delete_team(self, who: Caller, name: str) -> TeamView:
        """Delete a team without references, and return the deleted team."""
        check_unscoped(who)
        now_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> TeamView:
            principals.team(connection, name)
            references.refuse(f"team {name!r}", references.of_team(connection, name))
            found = principals.delete_team(connection, name)
            detail = {"members": found.members}
            audit.record(connection, who=who, action=Action.TEAM_DELETE, subject=name, now_ns=now_ns, detail=detail)
            return found

        deleted = self._database.write(work)
        self._hub.touch(SCHEDULER)
        return deleted

    def make_team(self, who: Caller, name: str) -> TeamView:
        """Create a team."""
        check_unscoped(who)
        now_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> TeamView:
            made = principals.create_team(connection, name, now_ns=now_ns)
            audit.record(connection, who=who, action=Action.TEAM_CREATE, subject=name, now_ns=now_ns)
            return made

        return self._database.write(work)

    def change_team(self, who: Caller, name: str, asked: TeamChange) -> TeamView:
        """Change a team's time zone, which is the default time zone of the team's budgets."""
        check_unscoped(who)
        check_time_zone(asked.time_zone)
        now_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> TeamView:
            before = principals.team(connection, name)
            principals.set_time_zone(connection, name, asked.time_zone)
            changed = principals.team(connection, name)
            detail = {"time_zone": changed.time_zone, "before": before.time_zone}
            audit.record(connection, who=who, action=Action.TEAM_CHANGE, subject=name, now_ns=now_ns, detail=detail)
            return changed

        changed = self._database.write(work)
        self._budgets_changed()
        self._hub.touch(BUDGETS)
        self._hub.touch(SCHEDULER)
        return changed

    def set_member(self, who: Caller, *, team: str, principal: str, member: bool) -> TeamView:
        """Add a principal to a team, or remove a principal from a team."""
        check_unscoped(who)
        now_ns = self._clock.wall_ns()
        action = Action.TEAM_ADD if member else Action.TEAM_REMOVE
        change = principals.add_member if member else principals.remove_member

        def work(connection: sa.Connection) -> TeamView:
            principals.team(connection, team)
            if change(connection, team=team, principal=principal):
                detail = {"principal": principal}
                audit.record(connection, who=who, action=action, subject=team, now_ns=now_ns, detail=detail)
            return principals.team(connection, team)

        return self._database.write(work)

    def make_token(self, who: Caller, request: TokenRequest, *, reach: str) -> TokenMade:
        """Create a token for the caller, or for another principal within the caller's reach."""
        owner = request.principal or who.name
        if not covers(reach, name=who.name, teams=(), owner=owner):
            raise NotFound(f"there is no user or service {owner[:64]!r}")
        if who.scopes and not (request.scopes and set(request.scopes) <= set(who.scopes)):
            hint = f"choose from the scopes of your own token: {', '.join(who.scopes)}"
            raise NotAllowed("a token with scopes cannot create a token with more rights", hint=hint)
        # NaN fails this comparison too.
        if request.expires_s is not None and not 0 < request.expires_s <= TOKEN_EXPIRY_MAX_S:
            raise InvalidValue("a token's lifetime must be more than 0 s and at most 10 years")
        secret, now_ns = principals.new_secret(), self._clock.wall_ns()
        expires_ns = None if request.expires_s is None else now_ns + int(request.expires_s * _NS)
        new = NewToken(principal=owner, label=request.label, scopes=request.scopes, expires_ns=expires_ns)

        def work(connection: sa.Connection) -> TokenMade:
            rights.check_new_token(connection, who, owner, request.scopes)
            return create_audited_token(connection, who, new, secret=secret, now_ns=now_ns)

        return self._database.write(work)

    def revoke_token(self, who: Caller, identifier: str, *, reach: str) -> TokenView:
        """Revoke a token."""
        now_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> TokenView:
            before = principals.token(connection, identifier)
            if not covers(reach, name=who.name, teams=(), owner=before.principal):
                raise NotFound(f"there is no token {identifier[:64]!r}")
            after = principals.revoke_token(connection, identifier, now_ns=now_ns)
            if before.revoked_ns is None:
                detail = {"principal": before.principal}
                audit.record(
                    connection, who=who, action=Action.TOKEN_REVOKE, subject=identifier, now_ns=now_ns, detail=detail
                )
            return after

        return self._database.write(work)


def create_audited_token(
    connection: sa.Connection, who: Caller, new: NewToken, *, secret: str, now_ns: int
) -> TokenMade:
    """Create a token, and record its creation in the audit."""
    new = msgspec.structs.replace(new, made_by=who.name)
    made = principals.create_token(connection, new, secret=secret, now_ns=now_ns)
    detail = {"principal": new.principal, "scopes": new.scopes, "expires_ns": made.token.expires_ns}
    audit.record(connection, who=who, action=Action.TOKEN_CREATE, subject=made.token.id, now_ns=now_ns, detail=detail)
    return made


def check_unscoped(who: Caller) -> None:
    """Refuse a token with scopes."""
    if who.scopes:
        raise NotAllowed(
            "a token with scopes cannot change principals, roles or teams", hint="use a token without scopes"
        )


routes = Routes("principals")


@routes.get("/whoami", needs=ANY_CALLER)
def whoami(call: Call, database: Transactions) -> PrincipalView:
    """Return the principal that owns the request's token."""
    return database.read(lambda connection: principals.principal(connection, call.who.name))


class UsersQuery(Query, frozen=True, kw_only=True):
    """Filter and page of a list of users.

    Attributes:
        q: part of the name.
        after: name of the last user of the previous page.
        limit: maximum number of users; None for all.
    """

    q: Annotated[str, msgspec.Meta(max_length=64)] = ""
    after: Annotated[str, msgspec.Meta(max_length=64)] = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] | None = None


@routes.get("/users", needs=reading("users"))
def list_users(call: Call, database: Transactions, query: UsersQuery) -> PrincipalList:
    """List all users and services by name, or only the caller without access to others."""
    if call.reach != AccessReach.ALL:
        return PrincipalList(principals=(whoami(call, database),))
    found = database.read(principals.all_principals)
    wanted = [one for one in found if query.q.lower() in one.name and one.name > query.after]
    page = wanted[: query.limit]
    return PrincipalList(principals=tuple(page), cursor=page[-1].name if page and len(wanted) > len(page) else "")


@routes.get("/users/{name}", needs=reading("users"))
def show_user(call: Call, database: Transactions, clock: Clock, name: str) -> PrincipalDetails:
    """Return a user or service with its ways to sign in."""
    if not covers(call.reach, name=call.who.name, teams=(), owner=name):
        raise NotFound(f"there is no user or service {name[:64]!r}")
    now_ns = clock.wall_ns()

    def work(connection: sa.Connection) -> PrincipalDetails:
        found, password = principals.principal(connection, name), credentials.password(connection, name)
        is_reset = password.reset_until_ns is not None and password.reset_until_ns > now_ns
        return PrincipalDetails(
            principal=found,
            has_password=password.hash is not None,
            password_changed_ns=password.changed_ns,
            reset_until_ns=password.reset_until_ns if is_reset else None,
            identities=credentials.identities_of(connection, name),
            tokens=principals.count_valid_tokens(connection, name, now_ns=now_ns),
            sessions=len(principals.sessions_of(connection, name, now_ns=now_ns)),
        )

    return database.read(work)


@routes.post("/users", needs=writing("users"))
def make_user(call: Call, principals: PrincipalService, body: PrincipalRequest) -> TokenMade:
    """Create a user or service. The response contains the principal's first token."""
    return principals.make(call.who, body)


@routes.patch("/users/{name}", needs=writing("users"))
def change_user(call: Call, principals: PrincipalService, name: str, body: PrincipalChange) -> PrincipalView:
    """Change a principal's role or rights, or disable or enable the principal."""
    return principals.change(call.who, name, body)


@routes.delete("/users/{name}", needs=writing("users"))
def delete_user(call: Call, principals: PrincipalService, name: str) -> PrincipalView:
    """Delete an unreferenced user or service."""
    return principals.delete(call.who, name)


@routes.get("/teams", needs=reading("teams"))
def list_teams(call: Call, database: Transactions) -> TeamList:
    """List all teams, or only the teams of the caller."""
    teams = database.read(principals.all_teams)
    return TeamList(teams=tuple(team for team in teams if call.reach == AccessReach.ALL or team.name in call.who.teams))


@routes.get("/teams/{team}", needs=reading("teams"))
def show_team(call: Call, database: Transactions, team: str) -> TeamView:
    """Return a team with its members."""
    if call.reach != AccessReach.ALL and team not in call.who.teams:
        raise NotFound(f"there is no team {team[:64]!r}")
    return database.read(lambda connection: principals.team(connection, team))


@routes.post("/teams", needs=writing("teams"))
def make_team(call: Call, principals: PrincipalService, body: TeamRequest) -> TeamView:
    """Create a team."""
    return principals.make_team(call.who, body.name)


@routes.patch("/teams/{team}", needs=writing("teams"))
def change_team(call: Call, principals: PrincipalService, team: str, body: TeamChange) -> TeamView:
    """Change the time zone of a team's budgets."""
    return principals.change_team(call.who, team, body)


@routes.delete("/teams/{team}", needs=writing("teams"))
def delete_team(call: Call, principals: PrincipalService, team: str) -> TeamView:
    """Delete an unreferenced team."""
    return principals.delete_team(call.who, team)


@routes.put("/teams/{team}/members/{user}", needs=writing("teams"))
def add_member(call: Call, principals: PrincipalService, team: str, user: str) -> TeamView:
    """Add a principal to a team."""
    return principals.set_member(call.who, team=team, principal=user, member=True)


@routes.delete("/teams/{team}/members/{user}", needs=writing("teams"))
def remove_member(call: Call, principals: PrincipalService, team: str, user: str) -> TeamView:
    """Remove a principal from a team."""
    return principals.set_member(call.who, team=team, principal=user, member=False)


class TokensQuery(Query, frozen=True, kw_only=True):
    """Filter, order and page of a list of tokens.

    Attributes:
        principal: owner of the tokens, or "" for every owner within the caller's reach.
        newest: True for the newest tokens first, in pages.
        valid: True for only valid tokens. Needs `newest`.
        before: identifier of the last token of the previous page. Needs `newest`.
        limit: maximum number of tokens. Needs `newest`.
    """

    principal: Annotated[str, msgspec.Meta(max_length=64)] = ""
    newest: bool = False
    valid: bool = False
    before: Annotated[str, msgspec.Meta(max_length=26)] = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = 100


@routes.get("/tokens", needs=reading("tokens"))
def list_tokens(call: Call, database: Transactions, clock: Clock, query: TokensQuery) -> TokenList:
    """List tokens of all principals or of the caller, without their secrets: the oldest first, or pages."""
    whose = query.principal or None
    if call.reach != AccessReach.ALL:
        if whose not in (None, call.who.name):
            return TokenList(tokens=())
        whose = call.who.name
    if not query.newest:
        return TokenList(tokens=database.read(lambda connection: principals.tokens_of(connection, whose)))
    valid_at_ns = clock.wall_ns() if query.valid else None
    found = database.read(
        lambda connection: principals.newest_tokens(
            connection, whose, before=query.before, limit=query.limit + 1, valid_at_ns=valid_at_ns
        )
    )
    page = found[: query.limit]
    return TokenList(tokens=page, cursor=page[-1].id if len(found) > len(page) else "")


@routes.post("/tokens", needs=writing("tokens"))
def make_token(call: Call, principals: PrincipalService, body: TokenRequest) -> TokenMade:
    """Create a token. The server returns the token's secret only in this response."""
    return principals.make_token(call.who, body, reach=call.reach)


@routes.delete("/tokens/{token}", needs=writing("tokens"))
def revoke_token(call: Call, principals: PrincipalService, token: str) -> TokenView:
    """Revoke a token."""
    return principals.revoke_token(call.who, token, reach=call.reach)
