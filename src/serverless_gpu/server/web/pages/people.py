"""Shows and changes users, services, teams, tokens and sessions.

    GET /ui/people                  users and services; a reader without access to others sees only the own user
    GET /ui/people/users/{name}     one user: role, rights, teams, password, accounts, and forms to change them
    GET /ui/people/teams            teams; /ui/people/teams/{team} shows one team
    GET /ui/people/tokens           tokens with their creators, last use and expiry
    GET /ui/people/sessions         browsers that are signed in

Every change is a form that posts to a path below the page. A refused change shows the page again with the problem. A
new token's secret is only in the answer to its form, so that no address and no cookie contains the secret.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from serverless_gpu.errors import InvalidValue, NotAllowed, ServerlessGpuError
from serverless_gpu.model.access_control import ROLES, SCOPES, Right, Role
from serverless_gpu.server.http.routing import FORM_BYTES_MAX, Call, Form, Query, Routes, reading, writing
from serverless_gpu.server.identity import oidc_service, password_service, principal_service, session_service
from serverless_gpu.server.identity.oidc_service import OidcService
from serverless_gpu.server.identity.password_service import PasswordService
from serverless_gpu.server.identity.principal_service import TokensQuery, UsersQuery
from serverless_gpu.server.identity.session_service import SessionsQuery
from serverless_gpu.server.web.site import WEB, Page, Redirect, Site
from serverless_gpu.wire.access import (
    Kind,
    OnDisabled,
    PrincipalChange,
    PrincipalRequest,
    TeamChange,
    TeamRequest,
    TokenMade,
    TokenRequest,
)

routes = Routes("people", mount=WEB)
ROWS = 100
LIFETIMES = ((1, "1 day"), (7, "7 days"), (30, "30 days"), (90, "90 days"), (365, "1 year"))
"""Days and texts of the lifetimes that the form for a token offers."""
DONE = {
    "": "",
    "changed": "The change is saved.",
    "deleted": "Deleted.",
    "ended": "The session has ended.",
    "linked": "The account is linked. You can sign in with it from now on.",
    "password": "The password is set. Your other sessions have ended.",
    "revoked": "The token is revoked. It is no longer valid.",
    "signed-out": "The sessions have ended.",
    "unlinked": "The link of the account is removed.",
}
Name = Annotated[str, msgspec.Meta(max_length=64)]
Identifier = Annotated[str, msgspec.Meta(max_length=26)]


class DoneQuery(Query, frozen=True, kw_only=True):
    """The outcome of the last form, one of `DONE`."""

    done: Annotated[str, msgspec.Meta(max_length=20)] = ""


class UserListQuery(DoneQuery, frozen=True, kw_only=True):
    """Filter and page of the users."""

    q: Name = ""
    after: Name = ""


class TokenListQuery(DoneQuery, frozen=True, kw_only=True):
    """Filter and page of the tokens."""

    of: Name = ""
    all: bool = False
    before: Identifier = ""


class SessionListQuery(DoneQuery, frozen=True, kw_only=True):
    """Filter of the sessions."""

    of: Name = ""


class NewUserForm(Form, frozen=True, kw_only=True):
    """A user or a service to create."""

    name: Name
    kind: Kind = "user"
    role: Role = "member"
    teams: tuple[Name, ...] = ()


class RoleForm(Form, frozen=True, kw_only=True):
    """A role and rights of a user."""

    role: Role
    rights: tuple[Name, ...] = ()
    before: tuple[Name, ...] = ()


class StateForm(Form, frozen=True, kw_only=True):
    """The state of a user: disabled or not, and what happens to the runs of a disabled user."""

    disabled: bool
    runs: OnDisabled | None = None


class TeamForm(Form, frozen=True, kw_only=True):
    """The name of a team."""

    team: Name


class MemberForm(Form, frozen=True, kw_only=True):
    """A member of a team."""

    user: Name
    member: bool


class TimeZoneForm(Form, frozen=True, kw_only=True):
    """The time zone of a team's budgets."""

    time_zone: Name


class NewTokenForm(Form, frozen=True, kw_only=True):
    """A token to create."""

    label: Annotated[str, msgspec.Meta(max_length=256)] = ""
    of: Name = ""
    scopes: Annotated[str, msgspec.Meta(max_length=500)] = ""
    days: Annotated[int, msgspec.Meta(ge=1, le=3650)] = 90


class SessionForm(Form, frozen=True, kw_only=True):
    """A session to end."""

    of: Name = ""


# --- users ------------------------------------------------------------------------------------------------------------


