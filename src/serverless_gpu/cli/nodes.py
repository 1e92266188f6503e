"""`sgpu node`: lists and invites a server's nodes, and controls drains, calendars and quarantines."""

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
from serverless_gpu.cli.canary import canary
from serverless_gpu.cli.command_group import CommandEntry, LazyGroup
from serverless_gpu.cli.completion import complete_node
from serverless_gpu.cli.output import JsonType, columns, json_option, print_json, print_table, say, wide_option
from serverless_gpu.cli.runs.run_location import this_home
from serverless_gpu.cli.server_connection import server
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.errors import InvalidValue, NotAllowed, ServerProblem
from serverless_gpu.lazy_import import load
from serverless_gpu.model.hardware import CPU, Device
from serverless_gpu.model.isolation import NONE
from serverless_gpu.node.isolation import SPAWNER
from serverless_gpu.node.spawner import SOCKET
from serverless_gpu.units import format_bytes, format_duration_ms
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
_KEY_CHARACTERS = 8  # Characters of a key's fingerprint in the list of nodes.
_ROTATED_S = 20.0
_ABSENT = ("SILENT", "GONE", "REVOKED")
_UUID_CHARACTERS_MIN = 4  # Minimum length of a UUID prefix.
_ZONES = "/zoneinfo/"


# `sgpu node unit` needs modules that only Unix has.
_ON_DEMAND = {"unit": CommandEntry("node_unit:unit", "Print a systemd unit for a node.")}


@click.group(cls=LazyGroup, name="node", table=_ON_DEMAND)
def node() -> None:
    """List, drain and invite nodes."""


node.add_command(canary)


@node.command("list")
@wide_option
@json_option(tuple[NodeView, ...])
def list_nodes(wide: bool, as_json: bool) -> None:
    """List the nodes of the server."""
    with server() as connection:
        found = connection.ask("GET", "/nodes", answer=NodeList).nodes
    if as_json:
        print_json(found)
        return
    if not found:
        say("no node has joined yet. Create a join file with `sgpu node invite`")
        return
    rows = [["NODE", "POOL", "STATE", "DEVICES", "USE", "LAST SEEN", "KEY", "USERS", "REMARKS"]]
    for each in found:
        types = [device.type for device in each.devices]
        devices = ", ".join(f"{types.count(name)} {name}" for name in dict.fromkeys(types)) or "none"
        use, users, remarks = f"{each.busy} busy", owner_text(each), "; ".join(_remarks(each))
        key = each.key[:_KEY_CHARACTERS] or "none"
        rows.append([each.name, each.pool, each.state, devices, use, _seen_text(each), key, users, remarks])
    print_table(rows[0], rows[1:], wide=wide)


@node.command("show")
@click.argument("name", shell_complete=complete_node)
@json_option(NodeView)
def show_node(name: str, as_json: bool) -> None:
    """Show one node, its devices and runs."""
    with server() as connection:
        view = _fetch_node(connection, name)
    if as_json:
        print_json(view)
        return
    rows = [
        ["node", f"{view.name} ({view.id})"],
        ["pool", view.pool],
        ["state", view.state],
        ["version", view.version],
        ["last seen", _seen_text(view)],
        ["users", owner_text(view)],
        ["key", key_text(view)],
        ["isolation", f"{view.isolation}: {view.isolation_problem}" if view.isolation_problem else view.isolation],
        *([["network rules", rules_text(view)]] if view.isolation != NONE else []),
        *(["remark", remark] for remark in _remarks(view)),
        *(["run", run] for run in view.runs),
    ]
    quarantined = {one.uuid for one in view.rules.quarantined}
    for device in view.devices:
        state = "quarantined" if device.uuid in quarantined else "offline" if device.uuid in view.unavailable else ""
        memory = format_bytes(device.memory_bytes) if device.memory_bytes else ""
        rows.append(["device", " · ".join(filter(None, (device.uuid, device.type, memory, state)))])
    for line in columns(rows):
        say(line)


