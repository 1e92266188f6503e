"""`sgpu nodes`, `sgpu node`: the machines of a server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import click

from serverless_gpu.ambient import SystemClock, format_moment, format_soon
from serverless_gpu.cli.amounts import duration_s
from serverless_gpu.cli.output import columns, print_json, say
from serverless_gpu.cli.runs.run_choice import this_home
from serverless_gpu.cli.server_connection import server
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.errors import InvalidValue, ServerProblem
from serverless_gpu.lazy_import import load
from serverless_gpu.units import format_duration_ms
from serverless_gpu.wire.agents import ForgetRequest, NodeList, NodeView, clock_text
from serverless_gpu.wire.nodes import ApproveRequest, InviteAnswer, InviteRequest


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def nodes(as_json: bool) -> None:
    """List the machines of the server: whether they answer, and what they have."""
    with server() as connection:
        found = connection.ask("GET", "/nodes", answer=NodeList).nodes
    if as_json:
        print_json(found)
        return
    if not found:
        say("no node has joined")
        return
    rows = [["NODE", "POOL", "STATE", "DEVICES", "USE", "HEARD", "FOR", ""]]
    for each in found:
        types = [device.type for device in each.devices]
        devices = ", ".join(f"{types.count(name)} {name}" for name in dict.fromkeys(types)) or "none"
        heard = f"{format_duration_ms(max(0, SystemClock().wall_ns() - each.seen_ns) // 1_000_000)} ago"
        left_out = [f"{one.uuid} is left out{f' ({one.note})' if one.note else ''}" for one in each.rules.quarantined]
        remarks = "; ".join(filter(None, (each.sentence, *left_out, *each.findings, clock_text(each.clock))))
        rows.append([each.name, each.pool, each.state, devices, f"{each.busy} busy", heard, for_whom(each), remarks])
    for line in columns(rows):
        say(line)


@click.group()
def node() -> None:
    """Act on one machine of the server."""


node.add_command(nodes, "list")


@node.command()
@click.argument("name")
@click.option("--i-know-it-is-dead", "certain", is_flag=True, help="The machine is off, or will never come back.")
def forget(name: str, certain: bool) -> None:
    """Give up a machine that is dead, and its runs with it, before the server would.

    The server waits until a machine that it cannot reach has certainly stopped its runs. Who knows that it is off need
    not wait. If it is not, its runs may run twice.
    """
    if not certain:
        raise click.UsageError("runs there may still go on: --i-know-it-is-dead says that they do not")
    with server() as connection:
        found = find_node(connection.ask("GET", "/nodes", answer=NodeList).nodes, name)
        body = ForgetRequest(i_know_it_is_dead=True)
        view = connection.ask("POST", f"/nodes/{found.id}/forget", body, answer=NodeView)
    say(f"{view.name} is {view.state}: {view.sentence}")


@node.command()
@click.argument("name")
def approve(name: str) -> None:
    """Let in a machine that waits for an administrator.

    A machine waits where its token was made by hand (`sgpu token create`) and not by a join file. Look first whether
    the machine that `sgpu nodes` shows is one that you know: a node is given users' code, arguments and secrets.
    """
    with server() as connection:
        view = connection.ask("POST", "/nodes/approve", ApproveRequest(name=name), answer=NodeView)
    say(f"{view.name} {view.sentence}")


@node.command()
@click.argument("name", required=False, default="")
@click.option("--uses", type=click.IntRange(min=1), default=1, show_default=True, help="How many machines it lets in.")
@click.option("--for", "lifetime", metavar="DURATION", default="1d", show_default=True, help="How long it is good.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("join.json"),
    show_default=True,
    help="The join file to write, readable by you alone.",
)
def invite(name: str, uses: int, lifetime: str, out: Path) -> None:
    """Make a join file with which machines join the pool: one machine within a day, or --uses within --for.

    Copy it to each machine, and run there: sgpu join HOST --token-file FILE. With NAME, it lets in a machine of that
    name alone.
    """
    body = InviteRequest(name=name, uses=uses, expires_s=duration_s("--for", lifetime))
    join_file = load("serverless_gpu.engines.ray.join_file")
    with server() as connection:
        made = connection.ask("POST", "/nodes/invite", body, answer=InviteAnswer)
    url, ca = join_address(this_home().root)
    try:
        join_file.write_join_file(out, join_file.JoinFile(server=url, token=made.token, ca=ca))
    except OSError as error:
        hint = f"sgpu token revoke {made.id}, then give another --out"
        raise ServerProblem(f"{out} cannot be written: {error.strerror}", hint=hint) from None
    machines = "1 machine" if uses == 1 else f"{uses} machines"
    say(f"{out} lets in {machines} until {format_moment(made.expires_ns)}; it is as secret as a password")
    say(f"revoke it: sgpu token revoke {made.id}", err=True)


def join_address(home: Path) -> tuple[str, str]:
    """Return the server and certificates for joining: the join file's, else this client's."""
    own = home / "server" / "join.json"
    with contextlib.suppress(InvalidValue):
        file = load("serverless_gpu.engines.ray.join_file").read_join_file(own)
        return file.server, file.ca
    profile = find_profile(home, os.environ)
    return profile.url, Path(profile.ca).read_text(encoding="ascii", errors="replace") if profile.ca else ""


def find_node(found: Sequence[NodeView], name: str) -> NodeView:
    """Return the node with this name or identifier."""
    for each in found:
        if name in (each.name, each.id):
            return each
    names = ", ".join(each.name for each in found) or "none has joined"
    raise InvalidValue(f"there is no node {name!r}", hint=f"nodes: {names}")


def for_whom(view: NodeView) -> str:
    """Return whose runs a node takes now, and until when."""
    calendar = view.rules.calendar
    who = "all" if view.shared else calendar.owner or "nobody"
    until = f" until {format_soon(view.turns_ns)}" if view.turns_ns is not None else ""
    first = f", {calendar.owner} first" if view.shared and calendar.owner_first else ""
    return f"{who}{until}{first}"
