"""`sgpu runs`: the runs of this home and of its server.

This module and its imports load at each listing of runs: `test_lazy_commands.py` lists the modules that it may load.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import click

from serverless_gpu.cli.output import columns, print_json, say
from serverless_gpu.cli.runs import local_runs as own
from serverless_gpu.cli.runs.run_location import own_runs, queued_runs, server_costs, this_home
from serverless_gpu.errors import ServerProblem
from serverless_gpu.lazy_import import load
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.node.attempt.history import NOT_STARTED, UNREADABLE, read_run

if TYPE_CHECKING:
    from types import ModuleType

    from serverless_gpu.model.cost import Cost
    from serverless_gpu.wire.runs import RunView

_HEAD = ["RUN", "NAME", "STATE", "STARTED", "TOOK", "DEVICES", "WHERE", "USED"]
_STATES = [*(state.value for state in State), NOT_STARTED, UNREADABLE]


@click.command()
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="List at most this many.")
@click.option("--state", type=click.Choice(_STATES, case_sensitive=False), help="List only runs in this state.")
@click.option("--size", is_flag=True, help="Also show how much room each takes on disk.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per run.")
def runs(limit: int, state: str | None, size: bool, as_json: bool) -> None:
    """List runs, newest first: those of this home, and those of the server if there is one.

    With a server that cannot be asked, the list is of this home alone, and the exit code is 75.
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
            away = type(error)(f"{error.message}; only runs of this machine are listed", hint=error.hint)
    if as_json:
        found = [own.as_json(home, record, size=size) for record in mine]
        found += [_remote().as_json(view, costs.get(view.id)) for view in views]
        print_json(sorted(found, key=lambda run: str(run["id"]), reverse=True)[:limit])
    elif mine or views:
        rows = [own.row(record, home, size=size) for record in mine]
        rows += [[*_remote().row(view), *(["-"] if size else []), own.used_text(costs.get(view.id))] for view in views]
        head = [*_HEAD[:-1], "SIZE", _HEAD[-1]] if size else _HEAD
        for line in columns([head, *sorted(rows, reverse=True)[:limit]]):
            say(line)
    else:
        say(f"no runs in {home.runs}" + (f" are {state}" if state else ""))
    if away is not None:
        raise away


def _remote() -> ModuleType:
    return load("serverless_gpu.cli.runs.server_runs")