@node.command()
@click.argument("name", shell_complete=complete_node)
@click.option(
    "--i-know-it-is-dead", "certain", is_flag=True, help="Confirm that the machine is off or will never come back."
)
def forget(name: str, certain: bool) -> None:
    """Declare a dead node and its runs lost.

    By default, the server waits until the partition grace of an unreachable node's runs has ended. Use `sgpu node
    forget` only if you know that the machine is off. If the machine is still on, its runs may execute twice.
    """
    if not certain:
        raise click.UsageError("the node's runs may still be running. If the machine is off, add --i-know-it-is-dead")
    with server() as connection:
        found = find_node(connection.ask("GET", "/nodes", answer=NodeList).nodes, name)
        body = ForgetRequest(i_know_it_is_dead=True)
        view = connection.ask("POST", f"/nodes/{found.id}/forget", body, answer=NodeView)
    say(f"{view.name} is {view.state}: {view.sentence}")


@node.command()
@click.option("--forget", "name", metavar="PRINCIPAL", help="Free the uid of a principal if nothing of it remains.")
@click.option("--delete-home", is_flag=True, help="With --forget, delete the principal's home directory.")
@json_option(JsonType("node.isolation.sweeper:SweepFindings"))
def sweep(name: str | None, delete_home: bool, as_json: bool) -> None:
    """Remove what principals left on this machine.

    Run the command as root on the node. With SERVERLESS_GPU_SPAWNER, the account of the node can run the command too.
    The agent runs the same sweep at its start and every 15 minutes. The sweep removes files, shared memory and message
    queues an hour after their last change, if no process of their principal runs. The sweep reports processes outside
    of sandboxes and scheduled jobs. With --forget, root frees the uid of a deleted user for another principal.
    """
    if os.geteuid() != 0 and (name is not None or not os.environ.get(SPAWNER)):
        what = "free the uid of a principal" if name is not None else "look at all processes and files of a node"
        raise NotAllowed(f"only root can {what}", hint="run sudo sgpu node sweep")
    if delete_home and name is None:
        raise click.UsageError("--delete-home needs --forget")
    findings = load("serverless_gpu.node.spawner.client").find_spawner(os.environ).sweep()
    if as_json:
        print_json(findings)
    else:
        for sentence in (*(f"removed: {each}" for each in findings.removed), *findings.sentences()):
            say(sentence)
        if not findings.sentences():
            say("nothing remains outside of the places of principals")
    if name is not None:
        known = load("serverless_gpu.node.isolation.principals").PrincipalMap(os.environ)
        owner = load("serverless_gpu.node.isolation.sweeper").forget(known, name, delete_home=delete_home)
        say(f"{owner} has no uid on this node any more", err=as_json)


@node.command()
@click.argument("name", shell_complete=complete_node)
def approve(name: str) -> None:
    """Admit a node that waits for approval.

    A node needs approval if an operator created its token with `sgpu token create` instead of a join file. Before
    approving a node, check in `sgpu node list` that you know the machine. A node receives users' code, arguments and
    secrets.
    """
    with server() as connection:
        view = connection.ask("POST", "/nodes/approve", ApproveRequest(name=name), answer=NodeView)
    say(f"{view.name} {view.sentence}")


@node.command()
@click.argument("name", shell_complete=complete_node)
def rotate(name: str) -> None:
    """Replace the key of a node.

    The node makes another key and signs the new key with the old key. Runs on the node continue. If another person may
    have a copy of the old key, use `sgpu node revoke` instead.
    """
    with server() as connection:
        before = _fetch_node(connection, name)
        view = connection.ask("POST", f"/nodes/{quote(before.id, safe='')}/rotate", answer=NodeView)
        until = time.monotonic() + _ROTATED_S
        while view.rotating and view.state not in _ABSENT and time.monotonic() < until:
            time.sleep(_LOOK_S)
            view = _fetch_node(connection, before.id)
    if view.rotating:
        say(f"{view.name} has not replaced its key yet. The node replaces its key after its next message to the server")
        return
    say(f"{view.name} has the new key {view.key}")