@routes.get("/people", needs=reading("users"))
def show_users(call: Call, site: Site, query: UserListQuery) -> Page:
    """List users and services."""
    return _users_page(call, site, query)


@routes.post("/people", needs=writing("users"), limit=FORM_BYTES_MAX)
def create_user(call: Call, site: Site, body: NewUserForm) -> Page:
    """Create a user or a service, and show its first token."""
    request = PrincipalRequest(
        name=body.name.strip(), kind=body.kind, role=body.role, teams=tuple(filter(None, body.teams))
    )
    try:
        made = site.ask(call, principal_service.make_user, body=request)
    except ServerlessGpuError as error:
        return _users_page(call, site, UserListQuery(), problem=error)
    return _secret_page(call, site, made, title=f"{made.token.principal} is created")


def _users_page(call: Call, site: Site, query: UserListQuery, *, problem: ServerlessGpuError | None = None) -> Page:
    asked = UsersQuery(q=query.q, after=query.after, limit=ROWS)
    found = site.ask(call, principal_service.list_users, query=asked)
    teams = site.ask_if_allowed(call, principal_service.list_teams)
    return _page(
        call,
        site,
        "people.html",
        tab="users",
        done=query.done,
        problem=problem,
        users=found.principals,
        cursor=found.cursor,
        q=query.q,
        roles=ROLES,
        teams=() if teams is None else teams.teams,
    )


@routes.get("/people/users/{name}", needs=reading("users"))
def show_user(
    call: Call, site: Site, passwords: PasswordService, oidc: OidcService, name: str, query: DoneQuery
) -> Page:
    """Show a user with the ways to sign in."""
    return _user_page(call, site, passwords, oidc, name, done=query.done)


@routes.post("/people/users/{name}/role", needs=writing("users"), limit=FORM_BYTES_MAX)
def change_role(
    call: Call, site: Site, passwords: PasswordService, oidc: OidcService, name: str, body: RoleForm
) -> Page | Redirect:
    """Change the role and the rights of a user."""
    change = PrincipalChange(
        role=body.role,
        grant=tuple(sorted({*body.rights} - {*body.before})),
        revoke=tuple(sorted({*body.before} - {*body.rights})),
    )
    return _changed(
        lambda: site.ask(call, principal_service.change_user, name=name, body=change),
        f"/people/users/{name}?done=changed",
        lambda error: _user_page(call, site, passwords, oidc, name, problem=error),
    )


@routes.post("/people/users/{name}/state", needs=writing("users"), limit=FORM_BYTES_MAX)
def change_state(
    call: Call, site: Site, passwords: PasswordService, oidc: OidcService, name: str, body: StateForm
) -> Page | Redirect:
    """Disable or enable a user."""
    change = PrincipalChange(disabled=body.disabled, runs=body.runs if body.disabled else None)
    return _changed(
        lambda: site.ask(call, principal_service.change_user, name=name, body=change),
        f"/people/users/{name}?done=changed",
        lambda error: _user_page(call, site, passwords, oidc, name, problem=error),
    )


@routes.post("/people/users/{name}/delete", needs=writing("users"), limit=FORM_BYTES_MAX)
def delete_user(
    call: Call, site: Site, passwords: PasswordService, oidc: OidcService, name: str, body: Form
) -> Page | Redirect:
    """Delete a user or a service."""
    return _changed(
        lambda: site.ask(call, principal_service.delete_user, name=name),
        "/people?done=deleted",
        lambda error: _user_page(call, site, passwords, oidc, name, problem=error),
    )


@routes.post("/people/users/{name}/password-link", needs=writing("users"), limit=FORM_BYTES_MAX)
def make_password_link(
    call: Call, site: Site, passwords: PasswordService, oidc: OidcService, name: str, body: Form
) -> Page:
    """Create a one-time link with which a user sets a password, and show the link."""
    try:
        link = site.ask(call, password_service.make_password_link, name=name)
    except ServerlessGpuError as error:
        return _user_page(call, site, passwords, oidc, name, problem=error)
    return site.page(
        call,
        "password_link.html",
        title=f"A link for {name}",
        nav="people",
        name=name,
        address=site.server(call) + link.path,
    )


@routes.post("/people/users/{name}/password-removal", needs=writing("tokens"), limit=FORM_BYTES_MAX)
def remove_password(
    call: Call, site: Site, passwords: PasswordService, oidc: OidcService, name: str, body: Form
) -> Page | Redirect:
    """Delete the password of a user."""
    return _changed(
        lambda: site.ask(call, password_service.remove_password, name=name),
        f"/people/users/{name}?done=changed",
        lambda error: _user_page(call, site, passwords, oidc, name, problem=error),
    )


