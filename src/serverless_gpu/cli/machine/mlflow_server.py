"""`sgpu mlflow`: the MLflow server of this home's runs, and its part of `sgpu status` and `sgpu stop`."""

from __future__ import annotations

import importlib.util
import os
import select
import sys
from collections.abc import Iterator

import click

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli.output import print_json, say
from serverless_gpu.cli.runs.run_location import durable_home
from serverless_gpu.errors import ServerProblem
from serverless_gpu.node.attempt.history import is_live, run_ids
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.mlflow_server.server import (
    MlflowServer,
    ensure_server,
    look,
    place_of,
    servers,
    stop_server,
    stop_servers,
    without_password,
)
from serverless_gpu.units import format_bytes, format_duration_ms

_START_S = 300.0
_LOOK_S = 0.1
_RUNS_LOOKED_AT = 200


@click.command()
@click.argument("store", required=False, default="")
@click.option("--stop", "is_end", is_flag=True, help="End the server, or all of them without STORE.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def mlflow(store: str, is_end: bool, as_json: bool) -> None:
    """Print the address of the MLflow server in front of this home's runs; start it if it is not running.

    STORE is one of your own (sqlite:////path/mlflow.db, or a directory): it gets a server in front of it, too.
    """
    home = durable_home("the MLflow server keeps its runs there")
    if store and ":" not in store:
        store = os.path.abspath(store)
    if is_end:
        count = int(stop_server(place_of(home, store))) if store else stop_servers(home)
        say("stopped" if count else "no MLflow server is running")
        return
    elsewhere = os.environ.get("MLFLOW_TRACKING_URI", "")
    if elsewhere and not store:
        shown = without_password(elsewhere)
        say(f"sgpu: MLFLOW_TRACKING_URI is set: runs of this shell are tracked at {shown}", err=True)
    _start(home, store)
    found = look(place_of(home, store), SystemClock())
    if as_json:
        print_json(as_builtins(found))
    else:
        say(found.uri)


def mlflow_servers(home: Home) -> list[MlflowServer]:
    """Return the MLflow servers that this home has or had."""
    return [server for server in servers(home) if server.stage != "none"]


def mlflow_lines(found: list[MlflowServer]) -> Iterator[str]:
    """Yield the status lines of MLflow servers."""
    for each in found:
        parts = [each.uri, each.store and without_password(each.store)]
        if each.problem:
            parts += [f"{each.stage}: {each.problem}"]
        elif each.pid is None:
            parts += ["not running; the next run that is tracked starts it, or `sgpu mlflow`"]
        else:
            parts += [each.stage, f"MLflow {each.version}" if each.version else "", f"pid {each.pid}"]
            parts += [format_bytes(each.memory_bytes), f"used {format_duration_ms(round(each.used_s * 1000))} ago"]
        yield f"mlflow: {' · '.join(part for part in parts if part)}"


def as_builtins(server: MlflowServer) -> dict[str, object]:
    """Return a server for machines."""
    return {
        "uri": server.uri,
        "ready": server.stage == "ready",
        "stage": server.stage,
        "problem": server.problem,
        "store": without_password(server.store),
        "pid": server.pid,
        "version": server.version,
        "python": server.python,
        "memory_bytes": server.memory_bytes,
        "used_s": round(server.used_s, 1),
        "directory": str(server.place.directory),
    }


def stop_mlflow(home: Home) -> str:
    """End a home's MLflow servers unless running attempts may log to them; return a summary."""
    running = [server for server in servers(home) if server.pid is not None]
    if not running:
        return ""
    if any(is_live(path) for each in run_ids(home.runs)[:_RUNS_LOOKED_AT] for path in (home.runs / each).glob("*")):
        return "MLflow's server stays: runs go on that may log to it; `sgpu mlflow --stop` ends it"
    stop_servers(home)
    return "MLflow's server has stopped"


def _start(home: Home, store: str) -> None:
    """Start a server unless one answers, and announce a slow start."""
    clock = SystemClock()
    python = _python(home, store)
    deadline_ns = clock.boottime_ns() + int(_START_S * 1e9)
    serving = ensure_server(home, python, store, environ=os.environ, now=True)
    if not serving.ready and (serving.is_restarting or not serving.problem):
        say("sgpu: MLflow's server starts, which takes it some seconds", err=True)
    while not serving.ready:
        if serving.problem and not serving.is_restarting:
            raise ServerProblem(serving.problem, hint=f"what it wrote: {place_of(home, store).log}")
        if clock.boottime_ns() > deadline_ns:
            raise ServerProblem(f"MLflow's server did not answer within {_START_S:.0f} s")
        select.select([], [], [], _LOOK_S)
        serving = ensure_server(home, python, store, environ=os.environ)


def _python(home: Home, store: str) -> str:
    """Return an interpreter that has MLflow: this one, or the one that served last."""
    if importlib.util.find_spec("mlflow") is not None:
        return sys.executable
    before = look(place_of(home, store), SystemClock())
    if before.pid is not None or os.path.exists(before.served_by):
        return before.served_by or before.python
    raise ServerProblem(
        f"{sys.executable} has no MLflow, and no run of this home has been tracked with one",
        hint="pip install 'serverless-gpu[mlflow]', or run `sgpu` of the environment that has it",
    )