@node.command()
@click.argument("name", shell_complete=complete_node)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def revoke(name: str, yes: bool) -> None:
    """End a node's access to the server.

    The server revokes the node's tokens and key, sends the node no more orders, and accepts no more reports of its
    runs. The node's runs end when their partition grace has passed. To let the machine join again, create a join file:
    `sgpu node invite NAME`.
    """
    with server() as connection:
        before = _fetch_node(connection, name)
        if not yes:
            count = "1 run" if len(before.runs) == 1 else f"{len(before.runs)} runs"
            click.confirm(f"Revoke the node {before.name}, and lose its {count}?", abort=True, err=True)
        view = connection.ask("POST", f"/nodes/{quote(before.id, safe='')}/revoke", answer=NodeView)
    say(f"{view.name} {view.sentence}")


@node.command()
@click.argument("name", required=False, default="")
@click.option(
    "--uses",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of machines that may join with the join file.",
)
@click.option(
    "--for", "lifetime", metavar="DURATION", default="1d", show_default=True, help="Lifetime of the join file."
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("join.json"),
    show_default=True,
    help="Path of the new join file, which only you can read.",
)
def invite(name: str, uses: int, lifetime: str, out: Path) -> None:
    """Write a join file for new nodes.

    By default, the join file admits one machine within one day. The option --uses changes the number of machines. The
    option --for changes the lifetime of the join file. With NAME, the join file admits only a machine with that name.
    Copy the join file to each new machine. On the new machine, run: sgpu join HOST --token-file FILE.
    """
    body = InviteRequest(name=name, uses=uses, expires_s=duration_s("--for", lifetime))
    join_file = load("serverless_gpu.engines.ray.pool_join")
    with server() as connection:
        made = connection.ask("POST", "/nodes/invite", body, answer=InviteAnswer)
    url, ca = join_address(this_home().root)
    try:
        join_file.write_join_file(out, join_file.JoinFile(server=url, token=made.token, ca=ca))
    except OSError as error:
        hint = f"run `sgpu token revoke {made.id}`, then choose another --out"
        raise ServerProblem(f"{out} cannot be written: {error.strerror}", hint=hint) from None
    machines = "1 machine" if uses == 1 else f"{uses} machines"
    say(f"{out} admits {machines} until {format_moment(made.expires_ns)}. Protect the join file like a password")
    say(f"sgpu: to revoke the join file, run: sgpu token revoke {made.id}", err=True)


def join_address(home: Path) -> tuple[str, str]:
    """Return the server's address and certificates from the join file or the client profile."""
    own = home / "server" / "join.json"
    with contextlib.suppress(InvalidValue):
        file = load("serverless_gpu.engines.ray.pool_join").read_join_file(own)
        return file.server, file.ca
    profile = find_profile(home, os.environ)
    return profile.url, Path(profile.ca).read_text(encoding="ascii", errors="replace") if profile.ca else ""


def _seen_text(view: NodeView) -> str:
    return f"{format_duration_ms(max(0, SystemClock().wall_ns() - view.seen_ns) // 1_000_000)} ago"


def _remarks(view: NodeView) -> list[str]:
    excluded = [f"{one.uuid} is quarantined{f' ({one.note})' if one.note else ''}" for one in view.rules.quarantined]
    return list(filter(None, (view.sentence, *excluded, *view.findings, clock_text(view.clock))))


def rules_text(view: NodeView) -> str:
    """Return text about the network rules of a node with isolation."""
    return f"missing: {view.egress_problem}" if view.egress_problem else "enforced"


def find_node(found: Sequence[NodeView], name: str) -> NodeView:
    """Return the node with a given name or identifier."""
    for each in found:
        if name in (each.name, each.id):
            return each
    names = ", ".join(each.name for each in found) or "none has joined"
    raise InvalidValue(f"the server has no node {name!r}", hint=f"nodes: {names}")