@routes.post("/people/users/{name}/sign-out", needs=writing("tokens"), limit=FORM_BYTES_MAX)
def end_sessions(call: Call, site: Site, name: str, body: Form) -> Redirect:
    """End all sessions of a user except the reader's session."""
    query = SessionsQuery(principal=name, keep=call.who.token_id)
    site.ask(call, session_service.end_sessions, query=query)
    return Redirect(path=f"/people/users/{name}?done=signed-out")


@routes.post("/people/users/{name}/identities/{identity}", needs=writing("tokens"), limit=FORM_BYTES_MAX)
def unlink_identity(call: Call, site: Site, name: str, identity: str, body: Form) -> Redirect:
    """Remove the link of an account at the identity provider."""
    site.ask(call, oidc_service.unlink_identity, identity=identity)
    return Redirect(path=f"/people/users/{name}?done=unlinked")


@routes.post("/people/users/{name}/teams", needs=writing("teams"), limit=FORM_BYTES_MAX)
def join_team(
    call: Call, site: Site, passwords: PasswordService, oidc: OidcService, name: str, body: TeamForm
) -> Page | Redirect:
    """Add a user to a team."""
    return _changed(
        lambda: site.ask(call, principal_service.add_member, team=body.team, user=name),
        f"/people/users/{name}?done=changed",
        lambda error: _user_page(call, site, passwords, oidc, name, problem=error),
    )


def _user_page(
    call: Call,
    site: Site,
    passwords: PasswordService,
    oidc: OidcService,
    name: str,
    *,
    done: str = "",
    problem: ServerlessGpuError | None = None,
) -> Page:
    details = site.ask(call, principal_service.show_user, name=name)
    teams = site.ask_if_allowed(call, principal_service.list_teams)
    return _page(
        call,
        site,
        "person.html",
        title=name,
        done=done,
        problem=problem,
        details=details,
        user=details.principal,
        is_own=name == call.who.name,
        has_passwords=passwords.is_on,
        provider="" if oidc.settings is None else oidc.settings.name,
        roles=ROLES,
        rights=[right.value for right in Right],
        others=[] if teams is None else [one.name for one in teams.teams if one.name not in details.principal.teams],
    )


# --- teams ------------------------------------------------------------------------------------------------------------


@routes.get("/people/teams", needs=reading("teams"))
def show_teams(call: Call, site: Site, query: DoneQuery) -> Page:
    """List teams."""
    return _teams_page(call, site, done=query.done)


@routes.post("/people/teams", needs=writing("teams"), limit=FORM_BYTES_MAX)
def create_team(call: Call, site: Site, body: TeamForm) -> Page | Redirect:
    """Create a team."""
    name = body.team.strip()
    return _changed(
        lambda: site.ask(call, principal_service.make_team, body=TeamRequest(name=name)),
        f"/people/teams/{name}?done=changed",
        lambda error: _teams_page(call, site, problem=error),
    )


def _teams_page(call: Call, site: Site, *, done: str = "", problem: ServerlessGpuError | None = None) -> Page:
    found = site.ask(call, principal_service.list_teams)
    return _page(call, site, "teams.html", tab="teams", done=done, problem=problem, teams=found.teams)


@routes.get("/people/teams/{team}", needs=reading("teams"))
def show_team(call: Call, site: Site, team: str, query: DoneQuery) -> Page:
    """Show a team with its members."""
    return _team_page(call, site, team, done=query.done)


@routes.post("/people/teams/{team}/members", needs=writing("teams"), limit=FORM_BYTES_MAX)
def change_member(call: Call, site: Site, team: str, body: MemberForm) -> Page | Redirect:
    """Add a user to a team, or remove a user from a team."""
    change = principal_service.add_member if body.member else principal_service.remove_member
    return _changed(
        lambda: site.ask(call, change, team=team, user=body.user.strip()),
        f"/people/teams/{team}?done=changed",
        lambda error: _team_page(call, site, team, problem=error),
    )


@routes.post("/people/teams/{team}/time-zone", needs=writing("teams"), limit=FORM_BYTES_MAX)
def change_time_zone(call: Call, site: Site, team: str, body: TimeZoneForm) -> Page | Redirect:
    """Change the time zone of a team's budgets."""
    change = TeamChange(time_zone=body.time_zone.strip())
    return _changed(
        lambda: site.ask(call, principal_service.change_team, team=team, body=change),
        f"/people/teams/{team}?done=changed",
        lambda error: _team_page(call, site, team, problem=error),
    )


