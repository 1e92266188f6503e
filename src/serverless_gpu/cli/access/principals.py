"""`sgpu logout`, `whoami`, `user`, `team`, `token`: manage users, teams and tokens."""

from __future__ import annotations

import os
import sys
from types import NoneType
from typing import get_args
from urllib.parse import quote

import click

from serverless_gpu.ambient import format_moment
from serverless_gpu.cli.amounts import duration_s
from serverless_gpu.cli.command_group import LazyGroup
from serverless_gpu.cli.completion import complete_team, complete_user
from serverless_gpu.cli.output import json_option, print_json, print_table, say, wide_option
from serverless_gpu.cli.runs.run_location import durable_home
from serverless_gpu.cli.server_connection import server
from serverless_gpu.client.remote.profile import SERVER, remove_profile
from serverless_gpu.model.access_control import AccessReach, Right, Role, reach
from serverless_gpu.model.isolation import NONE, SANDBOX, USER
from serverless_gpu.model.scheduling.wait_messages import sharing_warnings
from serverless_gpu.wire.access import (
    OnDisabled,
    PrincipalChange,
    PrincipalList,
    PrincipalRequest,
    PrincipalView,
    SignInLink,
    TeamChange,
    TeamList,
    TeamRequest,
    TeamView,
    TokenList,
    TokenMade,
    TokenRequest,
    TokenView,
)
from serverless_gpu.wire.nodes import PoolList
from serverless_gpu.wire.sign_in import PASSWORD_CHARACTERS_MIN, PasswordRequest, PasswordView

_ROLES = click.Choice(get_args(Role))
_PASSWORD_CHARACTERS_MAX = 1_000
_RIGHTS = click.Choice([right.value for right in Right])


@click.group()
def token() -> None:
    """List, create and revoke tokens."""


@token.command("list")
@wide_option
@json_option(tuple[TokenView, ...])
def list_tokens(wide: bool, as_json: bool) -> None:
    """List your tokens.

    An administrator sees the tokens of all principals.
    """
    with server() as connection:
        tokens = connection.ask("GET", "/tokens", answer=TokenList).tokens
    if as_json:
        print_json(tokens)
        return
    rows = [["ID", "OF", "MADE BY", "LABEL", "SCOPES", "STATE", "LAST USED"]]
    for each in tokens:
        used = "never" if each.used_ns is None else format_moment(each.used_ns)
        scopes = " ".join(each.scopes) or "all"
        state = "good" if each.expires_ns is None else f"until {format_moment(each.expires_ns)}"
        if each.revoked_ns is not None:
            state = f"revoked {format_moment(each.revoked_ns)}"
        rows.append([each.id, each.principal, each.made_by or "-", each.label or "-", scopes, state, used])
    print_table(rows[0], rows[1:], wide=wide)


@token.command("create")
@click.option("--label", default="", help="Description for `sgpu token list`.")
@click.option(
    "--for",
    "principal",
    default="",
    metavar="NAME",
    shell_complete=complete_user,
    help="Owner of the token (default: you).",
)
@click.option("--scope", "scopes", multiple=True, metavar="SCOPE", help="Limit the token to this scope. Repeatable.")
@click.option("--expires", metavar="DURATION", help="Lifetime of the token, for example 12h or 30d (default: 90 days).")
@json_option(TokenMade)
def create_token(label: str, principal: str, scopes: tuple[str, ...], expires: str | None, as_json: bool) -> None:
    """Create a token.

    `sgpu token create` prints the token's secret to stdout once. The server does not store token secrets.
    """
    expires_s = None if expires is None else duration_s("--expires", expires)
    body = TokenRequest(label=label, principal=principal, scopes=scopes, expires_s=expires_s)
    with server() as connection:
        made = connection.ask("POST", "/tokens", body, answer=TokenMade)
    if as_json:
        print_json(made)
        return
    say_secret(made)


@token.command("revoke")
@click.argument("identifier")
def revoke_token(identifier: str) -> None:
    """Revoke a token immediately."""
    with server() as connection:
        revoked = connection.ask("DELETE", f"/tokens/{identifier}", answer=TokenView)
    say(f"token {revoked.id} of {revoked.principal} is revoked")


def say_secret(made: TokenMade) -> None:
    """Print a new token's secret to stdout, for redirection into a file.

    Print the token's description to stderr.
    """
    until = "does not expire" if made.token.expires_ns is None else f"until {format_moment(made.token.expires_ns)}"
    token = f"token {made.token.id} of {made.token.principal}, {until}"
    say(f"sgpu: {token}; save the token's secret, which is shown only once:", err=True)
    say(made.secret)


@click.command()
def logout() -> None:
    """Delete this home's server address and token.

    The deleted token stays valid until you revoke it with `sgpu token revoke`. A server that uses this home directory
    writes its address to the directory again at the next server start.
    """
    home = durable_home("`sgpu login` stores the token in the home directory").root
    profile = remove_profile(home)
    if profile is None:
        say(f"{home} has no server")
        return
    say(f"{home} no longer uses {profile.url}; revoke the token with `sgpu token revoke`")
    if SERVER in os.environ:
        say(f"sgpu: unset {SERVER}, because commands still use the server {os.environ[SERVER]}", err=True)


