"""`sgpu secret`: manages passwords and keys for runs, on a server or in the local home directory.

`sgpu secret set` reads a secret's value from a prompt, stdin or a file. A secret's value is never an argument, because
every user of the machine can read command arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import quote

import click

from serverless_gpu.ambient import format_moment
from serverless_gpu.cli.completion import complete_secret, complete_team
from serverless_gpu.cli.output import json_option, print_json, print_table, say, say_lines, wide_option
from serverless_gpu.cli.runs.run_location import durable_home, this_home
from serverless_gpu.cli.server_connection import server
from serverless_gpu.client.launch import local_secrets
from serverless_gpu.model.secrets import VALUE_BYTES_MAX, check_name, check_value
from serverless_gpu.wire.access import SecretList, SecretRequest, SecretView

_LOCAL = click.option("--local", is_flag=True, help="Use the local secrets for runs on this machine.")
_TEAM = click.option(
    "--team",
    default="",
    metavar="NAME",
    help="Team that owns the secret, for runs with team= (default: you).",
    shell_complete=complete_team,
)


@click.group()
def secret() -> None:
    """List, set and delete secrets for runs.

    A run receives only the secrets that it requests, for example with secrets=["HF_TOKEN"].
    """


@secret.command("set")
@click.argument("name", shell_complete=complete_secret)
@click.option(
    "--file",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the value from a file.",
)
@_TEAM
@_LOCAL
def set_secret(name: str, path: Path | None, team: str, local: bool) -> None:
    """Set a secret from a prompt, stdin or a file.

    Attempts that start later receive the secret's new value. `sgpu secret set` removes one trailing newline from a
    typed or piped value. `sgpu secret set` does not change a value from a file.
    """
    _refuse_both(team, local)
    value = check_value(check_name(name), _read_value(name, path))
    if local:
        local_secrets.write(durable_home("`sgpu secret` stores secrets in the home directory"), name, value)
        say(f"secret {name} is set for runs on this machine")
        return
    with server() as connection:
        request = SecretRequest(value=value, team=team)
        view = connection.ask("PUT", f"/secrets/{quote(name, safe='')}", request, answer=SecretView)
    say(f"{view.name}@{view.version}{_team_suffix(view)} is set")


@secret.command("list")
@_LOCAL
@wide_option
@json_option(list[SecretView | str])
def list_secrets(local: bool, wide: bool, as_json: bool) -> None:
    """List your and your teams' secrets.

    `sgpu secret list` never prints the values of secrets.
    """
    if local:
        names = local_secrets.names(this_home())
        if as_json:
            print_json(names)
        else:
            say_lines("\n".join(names) or "the home directory has no secrets")
        return
    with server() as connection:
        found = connection.ask("GET", "/secrets", answer=SecretList).secrets
    if as_json:
        print_json(found)
        return
    rows = []
    for view in found:
        owner = f"team {view.team}" if view.team else view.owner
        used = "-" if view.used_ns is None else format_moment(view.used_ns)
        rows.append([view.name, f"{view.version}", owner, view.by, format_moment(view.created_ns), used])
    print_table(["NAME", "VERSION", "OF", "SET BY", "AT", "LAST USE"], rows, wide=wide)


@secret.command("delete")
@click.argument("name", shell_complete=complete_secret)
@_TEAM
@_LOCAL
def delete_secret(name: str, team: str, local: bool) -> None:
    """Delete a secret with all its versions.

    A running attempt keeps its copy of the secret.
    """
    _refuse_both(team, local)
    if local:
        local_secrets.delete(durable_home("`sgpu secret` stores secrets in the home directory"), name)
        say(f"{name} is deleted")
        return
    with server() as connection:
        query = {"team": team} if team else {}
        view = connection.ask("DELETE", f"/secrets/{quote(name, safe='')}", answer=SecretView, query=query)
    say(f"{view.name}{_team_suffix(view)} is deleted")


def _read_value(name: str, path: Path | None) -> bytes:
    if path is not None:
        with path.open("rb") as file:
            return file.read(VALUE_BYTES_MAX + 1)
    if sys.stdin.isatty():
        return str(click.prompt(name, hide_input=True)).encode()
    return sys.stdin.buffer.read(VALUE_BYTES_MAX + 3).removesuffix(b"\n").removesuffix(b"\r")


def _refuse_both(team: str, local: bool) -> None:
    if team and local:
        raise click.UsageError("give either --team (a secret on a server) or --local (a secret on this machine)")


def _team_suffix(view: SecretView) -> str:
    return f" of team {view.team}" if view.team else ""
