"""`sgpu nodes`, `sgpu node`: the machines of a server, and rules for one of them (drain, calendar, quarantine)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import click
import msgspec

from serverless_gpu.ambient import SystemClock, format_moment, format_soon
from serverless_gpu.cli.amounts import duration_s
from serverless_gpu.cli.output import columns, print_json, say
from serverless_gpu.cli.runs.run_location import this_home
from serverless_gpu.cli.server_connection import server
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.errors import InvalidValue, ServerProblem
from serverless_gpu.lazy_import import load
from serverless_gpu.model.hardware import CPU, Device
from serverless_gpu.units import format_duration_ms
from serverless_gpu.wire.agents import clock_text
from serverless_gpu.wire.base import Request
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.nodes import (
    ApproveRequest,
    CalendarRequest,
    ForgetRequest,
    InviteAnswer,
    InviteRequest,
    NodeCalendar,
    NodeDrainRequest,
    NodeList,
    NodeView,
    QuarantineRequest,
)

_LOOK_S = 0.5
_UUID_CHARACTERS_MIN = 4  # characters of a uuid that stand for it
_ZONES = "/zoneinfo/"


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
        rows.append([each.name, each.pool, each.state, devices, f"{each.busy} busy", heard, owner_text(each), remarks])
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
    join_file = load("serverless_gpu.engines.ray.pool_join")
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
        file = load("serverless_gpu.engines.ray.pool_join").read_join_file(own)
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


def owner_text(view: NodeView) -> str:
    """Return whose runs a node takes now, and until when."""
    calendar = view.rules.calendar
    who = "all" if view.shared else calendar.owner or "nobody"
    until = f" until {format_soon(view.turns_ns)}" if view.turns_ns is not None else ""
    first = f", {calendar.owner} first" if view.shared and calendar.owner_first else ""
    return f"{who}{until}{first}"


@click.command()
@click.argument("name")
@click.option("--stop", is_flag=True, help="Stop what runs there, too; with resume it goes on elsewhere.")
@click.option("--note", default="", metavar="TEXT", help="Why, for those who wait.")
@click.option("--wait", "wait", metavar="DURATION", help="Wait until nothing runs there any more, this long at most.")
def drain(name: str, stop: bool, note: str, wait: str | None) -> None:
    """Place nothing new on a machine, until `sgpu node resume`, also after a restart.

    What runs there goes on, unless --stop says otherwise: then it is stopped in order, at once.
    """
    limit_s = duration_s("--wait", wait) if wait is not None else 0.0
    with server(patience_s=limit_s) as connection:
        view = _put_rule(
            connection, _fetch_node(connection, name), "drain", NodeDrainRequest(on=True, stop=stop, note=note)
        )
        say(f"{view.name} is given nothing new; {_runs_text(view)}")
        if view.runs and view.rules.drain is not None and view.rules.drain.stop:
            say("what runs there is asked to stop: with resume it goes on elsewhere, else it ends as drained")
        clock, said = SystemClock(), len(view.runs)
        deadline_ns = clock.boottime_ns() + round(limit_s * 1e9)
        while view.runs and clock.boottime_ns() < deadline_ns:
            time.sleep(_LOOK_S)
            view = _fetch_node(connection, view.id)
            if len(view.runs) != said:
                said = len(view.runs)
                say(_runs_text(view))
    if wait is not None and view.runs:
        raise ServerProblem(f"{_runs_text(view)} on {view.name} still, after {wait}", hint="`sgpu runs` lists them")


@click.command()
@click.argument("name")
def resume(name: str) -> None:
    """Place runs on a machine again: the end of `sgpu node drain`."""
    with server() as connection:
        view = _put_rule(connection, _fetch_node(connection, name), "drain", NodeDrainRequest(on=False))
    say(f"{view.name} is {view.state}{f': {view.sentence}' if view.sentence else ''}")


@click.command()
@click.argument("name")
@click.option(
    "--shared", multiple=True, metavar="TIMES", help='When others may use it: "mon-fri 19:00-07:00". Repeatable.'
)
@click.option(
    "--zone", metavar="NAME", help='Whose time that is: "Europe/Berlin". This machine\'s where it is not said.'
)
@click.option("--owner", metavar="NAME", help="Who may always use it.")
@click.option("--owner-first/--no-owner-first", default=None, help="Others leave for the owner's runs at any time.")
@click.option("--clear", is_flag=True, help="Begin with nothing: everybody may use it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def calendar(name: str, clear: bool, as_json: bool, **said: object) -> None:
    """Say whose a machine is, and when others may use it; without options, show that.

    What is not said stays as it was. When it ceases to be shared, runs of others are told five minutes before, and then
    stopped in order: with resume they go on elsewhere.
    """
    given = {key: value for key, value in said.items() if value not in (None, ())}
    with server() as connection:
        view = _fetch_node(connection, name)
        if given or clear:
            before = NodeCalendar() if clear else view.rules.calendar
            asked = CalendarRequest(**(msgspec.structs.asdict(before) | given))
            if asked.shared and not asked.zone:
                asked = msgspec.structs.replace(asked, zone=local_zone())
            view = _put_rule(connection, view, "calendar", asked)
    if as_json:
        print_json(view.rules.calendar)
        return
    for line in calendar_lines(view):
        say(line)


@click.command()
@click.argument("name")
@click.argument("gpu")
@click.option("--note", default="", metavar="TEXT", help="Why.")
def quarantine(name: str, gpu: str, note: str) -> None:
    """Leave a GPU of a machine out, by its number or uuid, until `sgpu node release`.

    A run that has it goes on. Runs of the machine's own that do not come from the server are not affected.
    """
    _set_quarantine(name, gpu, on=True, note=note)


@click.command()
@click.argument("name")
@click.argument("gpu")
def release(name: str, gpu: str) -> None:
    """Give a GPU to runs again: the end of `sgpu node quarantine`."""
    _set_quarantine(name, gpu, on=False, note="")


for _command in (drain, resume, calendar, quarantine, release):
    node.add_command(_command)


def calendar_lines(view: NodeView) -> list[str]:
    """Return a node's owner and sharing calendar as text."""
    asked = view.rules.calendar
    whose = f"{view.name} is {asked.owner}'s" if asked.owner else f"{view.name} is nobody's in particular"
    if not asked.shared:
        lines = [f"{whose}; everybody may use it at any time"]
    else:
        times = ", ".join(asked.shared)
        lines = [f"{whose}; others may use it {times} ({asked.zone or 'UTC'})"]
        now = "shared now" if view.shared else "not shared now"
        lines.append(now + (f", until {format_soon(view.turns_ns)}" if view.turns_ns is not None else ""))
    if asked.owner_first:
        lines.append(f"runs of {asked.owner} come first: others leave for them")
    return lines