@node.command()
@click.option("--account", default="serverless-gpu", show_default=True, metavar="NAME", help="Account of the agent.")
@click.option("--socket", "place", default=SOCKET, show_default=True, metavar="PATH", help="Path of the socket.")
@click.option("--open", "services", multiple=True, metavar="ADDRESS:PORT", help="Service that an allow-list may open.")
def spawner(account: str, place: str, services: Sequence[str]) -> None:
    """Hold the rights of root for a node.

    The command runs as root until it gets SIGTERM. The agent runs under the account and needs no rights. With
    SERVERLESS_GPU_SPAWNER=PATH in its environment, the agent asks the spawner to start isolated interpreters.

    The allow-list of a pool opens services of this machine only if --open names them.
    """
    process = load("serverless_gpu.node.spawner.process")
    if os.geteuid() != 0:
        raise InvalidValue("the spawner does not run as root", hint="start it as root, for example with systemd")
    owner, opened = process.find_account(account), process.opened_services(services)
    listener = process.listen(Path(place), owner)
    say(f"the spawner serves {owner.name} (uid {owner.uid}) at {place}")
    process.serve(listener, owner, os.environ, opened)


def key_text(view: NodeView) -> str:
    """Return the fingerprint of a node's key, with the time since which the server knows the key."""
    if not view.key:
        return "none: the node has an older version, or has not connected since the upgrade"
    since = f", enrolled {format_moment(view.enrolled_ns)}" if view.enrolled_ns is not None else ""
    return f"{view.key}{since}{', another key is requested' if view.rotating else ''}"


def owner_text(view: NodeView) -> str:
    """Return text that names the users whose runs a node accepts, and the end time of their access."""
    calendar = view.rules.calendar
    who = "all" if view.shared else calendar.owner or "none"
    until = f" until {format_soon(view.turns_ns)}" if view.turns_ns is not None else ""
    first = f", {calendar.owner} first" if view.shared and calendar.owner_first else ""
    return f"{who}{until}{first}"


@node.command()
@click.argument("name", shell_complete=complete_node)
@click.option(
    "--stop", is_flag=True, help="Also stop running runs. Runs with the option resume continue on another node."
)
@click.option("--note", default="", metavar="TEXT", help="Reason that waiting runs display.")
@click.option("--wait", "wait", metavar="DURATION", help="Maximum time to wait until the node's last run ends.")
def drain(name: str, stop: bool, note: str, wait: str | None) -> None:
    """Place no new runs on a node.

    The drain survives server restarts and lasts until `sgpu node resume`. Running runs continue. With --stop, the
    server also sends SIGTERM to running runs and grants their grace period.
    """
    limit_s = duration_s("--wait", wait) if wait is not None else 0.0
    with server(patience_s=limit_s) as connection:
        view = _put_rule(
            connection, _fetch_node(connection, name), "drain", NodeDrainRequest(on=True, stop=stop, note=note)
        )
        say(f"{view.name} gets no new runs. {_runs_text(view)}")
        if view.runs and view.rules.drain is not None and view.rules.drain.stop:
            say(
                "the server stops the node's runs. Runs with the option resume continue on another node. "
                "Other runs end as drained"
            )
        clock, said = SystemClock(), len(view.runs)
        deadline_ns = clock.boottime_ns() + round(limit_s * 1e9)
        while view.runs and clock.boottime_ns() < deadline_ns:
            time.sleep(_LOOK_S)
            view = _fetch_node(connection, view.id)
            if len(view.runs) != said:
                said = len(view.runs)
                say(_runs_text(view))
    if wait is not None and view.runs:
        raise ServerProblem(
            f"{view.name} still has runs after {wait}: {_runs_text(view)}", hint="list the runs with `sgpu runs`"
        )


@node.command()
@click.argument("name", shell_complete=complete_node)
def resume(name: str) -> None:
    """End a node's drain."""
    with server() as connection:
        view = _put_rule(connection, _fetch_node(connection, name), "drain", NodeDrainRequest(on=False))
    say(f"{view.name} is {view.state}{f': {view.sentence}' if view.sentence else ''}")


