"""`sgpu queue`, `sgpu pools`, `sgpu pool`, `sgpu share`: the queue, pools and shares."""

from __future__ import annotations

import math
from urllib.parse import quote

import click
import msgspec

from serverless_gpu.ambient import SystemClock, format_soon
from serverless_gpu.cli.amounts import duration_s
from serverless_gpu.cli.output import columns, print_json, say
from serverless_gpu.cli.server_connection import server
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.hardware import time_unit
from serverless_gpu.model.scheduling import wait_messages
from serverless_gpu.model.scheduling.wait_messages import REVOKE
from serverless_gpu.units import format_days_ms, format_duration_ms, format_gpu_ms
from serverless_gpu.wire.nodes import PoolList, PoolRequest, PoolView
from serverless_gpu.wire.queue import (
    LIMIT_MAX,
    QueueEntry,
    QueueView,
    ShareList,
    ShareRequest,
    ShareView,
    wait_of,
)

_KIND = click.Choice(["team", "user"])


@click.command()
@click.option(
    "--limit", type=click.IntRange(1, LIMIT_MAX), default=LIMIT_MAX, show_default=True, help="Those that are next."
)
@click.option("--mine", is_flag=True, help="Only your own runs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def queue(limit: int, mine: bool, as_json: bool) -> None:
    """List runs that wait, in the order in which they are looked at: what for, for whom, until when.

    PLACE is that among those that want the same kind of devices, of runs that you may see; a run without one is not in
    line.
    """
    with server() as connection:
        query = {"limit": f"{limit}", "mine": f"{mine}".lower()}
        found = connection.ask("GET", "/queue", answer=QueueView, query=query)
    if as_json:
        print_json(found)
        return
    if not found.entries:
        say("none of your runs waits" if mine else "nothing waits")
        return
    now_ns = SystemClock().wall_ns()
    rows = [queue_row(each, now_ns) for each in found.entries]
    for line in columns([["PLACE", "RUN", "OWNER", "TEAM", "CLASS", "NEEDS", "WAITS", "RESERVED", "WHY"], *rows]):
        say(line)
    if not mine and found.waiting > len(found.entries):
        say(f"{found.waiting - len(found.entries)} more")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def pools(as_json: bool) -> None:
    """List pools: their machines, what is free, and how many runs wait."""
    _say_pools(as_json=as_json)


@click.group()
def pool() -> None:
    """List, make and change pools."""


@pool.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_pools(as_json: bool) -> None:
    """List pools, as `sgpu pools` does."""
    _say_pools(as_json=as_json)


@pool.command("set")
@click.argument("name", default="default")
@click.option(
    "--reserved/--on-demand", "reserved", default=None, help="Whether only runs that name it, with pool=, may use it."
)
@click.option(
    "--lend/--no-lend",
    "lends",
    default=None,
    help="Whether idle devices of a reserved pool are lent to runs of BEST_EFFORT that can give them back.",
)
@click.option("--return", "returned", metavar="DURATION", help="Within which the pool's own runs have them back; 5m.")
@click.option("--node", "members", multiple=True, metavar="NAME", help="A machine that is moved into it. Repeatable.")
@click.option(
    "--isolation",
    type=click.Choice(["none", "unset"]),
    help="none: accept that runs of several principals share one operating-system user. unset: take that back.",
)
def set_pool(
    name: str,
    reserved: bool | None,
    lends: bool | None,
    returned: str | None,
    members: tuple[str, ...],
    isolation: str | None,
) -> None:
    """Make a pool, or change one; what is not said stays as it is. Without NAME it is the pool `default`.

    A new pool is on-demand: every run that names no pool may use it. Its nodes run the code of the server's first
    administrator only; runs of other principals wait with the reason `isolation` until --isolation none accepts that
    all of them share one operating-system user.
    """
    asked = PoolRequest(
        kind=None if reserved is None else "reserved" if reserved else "on-demand",
        lends=lends,
        return_s=None if returned is None else duration_s("--return", returned),
        nodes=members,
        isolation=isolation,
    )
    with server() as connection:
        view = connection.ask("PUT", f"/pools/{_part(name)}", asked, answer=PoolView)
    say(f"{view.name} ({_kind(view)}): {', '.join(view.nodes) or 'no nodes'}")
    if isolation == "none":
        say(
            f"warning: in pool {view.name} the code of every run can now read secrets and results of other users; "
            f"`{REVOKE.format(pool=view.name)}` takes that back",
            err=True,
        )
    elif isolation == "unset":
        say("runs of other principals than the first administrator wait now; those that run go on")


@click.group()
def share() -> None:
    """List and set who gets how much while others want devices, too."""


@share.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_shares(as_json: bool) -> None:
    """List teams, and users without one: their weight, what is theirs by it, and what they have used.

    USED is what their runs had of the devices. COUNTED decides whose turn it is: USED, and a minute in advance for the
    devices of each run that goes on. Both count less as they get older, so that everybody gets their share over time.
    A user in a team is there where their weight among its users was set.
    """
    with server() as connection:
        found = connection.ask("GET", "/shares", answer=ShareList)
    if as_json:
        print_json(found)
        return
    if not found.shares:
        say("nobody has a share that was set, and nobody has used anything: all are equal")
        return
    rows = [["KIND", "NAME", "WEIGHT", "DUE", "USED", "OF ALL USE", "COUNTED"]]
    for each in found.shares:
        used = [_gpu_time(each.used_gpu_s), _percent(each.part), _gpu_time(each.counted_gpu_s)]
        rows.append([each.kind, each.name, f"{each.weight:g}", _percent(each.due), *used])
    for line in columns(rows):
        say(line)
    say(f"use counts half after {format_days_ms(round(found.half_life_s * 1000))}")


# A weight that is below zero is an argument, and told what a weight is, instead of an option that there is not.
@share.command("set", context_settings={"ignore_unknown_options": True})
@click.argument("kind", type=_KIND)
@click.argument("name")
@click.argument("weight", type=float)
def set_share(kind: str, name: str, weight: float) -> None:
    """Set the weight of a team among all, or of a user among those of their team; who was not named has 1."""
    if not math.isfinite(weight):  # JSON has no such number
        raise InvalidValue(f"a share cannot be {weight}", hint="a number above 0")
    with server() as connection:
        view = connection.ask("PUT", _share(kind, name), ShareRequest(weight=weight), answer=ShareView)
    say(f"{view.kind} {view.name} has {view.weight:g}")


@share.command("remove")
@click.argument("kind", type=_KIND)
@click.argument("name")
def remove_share(kind: str, name: str) -> None:
    """Take a weight away: it is 1 again."""
    with server() as connection:
        view = connection.ask("DELETE", _share(kind, name), answer=ShareView)
    say(f"{view.kind} {view.name} has {view.weight:g} again")


def _say_pools(*, as_json: bool) -> None:
    with server() as connection:
        found = connection.ask("GET", "/pools", answer=PoolList).pools
    if as_json:
        print_json(found)
        return
    rows = [["POOL", "KIND", "ISOLATION", "FREE", "QUEUE", "NODES"]]
    for each in found:
        free = ", ".join(f"{each.free.get(name, 0)} of {total} {name}" for name, total in each.total.items()) or "-"
        nodes = " ".join(each.nodes) or "-"
        rows.append([each.name, _kind(each), each.isolation, free, f"{each.queued} waiting", nodes])
    for line in columns(rows):
        say(line)


def queue_row(entry: QueueEntry, now_ns: int) -> list[str]:
    """Return a run as a row; of an invisible run only its owner and demand."""
    name = f"{entry.run} {entry.name}".rstrip() or "-"
    needs = f"{entry.gpus or 'every'} {entry.gpu_type or 'GPU'}" + (f" of {entry.pool}" if entry.pool else "")
    waits = format_duration_ms(max(0, now_ns - entry.since_ns) // 1_000_000)
    row = [f"{entry.place or '-'}", name, entry.owner, entry.team or "-", entry.priority.value, needs, waits]
    reserved = "-"
    if entry.reserved_ns is not None:
        latest = wait_messages.latest(entry.reserved_ns, format_soon)
        reserved = f"by {latest}" if entry.is_bound else f"about {format_soon(entry.reserved_ns)}"
    why = entry.sentence
    if entry.waiting is not None and (wait := wait_of(entry.waiting, entry.run)) is not None:
        why = wait_messages.sentence(msgspec.structs.replace(wait, place=0), format_soon)
    return [*row, reserved, why]


def _kind(view: PoolView) -> str:
    if not view.lends:
        return view.kind
    return f"{view.kind}, lends for {format_duration_ms(round(view.return_s * 1000))}"


def _share(kind: str, name: str) -> str:
    return f"/shares/{kind}/{_part(name)}"


def _part(name: str) -> str:
    return quote(name, safe="")


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"


def _gpu_time(gpu_s: float | None) -> str:
    return "-" if gpu_s is None else format_gpu_ms(round(gpu_s * 1000), unit=time_unit())
