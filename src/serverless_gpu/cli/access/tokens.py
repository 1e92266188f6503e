"""`sgpu token`: tokens with which scripts and services sign in."""

from __future__ import annotations

import click

from serverless_gpu.ambient import format_moment
from serverless_gpu.cli.amounts import duration_s
from serverless_gpu.cli.output import columns, print_json, say
from serverless_gpu.cli.server_connection import server
from serverless_gpu.wire.access import TokenList, TokenMade, TokenRequest, TokenView


@click.group()
def token() -> None:
    """Make, list and revoke tokens of a server."""


@token.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_tokens(as_json: bool) -> None:
    """List your tokens; an administrator sees everybody's."""
    with server() as connection:
        tokens = connection.ask("GET", "/tokens", answer=TokenList).tokens
    if as_json:
        print_json(tokens)
        return
    rows = [["ID", "OF", "LABEL", "SCOPES", "STATE", "LAST USED"]]
    for each in tokens:
        used = "never" if each.used_ns is None else format_moment(each.used_ns)
        scopes = " ".join(each.scopes) or "all"
        state = "good" if each.expires_ns is None else f"until {format_moment(each.expires_ns)}"
        if each.revoked_ns is not None:
            state = f"revoked {format_moment(each.revoked_ns)}"
        rows.append([each.id, each.principal, each.label or "-", scopes, state, used])
    for line in columns(rows):
        say(line)


@token.command("create")
@click.option("--label", default="", help="What it is for, to be recognised in the list.")
@click.option("--for", "principal", default="", metavar="NAME", help="Whose it is; yours without it.")
@click.option("--scope", "scopes", multiple=True, metavar="SCOPE", help="Limit what it can be used for. Repeatable.")
@click.option("--expires", metavar="DURATION", help="How long it is good for, for example 12h or 30d.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def create(label: str, principal: str, scopes: tuple[str, ...], expires: str | None, as_json: bool) -> None:
    """Make a token; its secret is printed once, alone on stdout, and kept nowhere."""
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
def revoke(identifier: str) -> None:
    """Make a token useless at once."""
    with server() as connection:
        revoked = connection.ask("DELETE", f"/tokens/{identifier}", answer=TokenView)
    say(f"token {revoked.id} of {revoked.principal} is revoked")


def say_secret(made: TokenMade) -> None:
    """Print a new token's secret on stdout, for piping into a file, and its description on stderr."""
    until = "does not expire" if made.token.expires_ns is None else f"until {format_moment(made.token.expires_ns)}"
    say(f"token {made.token.id} of {made.token.principal}, {until}; shown this once:", err=True)
    say(made.secret)
