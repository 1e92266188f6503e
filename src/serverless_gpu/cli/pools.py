"""`sgpu queue`, `sgpu pool`, `sgpu share`: manages the queue, pools and fair-share weights."""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import quote

import click
import msgspec

from serverless_gpu.ambient import SystemClock, format_soon
from serverless_gpu.cli.amounts import duration_s
from serverless_gpu.cli.command_group import LazyGroup
from serverless_gpu.cli.completion import complete_node, complete_pool
from serverless_gpu.cli.output import columns, json_option, print_json, print_table, say, say_lines, wide_option
from serverless_gpu.cli.server_connection import server
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.egress import EGRESS
from serverless_gpu.model.hardware import time_unit
from serverless_gpu.model.isolation import LEVELS, NONE, SANDBOX, USER
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

_AFTER_SHARING = """\
earlier runs of the pool could read the server's key, tokens and secrets. To end this access:
  1. Wait until earlier runs have ended: sgpu server drain --wait 2h
  2. Replace the key and the tokens: sgpu down, sgpu server rotate, sgpu up
  3. Create a token for each user: sgpu token create --for NAME
  4. Change each secret at its source, and set it again: sgpu secret set NAME
  5. Start new runs: sgpu server resume
The guide "Isolate the users of a server" describes each step."""
_KIND = click.Choice(["team", "user"])


@click.command()
@click.option(
    "--limit",
    type=click.IntRange(1, LIMIT_MAX),
    default=LIMIT_MAX,
    show_default=True,
    help="Maximum number of runs from the front of the queue.",
)
@click.option("--mine", is_flag=True, help="List only your own runs.")
@wide_option
@json_option(QueueView)
def queue(limit: int, mine: bool, wide: bool, as_json: bool) -> None:
    """List waiting runs in queue order.

    PLACE is a run's position among the visible runs that need the same device kind. A run without a PLACE has not
    entered the queue yet.
    """
    with server() as connection:
        query = {"limit": f"{limit}", "mine": f"{mine}".lower()}
        found = connection.ask("GET", "/queue", answer=QueueView, query=query)
    if as_json:
        print_json(found)
        return
    if not found.entries:
        say("none of your runs are waiting" if mine else "no runs are waiting")
        return
    now_ns = SystemClock().wall_ns()
    rows = [queue_row(each, now_ns) for each in found.entries]
    print_table(["PLACE", "RUN", "OWNER", "TEAM", "CLASS", "NEEDS", "WAITS", "RESERVED", "WHY"], rows, wide=wide)
    if not mine and found.waiting > len(found.entries):
        say(f"{found.waiting - len(found.entries)} more")


@click.group()
def pool() -> None:
    """List, set and delete pools."""


@pool.command("list")
@wide_option
@json_option(tuple[PoolView, ...])
def list_pools(wide: bool, as_json: bool) -> None:
    """List pools, free devices and queues."""
    with server() as connection:
        found = connection.ask("GET", "/pools", answer=PoolList).pools
    if as_json:
        print_json(found)
        return
    rows = []
    for each in found:
        free = ", ".join(f"{each.free.get(name, 0)} of {total} {name}" for name, total in each.total.items()) or "-"
        nodes = " ".join(each.nodes) or "-"
        rows.append([each.name, _kind(each), each.isolation, each.egress, free, f"{each.queued} waiting", nodes])
    print_table(["POOL", "KIND", "ISOLATION", "EGRESS", "FREE", "QUEUE", "NODES"], rows, wide=wide)


