"""Routes of `wire/access.py`: who one is, users and services, teams, tokens."""

from __future__ import annotations

from serverless_gpu.model.access.roles import AccessReach
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import ANYBODY, Call, Routes, reading, writing
from serverless_gpu.server.identity.principal_service import PrincipalService
from serverless_gpu.server.records import principals as identity
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

routes = Routes("principals")


@routes.get("/whoami", needs=ANYBODY)
def whoami(call: Call, database: Transactions) -> PrincipalView:
    """Say whose token it is."""
    return database.read(lambda connection: identity.principal(connection, call.who.name))


@routes.get("/users", needs=reading("users"))
def list_users(call: Call, database: Transactions) -> PrincipalList:
    """List users and services: all, or oneself."""
    if call.reach != AccessReach.ALL:
        return PrincipalList(principals=(whoami(call, database),))
    return PrincipalList(principals=database.read(identity.all_principals))


@routes.post("/users", needs=writing("users"))
def make_user(call: Call, principals: PrincipalService, body: PrincipalRequest) -> TokenMade:
    """Make a user or service; the answer has its first token."""
    return principals.make(call.who, body)


@routes.patch("/users/{name}", needs=writing("users"))
def change_user(call: Call, principals: PrincipalService, name: str, body: PrincipalChange) -> PrincipalView:
    """Give somebody another role, disable or enable them."""
    return principals.change(call.who, name, body)


@routes.get("/teams", needs=reading("teams"))
def list_teams(call: Call, database: Transactions) -> TeamList:
    """List teams: all, or those one is in."""
    teams = database.read(identity.all_teams)
    return TeamList(teams=tuple(team for team in teams if call.reach == AccessReach.ALL or team.name in call.who.teams))


@routes.post("/teams", needs=writing("teams"))
def make_team(call: Call, principals: PrincipalService, body: TeamRequest) -> TeamView:
    """Make a team."""
    return principals.make_team(call.who, body.name)


@routes.patch("/teams/{team}", needs=writing("teams"))
def change_team(call: Call, principals: PrincipalService, team: str, body: TeamChange) -> TeamView:
    """Change the time zone of a team's budgets."""
    return principals.change_team(call.who, team, body)


@routes.put("/teams/{team}/members/{user}", needs=writing("teams"))
def add_member(call: Call, principals: PrincipalService, team: str, user: str) -> TeamView:
    """Put somebody into a team."""
    return principals.set_member(call.who, team=team, principal=user, member=True)


@routes.delete("/teams/{team}/members/{user}", needs=writing("teams"))
def remove_member(call: Call, principals: PrincipalService, team: str, user: str) -> TeamView:
    """Take somebody out of a team."""
    return principals.set_member(call.who, team=team, principal=user, member=False)


@routes.get("/tokens", needs=reading("tokens"))
def list_tokens(call: Call, database: Transactions) -> TokenList:
    """List tokens, without their secrets: all, or one's own."""
    whose = None if call.reach == AccessReach.ALL else call.who.name
    return TokenList(tokens=database.read(lambda connection: identity.tokens_of(connection, whose)))


@routes.post("/tokens", needs=writing("tokens"))
def make_token(call: Call, principals: PrincipalService, body: TokenRequest) -> TokenMade:
    """Make a token; its secret is said this once."""
    return principals.make_token(call.who, body, reach=call.reach)


@routes.delete("/tokens/{token}", needs=writing("tokens"))
def revoke_token(call: Call, principals: PrincipalService, token: str) -> TokenView:
    """Revoke a token."""
    return principals.revoke_token(call.who, token, reach=call.reach)