@click.command()
@json_option(PrincipalView)
def whoami(as_json: bool) -> None:
    """Show your name, role and teams."""
    with server() as connection:
        me = connection.ask("GET", "/whoami", answer=PrincipalView)
    if as_json:
        print_json(me)
    else:
        say(f"{me.name} ({me.role}) at {connection.url}" + (f", in {', '.join(me.teams)}" if me.teams else ""))


@click.group(cls=LazyGroup, renamed={"add": "user create", "change": "user set"})
def user() -> None:
    """List, create, change and delete users.

    A service is a user account for a program.
    """


@user.command("list")
@wide_option
@json_option(tuple[PrincipalView, ...])
def list_users(wide: bool, as_json: bool) -> None:
    """List users and services."""
    with server() as connection:
        found = connection.ask("GET", "/users", answer=PrincipalList).principals
    if as_json:
        print_json(found)
        return
    rows = [["NAME", "KIND", "ROLE", "TEAMS", "STATE", "RIGHTS"]]
    for each in found:
        teams, rights = " ".join(each.teams) or "-", " ".join(each.rights) or "-"
        rows.append([each.name, each.kind, each.role, teams, _state(each), rights])
    print_table(rows[0], rows[1:], wide=wide)


@user.command("create")
@click.argument("name")
@click.option("--role", type=_ROLES, default="member", show_default=True, help="Role of the user.")
@click.option("--service", is_flag=True, help="Create a service account for a program.")
@click.option(
    "--team",
    "teams",
    multiple=True,
    metavar="TEAM",
    help="Add the user to this team. Repeatable.",
    shell_complete=complete_team,
)
@json_option(TokenMade)
def create_user(name: str, role: Role, service: bool, teams: tuple[str, ...], as_json: bool) -> None:
    """Create a user or a service.

    `sgpu user create` prints the user's first token once, for `sgpu login`.
    """
    body = PrincipalRequest(name=name, kind="service" if service else "user", role=role, teams=teams)
    with server() as connection:
        made = connection.ask("POST", "/users", body, answer=TokenMade)
        pools = connection.ask("GET", "/pools", answer=PoolList).pools
    if as_json:
        print_json(made)
    else:
        say_secret(made)
    if reach(role, "runs", write=True) is AccessReach.NONE:
        return
    closed = [pool.name for pool in pools if pool.isolation == "unset"]
    shared = [pool.name for pool in pools if pool.isolation == NONE]
    isolated = [pool.name for pool in pools if pool.isolation in (USER, SANDBOX)]
    for warning in sharing_warnings(principals=[name], closed=closed, shared=shared, isolated=isolated):
        say(f"sgpu: warning: {warning}", err=True)


@user.command("set")
@click.argument("name", shell_complete=complete_user)
@click.option("--role", type=_ROLES, default=None, help="New role of the user.")
@click.option(
    "--disable/--enable",
    "disabled",
    default=None,
    help="Disable the user and revoke all their tokens, or enable the user.",
)
@click.option(
    "--runs",
    type=click.Choice(get_args(OnDisabled)),
    default=None,
    help="Action for the user's runs after a loss of rights (default: server setting).",
)
@click.option(
    "--grant",
    multiple=True,
    type=_RIGHTS,
    help="Give the user this right. Repeatable. Only a holder of the right can grant it.",
)
@click.option("--revoke", multiple=True, type=_RIGHTS, help="Take this right away from the user. Repeatable.")
def set_user(
    name: str,
    role: Role | None,
    disabled: bool | None,
    runs: OnDisabled | None,
    grant: tuple[str, ...],
    revoke: tuple[str, ...],
) -> None:
    """Change, disable or enable a user.

    The right isolation.lower permits an operator or administrator to lower the isolation level of a pool. The first
    administrator of a server holds every right.
    """
    if role is None and disabled is None and runs is None and not grant and not revoke:
        options = "--role, --disable, --enable, --runs, --grant or --revoke"
        raise click.UsageError(f"the command changes no setting of the user; give {options}")
    change = PrincipalChange(role=role, disabled=disabled, runs=runs, grant=grant, revoke=revoke)
    with server() as connection:
        changed = connection.ask("PATCH", f"/users/{name}", change, answer=PrincipalView)
    rights = f", with the right {', '.join(changed.rights)}" if changed.rights else ""
    say(f"{changed.name} is {changed.role}, {_state(changed)}{rights}")
    if disabled is False:
        say(f"the user's old tokens stay revoked; create a new token with: sgpu token create --for {changed.name}")