@pool.command("show")
@click.argument("name", default="default", shell_complete=complete_pool)
@json_option(PoolView)
def show_pool(name: str, as_json: bool) -> None:
    """Show one pool with its policies."""
    with server() as connection:
        found = connection.ask("GET", "/pools", answer=PoolList).pools
    view = next((each for each in found if each.name == name), None)
    if view is None:
        raise InvalidValue(f"there is no pool {name!r}", hint="list the pools: sgpu pool list")
    if as_json:
        print_json(view)
        return
    rows = [
        ["pool", view.name],
        ["kind", _kind(view)],
        ["isolation", view.isolation],
        ["egress", view.egress],
        *(["allow", text] for text in view.allow),
        *(["devices", f"{view.free.get(kind, 0)} of {total} {kind} free"] for kind, total in view.total.items()),
        ["queue", f"{view.queued} waiting"],
        *(["node", node] for node in view.nodes),
    ]
    for line in columns(rows):
        say(line)


@pool.command("set")
@click.argument("name", default="default", shell_complete=complete_pool)
@click.option(
    "--reserved/--on-demand",
    "reserved",
    default=None,
    help="Accept only runs that request the pool by name, or all runs.",
)
@click.option(
    "--lend/--no-lend",
    "lends",
    default=None,
    help="Lend idle devices of a reserved pool to BEST_EFFORT runs that can return the devices in time.",
)
@click.option(
    "--return",
    "returned",
    metavar="DURATION",
    help="Maximum time until lent devices return to the pool's own runs (default: 5m).",
)
@click.option(
    "--node",
    "members",
    multiple=True,
    metavar="NAME",
    help="Move this node into the pool. Repeatable.",
    shell_complete=complete_node,
)
@click.option(
    "--isolation",
    type=click.Choice([*LEVELS, "unset"]),
    help="Run every principal in a sandbox, accept that all share one operating-system user (none), or serve only the "
    "first administrator (unset).",
)
@click.option(
    "--egress",
    type=click.Choice(EGRESS),
    help="Network access of isolated runs: each address except control endpoints (open), the own gang and allowed "
    "destinations (pool), or the own gang only (none).",
)
@click.option(
    "--allow",
    "allowed",
    multiple=True,
    metavar="HOST[:PORT]",
    help="Allow isolated runs to reach a name, an address or a network. Repeatable. Replaces the pool's earlier list.",
)
@click.option("--allow-nothing", is_flag=True, help="Remove all destinations from the pool's list.")
def set_pool(
    name: str,
    reserved: bool | None,
    lends: bool | None,
    returned: str | None,
    members: tuple[str, ...],
    isolation: str | None,
    **network: Any,
) -> None:
    """Create or change a pool.

    Without NAME, the command changes the pool `default`. Omitted options keep their value. A new pool is on-demand.
    Every run that names no pool may use an on-demand pool. The nodes of a new pool run only code of the server's first
    administrator. Runs of other principals wait with the reason `isolation`. With --isolation sandbox, each principal
    has a separate operating-system user. Each attempt in a sandbox has private files, processes and devices. The nodes
    of a sandbox pool must run as root. With --isolation none, you accept that runs of several principals share one
    operating-system user. --egress restricts the network of runs in a pool with isolation. Its nodes need nftables.
    """
    allowed: tuple[str, ...] = network["allowed"]
    if allowed and network["allow_nothing"]:
        raise click.UsageError("use either --allow or --allow-nothing")
    asked = PoolRequest(
        kind=None if reserved is None else "reserved" if reserved else "on-demand",
        lends=lends,
        return_s=None if returned is None else duration_s("--return", returned),
        nodes=members,
        isolation=isolation,
        egress=network["egress"],
        allow=allowed if allowed or network["allow_nothing"] else None,
    )
    with server() as connection:
        before = connection.ask("GET", "/pools", answer=PoolList).pools if isolation is not None else ()
        view = connection.ask("PUT", f"/pools/{_part(name)}", asked, answer=PoolView)
    say(f"{view.name} ({_kind(view)}): {', '.join(view.nodes) or 'no nodes'}")
    was_shared = any(pool.name == view.name and pool.isolation == NONE for pool in before)
    if isolation == "none":
        say(
            f"sgpu: warning: in pool {view.name} every run's code can now read secrets and results of other "
            f"users. To restore isolation, run `{REVOKE.format(pool=view.name)}`",
            err=True,
        )
    elif isolation == USER:
        say("new runs of every principal now start with a uid of the principal. Running runs continue unchanged")
    elif isolation == SANDBOX:
        say("new runs of every principal now start in a sandbox. Running runs continue without a sandbox")
    elif isolation == "unset":
        say("new runs of principals other than the first administrator now wait. Running runs continue")
    if asked.egress is not None or asked.allow is not None:
        say(f"egress {view.egress}, allowed: {', '.join(view.allow) or 'nothing more'}. Running runs follow in seconds")
    if was_shared and isolation not in (NONE, "unset"):
        say_lines(f"sgpu: warning: {_AFTER_SHARING}", err=True)


