"""`sgpu runs`: lists local runs and server runs. `run_rows.py` builds the table rows of server runs.

Listing runs loads this module and all of its imports. `test_lazy_commands.py` restricts the modules that `sgpu runs`
may load.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import click

from serverless_gpu.ambient import SystemClock, format_moment, format_utc
from serverless_gpu.cli.output import JsonType, json_option, print_json, print_table, say, wide_option
from serverless_gpu.cli.runs.run_location import own_runs, queued_runs, server_costs, this_home
from serverless_gpu.errors import ServerProblem
from serverless_gpu.lazy_import import load
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.node.attempt.history import FUNCTION, NOT_STARTED, UNREADABLE, RunRecord, read_run, size_on_disk
from serverless_gpu.node.base.home import Home
from serverless_gpu.units import format_bytes, format_duration_ms

if TYPE_CHECKING:
    from types import ModuleType

    from serverless_gpu.model.cost import Cost
    from serverless_gpu.wire.runs import RunView

_HEAD = ["RUN", "NAME", "STATE", "STARTED", "TOOK", "DEVICES", "WHERE", "USED"]
_STATES = [*(state.value for state in State), NOT_STARTED, UNREADABLE]
_NAME_CHARACTERS_MAX = 32


@click.command()
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Maximum number of runs to list."
)
@click.option("--state", type=click.Choice(_STATES, case_sensitive=False), help="List only runs in this state.")
@click.option("--size", is_flag=True, help="Also show the disk usage of each run.")
@wide_option
@json_option(JsonType("cli.json_types:ListedRun", is_list=True))
def runs(limit: int, state: str | None, size: bool, wide: bool, as_json: bool) -> None:
    """List runs, newest first.

    The command lists local runs and server runs. If the server does not answer, the command lists only local runs and
    exits with 75.
    """
    home = this_home()
    queued = queued_runs(home)
    records = (read_run(home.runs, run_id, queued) for run_id in own_runs(home))
    mine = list(islice((record for record in records if state in (None, record.state)), limit))
    asked = "" if state in (NOT_STARTED, UNREADABLE) else state or ""
    views: tuple[RunView, ...] = ()
    costs: dict[str, Cost] = {}
    away: ServerProblem | None = None
    if asked or state is None:
        try:
            views, costs = server_costs(home, limit=limit, state=asked)
        except ServerProblem as error:
            away = type(error)(f"{error.message}, so the list contains only local runs", hint=error.hint)
    if as_json:
        found = [run_json(home, record, size=size) for record in mine]
        found += [_remote().as_json(view, costs.get(view.id)) for view in views]
        print_json(sorted(found, key=lambda run: str(run["id"]), reverse=True)[:limit])
    elif mine or views:
        rows = [row(record, home, size=size) for record in mine]
        rows += [[*_remote().row(view), *(["-"] if size else []), used_text(costs.get(view.id))] for view in views]
        head = [*_HEAD[:-1], "SIZE", _HEAD[-1]] if size else _HEAD
        print_table(head, sorted(rows, reverse=True)[:limit], wide=wide)
    else:
        say(f"no runs in {home.runs}" + (f" are {state}" if state else ""))
    if away is not None:
        raise away


def _remote() -> ModuleType:
    return load("serverless_gpu.cli.runs.run_rows")


def row(record: RunRecord, home: Home, *, size: bool = False) -> list[str]:
    """Return a table row: run, name, state, start time, duration, devices, location, size and usage."""
    name = name_of(record) or "-"
    if len(name) > _NAME_CHARACTERS_MAX:
        name = name[: _NAME_CHARACTERS_MAX - 1] + "…"
    devices = f"{record.world_size} rank{'' if record.world_size == 1 else 's'}" if record.world_size else "-"
    if record.receipt is not None:
        devices = record.receipt.devices_text()
    return [
        record.run_id,
        name,
        record.state,
        format_moment(record.began_ns or record.created_ns),
        took_text(record),
        devices,
        "here",
        *([format_bytes(size_on_disk(home.runs / record.run_id))] if size else []),
        record.receipt.used_text() if record.receipt is not None else used_text(cost_so_far(home, record)),
    ]


def run_json(home: Home, record: RunRecord, *, size: bool) -> dict[str, object]:
    """Return a local run as JSON values with the same keys as a server run."""
    receipt, cost = record.receipt, cost_so_far(home, record) if record.receipt is None else None
    cells: dict[str, object] = {
        "id": record.run_id,
        "kind": record.kind,
        "name": record.spec.name if record.spec is not None else "",
        "state": record.state,
        "reason": record.stopped.reason.value if record.stopped is not None else None,
        "live": record.live,
        "created": format_utc(record.created_ns),
        "started": format_utc(record.began_ns) if record.began_ns is not None else None,
        "ended": format_utc(record.ended_ns) if record.ended_ns is not None else None,
        "took_ms": took_ms(record),
        "ranks": record.world_size,
        "gpu_type": receipt.gpu_type if receipt is not None else None,
        "devices": list(receipt.gpus) if receipt is not None else None,
        **{name: getattr(receipt or cost, name, None) for name in ("gpu_ms", "micros", "currency")},
        "directory": str(record.directory),
        "problem": record.problem,
    }
    return cells | ({"size_bytes": size_on_disk(home.runs / record.run_id)} if size else {})


def name_of(record: RunRecord) -> str:
    """Return the name of a run's function, or the run's kind for a session."""
    if record.kind != FUNCTION:
        return f"({record.kind})"
    return record.spec.name if record.spec is not None else ""


def took_ms(record: RunRecord) -> int | None:
    """Return the run time of user code in milliseconds, or None if the run time is unknown."""
    if record.receipt is not None and record.receipt.segments.run_ms is not None:
        return record.receipt.segments.run_ms
    if record.began_ns is None:
        return None
    return max(0, (record.ended_ns or SystemClock().wall_ns()) - record.began_ns) // 1_000_000


def took_text(record: RunRecord) -> str:
    """Return the run time of user code as text."""
    elapsed_ms = took_ms(record)
    return "-" if elapsed_ms is None else format_duration_ms(elapsed_ms)


def cost_so_far(home: Home, record: RunRecord) -> Cost | None:
    """Return the current cost of a running run. Return None for an ended or queued run."""
    if not record.live:
        return None
    found: Cost | None = load("serverless_gpu.client.runs.local_costs").cost_here(
        home.runs / record.run_id, SystemClock()
    )
    return found


def used_text(cost: Cost | None) -> str:
    """Return a run's usage as a table cell."""
    return "-" if cost is None or not cost.gpu_ms else cost.used_text()