@user.command("password")
@click.argument("name", shell_complete=complete_user)
@click.option("--link", "is_link", is_flag=True, help="Print a one-time link with which the user sets the password.")
@click.option("--remove", is_flag=True, help="Remove the password.")
def set_password(name: str, is_link: bool, remove: bool) -> None:
    """Set the password of a user.

    Users sign in to the web pages with a password. The command asks for the password, or reads one line from stdin. To
    change your own password, first enter the current password. A changed password ends the user's other sessions.
    Tokens stay valid. A server with an identity provider accepts no passwords.
    """
    if is_link and remove:
        raise click.UsageError("give either --link or --remove")
    path = f"/users/{quote(name, safe='')}/password"
    with server() as connection:
        if is_link:
            link = connection.ask("POST", f"{path}-links", answer=SignInLink)
            say(f"sgpu: valid once, until {format_moment(link.expires_ns)}; send it to {name}:", err=True)
            say(f"{connection.url}{link.path}")
            return
        if remove:
            connection.ask("DELETE", path, answer=NoneType)
            say(f"{name} has no password now")
            return
        is_own = connection.ask("GET", "/whoami", answer=PrincipalView).name == name
        current = ""
        if is_own and connection.ask("GET", path, answer=PasswordView).is_set:
            current = _read_password("Current password")
        password = _read_password(f"New password, at least {PASSWORD_CHARACTERS_MIN} characters", confirms=True)
        connection.ask("PUT", path, PasswordRequest(password=password, current=current), answer=NoneType)
    say(f"the password of {name} is set")


def _read_password(text: str, *, confirms: bool = False) -> str:
    """Ask for a password on a terminal, or read a line from stdin."""
    if sys.stdin.isatty():
        found: str = click.prompt(text, hide_input=True, confirmation_prompt=confirms, err=True)
        return found
    return sys.stdin.readline(_PASSWORD_CHARACTERS_MAX).rstrip("\n")


@user.command("delete")
@click.argument("name", shell_complete=complete_user)
def delete_user(name: str) -> None:
    """Delete a user or a service.

    The user must own no runs, nodes or secrets on the server. Budgets and policies must not name the user. If a user
    still has runs, disable the user with `sgpu user set NAME --disable`. Reports still include a deleted user's usage.
    """
    with server() as connection:
        gone = connection.ask("DELETE", f"/users/{quote(name, safe='')}", answer=PrincipalView)
    say(f"deleted {gone.kind} {gone.name} and all their tokens")


@click.group(cls=LazyGroup, renamed={"add": "team create"})
def team() -> None:
    """List, create, change and delete teams.

    Team members can read the team's runs.
    """


@team.command("list")
@wide_option
@json_option(tuple[TeamView, ...])
def list_teams(wide: bool, as_json: bool) -> None:
    """List teams and their members."""
    with server() as connection:
        teams = connection.ask("GET", "/teams", answer=TeamList).teams
    if as_json:
        print_json(teams)
        return
    print_table(["TEAM", "MEMBERS"], [[each.name, " ".join(each.members) or "-"] for each in teams], wide=wide)


@team.command("create")
@click.argument("name")
def create_team(name: str) -> None:
    """Create a team."""
    with server() as connection:
        say(f"team {connection.ask('POST', '/teams', TeamRequest(name=name), answer=TeamView).name} is created")


@team.command("delete")
@click.argument("name", shell_complete=complete_team)
def delete_team(name: str) -> None:
    """Delete a team.

    The team must have no waiting runs, running runs or secrets. Budgets and policies must not name the team. Reports
    still include a deleted team's usage. Owners keep the ended runs of a deleted team.
    """
    with server() as connection:
        gone = connection.ask("DELETE", f"/teams/{quote(name, safe='')}", answer=TeamView)
    say(f"deleted team {gone.name}, which had {len(gone.members)} members")


@team.command("set")
@click.argument("name", shell_complete=complete_team)
@click.option(
    "--time-zone",
    metavar="ZONE",
    required=True,
    help="Time zone of the team's budgets, for example Europe/Berlin or UTC.",
)
def set_team(name: str, time_zone: str) -> None:
    """Set the time zone of a team.

    A team budget without a time zone uses the team's time zone for its periods.
    """
    with server() as connection:
        changed = connection.ask("PATCH", f"/teams/{name}", TeamChange(time_zone=time_zone), answer=TeamView)
    say(f"budgets of team {changed.name} use the time zone {changed.time_zone} for their periods")


@team.command("join")
@click.argument("name", shell_complete=complete_team)
@click.argument("member", shell_complete=complete_user)
def add_member(name: str, member: str) -> None:
    """Add a user to a team."""
    _change_member("PUT", name, member)


@team.command("leave")
@click.argument("name", shell_complete=complete_team)
@click.argument("member", shell_complete=complete_user)
def remove_member(name: str, member: str) -> None:
    """Remove a user from a team."""
    _change_member("DELETE", name, member)


def _change_member(method: str, name: str, member: str) -> None:
    with server() as connection:
        changed = connection.ask(method, f"/teams/{name}/members/{member}", answer=TeamView)
    say(f"{changed.name}: {', '.join(changed.members) or 'no members'}")


def _state(view: PrincipalView) -> str:
    return "disabled" if view.disabled else "active"