@node.command()
@click.argument("name", shell_complete=complete_node)
@click.option(
    "--shared",
    multiple=True,
    metavar="TIMES",
    help='Times when other users may use the node, such as "mon-fri 19:00-07:00". Repeatable.',
)
@click.option(
    "--zone",
    metavar="NAME",
    help='Time zone of --shared, for example "Europe/Berlin" (default: time zone of this machine).',
)
@click.option("--owner", metavar="NAME", help="User who may always use the node.")
@click.option(
    "--owner-first/--no-owner-first",
    default=None,
    help="Stop other users' runs at any time if the owner's runs need the node.",
)
@click.option(
    "--clear", is_flag=True, help="First remove the current owner and times, so that all users may use the node."
)
@json_option(NodeCalendar)
def calendar(name: str, clear: bool, as_json: bool, **said: object) -> None:
    """Show or set a node's owner and calendar.

    Without options, the command prints the node's owner and calendar. The server keeps the current value of each
    omitted option. Five minutes before the node's shared time ends, the server warns the runs of other users. At the
    end of the shared time, the server sends SIGTERM to other users' runs and grants their grace period. Stopped runs
    with the option `resume` continue on another node.
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


@node.command()
@click.argument("name", shell_complete=complete_node)
@click.argument("gpu")
@click.option("--note", default="", metavar="TEXT", help="Reason for the quarantine.")
def quarantine(name: str, gpu: str, note: str) -> None:
    """Exclude a GPU of a node from new runs.

    GPU is a device number or a UUID. The quarantine lasts until `sgpu node release`. The quarantine does not stop a run
    that already holds the GPU. The quarantine does not affect local runs, which the machine starts without the server.
    """
    _set_quarantine(name, gpu, on=True, note=note)


@node.command()
@click.argument("name", shell_complete=complete_node)
@click.argument("gpu")
def release(name: str, gpu: str) -> None:
    """End the quarantine of a GPU."""
    _set_quarantine(name, gpu, on=False, note="")


def calendar_lines(view: NodeView) -> list[str]:
    """Return a node's owner and sharing calendar as text."""
    asked = view.rules.calendar
    whose = f"{view.name} belongs to {asked.owner}" if asked.owner else f"{view.name} has no owner"
    if not asked.shared:
        lines = [f"{whose}. All users may use the node at any time"]
    else:
        times = ", ".join(asked.shared)
        lines = [f"{whose}. Other users may use the node {times} ({asked.zone or 'UTC'})"]
        now = "shared now" if view.shared else "not shared now"
        lines.append(now + (f", until {format_soon(view.turns_ns)}" if view.turns_ns is not None else ""))
    if asked.owner_first:
        lines.append(f"runs of {asked.owner} have priority, and the server stops other users' runs for these runs")
    return lines


def find_device(devices: Sequence[Device], asked: str, node: str) -> str:
    """Return the UUID of the device with a given index, UUID or unique UUID prefix."""
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
        has = f". {_runs_text(view)}. A run that holds the GPU keeps the GPU" if view.runs else ""
        say(f"{uuid} of {view.name} is in quarantine{has}")
        return
    kept = uuid in view.unavailable
    told = (
        "was not in quarantine"
        if uuid not in marked
        else "is no longer in quarantine"
        if kept
        else "is available to new runs again"
    )
    say(f"{uuid} of {view.name} {told}{f'. {view.name} does not offer the device now' if kept else ''}")


def _fetch_node(connection: Connection, name: str) -> NodeView:
    return find_node(connection.ask("GET", "/nodes", answer=NodeList).nodes, name)


def _put_rule(connection: Connection, view: NodeView, what: str, body: Request) -> NodeView:
    return connection.ask("PUT", f"/nodes/{quote(view.id, safe='')}/{what}", body, answer=NodeView)


def _runs_text(view: NodeView) -> str:
    count = len(view.runs)
    return (
        f"{count} {'run is' if count == 1 else 'runs are'} running on the node"
        if count
        else "no runs are running on the node"
    )