@routes.post("/people/teams/{team}/delete", needs=writing("teams"), limit=FORM_BYTES_MAX)
def delete_team(call: Call, site: Site, team: str, body: Form) -> Page | Redirect:
    """Delete a team."""
    return _changed(
        lambda: site.ask(call, principal_service.delete_team, team=team),
        "/people/teams?done=deleted",
        lambda error: _team_page(call, site, team, problem=error),
    )


def _team_page(call: Call, site: Site, team: str, *, done: str = "", problem: ServerlessGpuError | None = None) -> Page:
    found = site.ask(call, principal_service.show_team, team=team)
    return _page(call, site, "team.html", title=f"Team {team}", done=done, problem=problem, team=found)


# --- tokens -----------------------------------------------------------------------------------------------------------


@routes.get("/people/tokens", needs=reading("tokens"))
def show_tokens(call: Call, site: Site, query: TokenListQuery) -> Page:
    """List tokens with their creators."""
    return _tokens_page(call, site, query)


@routes.post("/people/tokens", needs=writing("tokens"), limit=FORM_BYTES_MAX)
def create_token(call: Call, site: Site, body: NewTokenForm) -> Page:
    """Create a token, and show its secret once."""
    request = TokenRequest(
        label=body.label.strip(),
        principal=body.of.strip(),
        scopes=tuple(body.scopes.replace(",", " ").split()),
        expires_s=body.days * 86_400.0,
    )
    try:
        made = site.ask(call, principal_service.make_token, body=request)
    except ServerlessGpuError as error:
        return _tokens_page(call, site, TokenListQuery(), problem=error)
    return _secret_page(call, site, made, title="The token is created")


@routes.post("/people/tokens/{token}/revoke", needs=writing("tokens"), limit=FORM_BYTES_MAX)
def revoke_token(call: Call, site: Site, token: str, body: Form) -> Redirect:
    """Revoke a token."""
    site.ask(call, principal_service.revoke_token, token=token)
    return Redirect(path="/people/tokens?done=revoked")


def _tokens_page(call: Call, site: Site, query: TokenListQuery, *, problem: ServerlessGpuError | None = None) -> Page:
    asked = TokensQuery(principal=query.of, newest=True, valid=not query.all, before=query.before, limit=ROWS)
    found = site.ask(call, principal_service.list_tokens, query=asked)
    return _page(
        call,
        site,
        "tokens.html",
        tab="tokens",
        done=query.done,
        problem=problem,
        tokens=found.tokens,
        cursor=found.cursor,
        query=query,
        scopes=sorted(SCOPES),
        lifetimes=LIFETIMES,
    )


# --- sessions ---------------------------------------------------------------------------------------------------------


@routes.get("/people/sessions", needs=reading("tokens"))
def show_sessions(call: Call, site: Site, query: SessionListQuery) -> Page:
    """List the browsers that are signed in."""
    found = site.ask(call, session_service.list_sessions)
    sessions = [one for one in found.sessions if query.of in ("", one.principal)]
    return _page(
        call,
        site,
        "sessions.html",
        tab="sessions",
        done=query.done,
        sessions=sessions[:ROWS],
        more=max(0, len(sessions) - ROWS),
        of=query.of,
        own=call.who.token_id,
    )


@routes.post("/people/sessions/{session}/end", needs=writing("tokens"), limit=FORM_BYTES_MAX)
def end_session(call: Call, site: Site, session: str, body: Form) -> Redirect:
    """End a session."""
    site.ask(call, session_service.end_session, session=session)
    return Redirect(path="/people/sessions?done=ended")


# --- shared -----------------------------------------------------------------------------------------------------------


def _changed(change: Callable[[], object], to: str, show: Callable[[ServerlessGpuError], Page]) -> Page | Redirect:
    """Perform a change, and return the page to open, or the page with the problem of a refused change."""
    try:
        change()
    except (InvalidValue, NotAllowed) as error:
        return show(error)
    return Redirect(path=to)


def _page(
    call: Call,
    site: Site,
    template: str,
    *,
    title: str = "People",
    tab: Literal["users", "teams", "tokens", "sessions", ""] = "",
    done: str = "",
    problem: ServerlessGpuError | None = None,
    **values: Any,
) -> Page:
    page = site.page(
        call,
        template,
        title=title,
        nav="people",
        tab=tab,
        notice=DONE.get(done, ""),
        problem=problem,
        **values,
    )
    return page if problem is None else msgspec.structs.replace(page, status=problem.status)


def _secret_page(call: Call, site: Site, made: TokenMade, *, title: str) -> Page:
    return site.page(
        call,
        "new_token.html",
        title=title,
        nav="people",
        token=made.token,
        secret=made.secret,
        server=site.server(call),
    )