@pool.command("delete")
@click.argument("name", shell_complete=complete_pool)
def delete_pool(name: str) -> None:
    """Delete a pool.

    A pool with nodes, waiting runs or running runs cannot be deleted. A pool that a price, budget or policy names
    cannot be deleted. You cannot delete the pool `default`.
    """
    with server() as connection:
        gone = connection.ask("DELETE", f"/pools/{_part(name)}", answer=PoolView)
    say(f"pool {gone.name} is deleted")


@click.group(cls=LazyGroup, renamed={"remove": "share delete"})
def share() -> None:
    """List, set and delete fair-share weights.

    A weight sets a team's or user's share of devices while several teams or users wait.
    """


@share.command("list")
@wide_option
@json_option(ShareList)
def list_shares(wide: bool, as_json: bool) -> None:
    """List weights and usage of teams and users.

    USED is the device time of a team's or user's runs. COUNTED is USED plus one minute for each device of running runs.
    The server orders the queue by COUNTED. USED and COUNTED decay over time. The table lists a team member only if an
    operator set the member's weight within the team.
    """
    with server() as connection:
        found = connection.ask("GET", "/shares", answer=ShareList)
    if as_json:
        print_json(found)
        return
    if not found.shares:
        say("all shares are equal, because no weight is set and no usage is recorded")
        return
    rows = [["KIND", "NAME", "WEIGHT", "DUE", "USED", "OF ALL USE", "COUNTED"]]
    for each in found.shares:
        used = [_gpu_time(each.used_gpu_s), _percent(each.part), _gpu_time(each.counted_gpu_s)]
        rows.append([each.kind, each.name, f"{each.weight:g}", _percent(each.due), *used])
    print_table(rows[0], rows[1:], wide=wide)
    say(f"half-life of past usage: {format_days_ms(round(found.half_life_s * 1000))}")


# Without `ignore_unknown_options`, click would report a negative weight as an unknown option.
@share.command("set", context_settings={"ignore_unknown_options": True})
@click.argument("kind", type=_KIND)
@click.argument("name")
@click.argument("weight", type=float)
def set_share(kind: str, name: str, weight: float) -> None:
    """Set the weight of a team or a user.

    A team's weight is relative to the weights of all teams. A user's weight is relative to the weights of the user's
    team. The default weight is 1.
    """
    if not math.isfinite(weight):  # JSON has no representation of infinity and NaN.
        raise InvalidValue(f"a share cannot be {weight}", hint="a number above 0")
    with server() as connection:
        view = connection.ask("PUT", _share(kind, name), ShareRequest(weight=weight), answer=ShareView)
    say(f"{view.kind} {view.name} has weight {view.weight:g}")


@share.command("delete")
@click.argument("kind", type=_KIND)
@click.argument("name")
def delete_share(kind: str, name: str) -> None:
    """Reset a weight to 1."""
    with server() as connection:
        view = connection.ask("DELETE", _share(kind, name), answer=ShareView)
    say(f"{view.kind} {view.name} has weight {view.weight:g} again")


def queue_row(entry: QueueEntry, now_ns: int) -> list[str]:
    """Return a queue entry as a table row. For an invisible run, show only the owner and the demand."""
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
