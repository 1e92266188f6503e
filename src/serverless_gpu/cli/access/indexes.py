"""`sgpu index`: manages the package indexes that the server's index proxy serves."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlsplit

import click

from serverless_gpu.ambient import format_moment
from serverless_gpu.cli.amounts import duration_s
from serverless_gpu.cli.completion import complete_index, complete_secret, complete_team
from serverless_gpu.cli.output import json_option, print_json, print_table, say, wide_option
from serverless_gpu.cli.server_connection import server
from serverless_gpu.units import format_bytes
from serverless_gpu.wire.indexes import (
    IndexList,
    IndexLog,
    IndexRequest,
    IndexToken,
    IndexTokenRequest,
    IndexView,
)


@click.group()
def index() -> None:
    """List, set and delete package indexes.

    The index proxy of the server serves the packages of these indexes to builds and runs.
    """


@index.command("list")
@wide_option
@json_option(IndexList)
def list_indexes(wide: bool, as_json: bool) -> None:
    """List package indexes and their proxy."""
    with server() as connection:
        found = connection.ask("GET", "/indexes", answer=IndexList)
    if as_json:
        print_json(found)
        return
    rows = [
        [
            each.name,
            each.url,
            " ".join(each.file_hosts) or "-",
            "yes" if each.private else "no",
            each.secret or "-",
            each.by,
        ]
        for each in found.indexes
    ]
    print_table(["INDEX", "URL", "FILE HOSTS", "PRIVATE", "SECRET", "BY"], rows, wide=wide)
    say(f"index proxy: {found.proxy}" if found.proxy else "the server has no index proxy: sgpu up --index-proxy")


@index.command("set")
@click.argument("name", shell_complete=complete_index)
@click.argument("url")
@click.option(
    "--file-host",
    "file_hosts",
    multiple=True,
    metavar="HOST[:PORT]",
    help="Host to which pages of the index may link. Repeatable. Default: the index's own host, and the known hosts of "
    "pypi.org, test.pypi.org and download.pytorch.org.",
)
@click.option("--private", is_flag=True, help="Permit addresses of private networks and of the server's machine.")
@click.option(
    "--secret",
    default="",
    metavar="NAME",
    help="Secret with USER:PASSWORD or a token for the index.",
    shell_complete=complete_secret,
)
@click.option(
    "--team",
    default="",
    metavar="NAME",
    help="Team that owns the secret (default: you).",
    shell_complete=complete_team,
)
def set_index(name: str, url: str, **said: Any) -> None:
    """Add or replace a package index.

    URL is the URL of a simple repository (PEP 503), for example https://pypi.org/simple/. The index proxy connects to
    the host of the URL and to the file hosts only.
    """
    request = IndexRequest(
        url=url,
        file_hosts=said["file_hosts"] or None,
        private=said["private"],
        secret=said["secret"],
        team=said["team"],
    )
    with server() as connection:
        view = connection.ask("PUT", f"/indexes/{quote(name, safe='')}", request, answer=IndexView)
    hosts = f", with files of {', '.join(view.file_hosts)}" if view.file_hosts else ""
    say(f"index {view.name} serves {view.url}{hosts}")


@index.command("delete")
@click.argument("name", shell_complete=complete_index)
def delete_index(name: str) -> None:
    """Delete a package index."""
    with server() as connection:
        view = connection.ask("DELETE", f"/indexes/{quote(name, safe='')}", answer=IndexView)
    say(f"index {view.name} is deleted")


@index.command("token")
@click.option("--for", "lifetime", default="1h", metavar="DURATION", help="Lifetime of the token, at most 24h.")
@json_option(IndexToken)
def create_token(lifetime: str, as_json: bool) -> None:
    """Print an index URL with a short-lived token.

    pip and uv accept the printed URL as PIP_INDEX_URL and UV_DEFAULT_INDEX.
    """
    request = IndexTokenRequest(lifetime_s=round(duration_s("--for", lifetime)))
    with server() as connection:
        made = connection.ask("POST", "/index-token", request, answer=IndexToken)
    if as_json:
        print_json(made)
        return
    for name in made.indexes:
        say(token_url(made, name))
    say(f"valid until {format_moment(made.until_ns)}", err=True)


@index.command("log")
@click.option("--limit", default=50, type=click.IntRange(1, 1_000), help="Maximum number of requests.")
@wide_option
@json_option(IndexLog)
def show_log(limit: int, wide: bool, as_json: bool) -> None:
    """Show the last requests of the index proxy."""
    with server() as connection:
        found = connection.ask("GET", "/index-log", answer=IndexLog, query={"limit": f"{limit}"})
    if as_json:
        print_json(found)
        return
    rows = [
        [
            format_moment(each.at_ns),
            each.client or "-",
            each.index or "-",
            each.file or each.project or "-",
            f"{each.status}",
            format_bytes(each.bytes),
            f"{each.ms:.0f}",
            each.detail or each.outcome,
        ]
        for each in found.requests
    ]
    print_table(["AT", "CLIENT", "INDEX", "OBJECT", "STATUS", "SIZE", "MS", "OUTCOME"], rows, wide=wide)


def token_url(made: IndexToken, name: str) -> str:
    """Return the URL of an index with its token."""
    parts = urlsplit(made.url)
    return f"{parts.scheme}://sgpu:{made.token}@{parts.netloc}{parts.path}{name}/simple/"