def find_device(devices: Sequence[Device], asked: str, node: str) -> str:
    """Return the uuid of a device by its number on the bus, its uuid or a unique beginning of that."""
    cards = [device for device in devices if device.type != CPU] or list(devices)
    if asked.isascii() and asked.isdigit():
        found = [device.uuid for device in cards if device.index == int(asked)]
    else:
        found = [device.uuid for device in devices if device.uuid == asked] or [
            device.uuid for device in devices if len(asked) >= _UUID_CHARACTERS_MIN and device.uuid.startswith(asked)
        ]
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{device.index}: {device.uuid}" for device in cards[:16]) or "none"
    raise InvalidValue(
        f"{node} has {'several devices' if found else 'no device'} {asked[:64]!r}", hint=f"its devices: {there}"
    )


def local_zone() -> str:
    """Return the name of this machine's time zone, or "UTC"."""
    named = os.environ.get("TZ", "").removeprefix(":")
    if "/" in named and not named.startswith("/"):
        return named
    place = os.path.realpath("/etc/localtime")
    if _ZONES in place:
        return place.rpartition(_ZONES)[2].removeprefix("posix/")
    try:
        return Path("/etc/timezone").read_text(encoding="ascii").strip() or "UTC"
    except (OSError, UnicodeDecodeError):
        return "UTC"


def _set_quarantine(name: str, gpu: str, *, on: bool, note: str) -> None:
    with server() as connection:
        view = _fetch_node(connection, name)
        marked = [one.uuid for one in view.rules.quarantined]
        uuid = gpu if not on and gpu in marked else find_device(view.devices, gpu, view.name)
        view = _put_rule(connection, view, "quarantine", QuarantineRequest(uuid=uuid, on=on, note=note))
    if on:
        has = f"; {_runs_text(view)}, and whichever has it keeps it" if view.runs else ""
        say(f"{uuid} of {view.name} is left out{has}")
        return
    kept = uuid in view.unavailable
    told = "was not left out" if uuid not in marked else "is left out no more" if kept else "is given to runs again"
    say(f"{uuid} of {view.name} {told}{f'; {view.name} itself does not offer it now' if kept else ''}")


def _fetch_node(connection: Connection, name: str) -> NodeView:
    return find_node(connection.ask("GET", "/nodes", answer=NodeList).nodes, name)


def _put_rule(connection: Connection, view: NodeView, what: str, body: Request) -> NodeView:
    return connection.ask("PUT", f"/nodes/{quote(view.id, safe='')}/{what}", body, answer=NodeView)


def _runs_text(view: NodeView) -> str:
    count = len(view.runs)
    return f"{count} {'run goes' if count == 1 else 'runs go'} on there" if count else "nothing runs there"
