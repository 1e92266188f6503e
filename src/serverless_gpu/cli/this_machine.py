"""`sgpu status`, `gpus`, `stop` and `mlflow`: control the agent and MLflow servers of this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli import server_connection
from serverless_gpu.cli.output import JsonType, json_option, print_json, print_table, say, say_lines, wide_option
from serverless_gpu.cli.runs.run_location import durable_home
from serverless_gpu.cli.runs.run_rows import sentence_of
from serverless_gpu.client.agent import agent_status, stop_agent
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.engines.ray.ray_keeper import stop_ray
from serverless_gpu.errors import NotAllowed, ServerlessGpuError, ServerNotConfigured, ServerProblem
from serverless_gpu.lazy_import import load
from serverless_gpu.model.hardware import DeviceKind, parse_fake
from serverless_gpu.model.lifecycle.attempt import TERMINAL, State
from serverless_gpu.node.agent.connection import connect
from serverless_gpu.node.attempt.history import is_live, run_ids
from serverless_gpu.node.base.home import Home, find_home
from serverless_gpu.node.base.protocol import AttemptStatus, Status
from serverless_gpu.node.devices.locks import DeviceLocks, lock_directory
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
from serverless_gpu.node.supervisor.gpu_faults import suspects
from serverless_gpu.units import format_bytes, format_duration_ms

_SHORT = 12
_RUNS_MAX = 500
_WAITS_MAX = 3


@click.command()
@json_option(JsonType("cli.json_types:MachineStatus"))
def status(as_json: bool) -> None:
    """Show the agent, MLflow and the server."""
    home = find_home(os.environ)
    found, served, tracking = agent_status(home.root), server_status(home.root), mlflow_servers(home)
    if as_json:
        print_json({"agent": found, "server": served, "mlflow": [as_builtins(each) for each in tracking]})
        return
    _say_agent(found)
    for line in mlflow_lines(tracking):
        say(line)
    if served is not None:
        for line in served.lines():
            say(line)


def _say_agent(found: Status | None) -> None:
    if found is None:
        say("no agent is running. The next run starts the agent")
        return
    say(f"agent: pid {found.pid}")
    say(f"cgroups: {found.cgroups or f'none: {found.cgroups_problem}'}")
    for zygote in found.zygotes:
        process = "none" if zygote.pid is None else f"pid {zygote.pid}"
        state = zygote.state + (f": {zygote.reason}" if zygote.reason else "")
        memory = format_bytes(zygote.memory_bytes) if zygote.memory_bytes else ""
        known = (process, zygote.python, zygote.owner, _snapshot_text(zygote.environment), state, memory)
        say(f"zygote: {' · '.join(filter(None, known))}")
    if not found.zygotes:
        say("zygote: none")
    for environment in found.environments:
        parts = (environment.snapshot[:_SHORT], environment.state, environment.mode, environment.sentence)
        say(f"environment: {' · '.join(filter(None, parts))}")
    for line in [_attempt_text(attempt) for attempt in found.attempts] or ["none"]:
        say(f"running: {line}")
    if found.queued:
        say(f"queued: {len(found.queued)}")


def _snapshot_text(address: str) -> str:
    return f"snapshot {address[:_SHORT]}" if address else ""


def _attempt_text(attempt: AttemptStatus) -> str:
    noun = "session" if attempt.kind == "session" else "run"
    parts = (
        f"{noun} {attempt.run_id}",
        f"supervisor pid {attempt.pid}",
        _snapshot_text(attempt.environment),
        "adopted" if attempt.adopted else "",
    )
    return " · ".join(part for part in parts if part)


@click.command()
@wide_option
@json_option(JsonType("cli.json_types:GpuList"))
def gpus(wide: bool, as_json: bool) -> None:
    """List the GPUs and CPU slots of this machine.

    The list includes quarantined GPUs.
    """
    home = find_home(os.environ)
    channel, greeting = connect(home)
    channel.close()
    fakes = os.environ.get("SERVERLESS_GPU_FAKE")
    devices = [device for device in greeting.devices if device.kind is not DeviceKind.GPU or not fakes]
    if fakes:
        devices = [*parse_fake(fakes, greeting.own_types), *devices]
    clock = SystemClock()
    found: list[dict[str, Any]] = []
    for device in devices:
        locks = DeviceLocks(lock_directory(device.kind, home.root))
        notes = locks.quarantined()
        state = f"quarantined: {notes[device.uuid].reason}" if device.uuid in notes else ""
        state = state or "".join(suspects(locks.directory, [device.uuid], clock.wall_ns())).partition(": ")[2]
        found.append(
            {
                "uuid": device.uuid,
                "type": device.type,
                "kind": device.kind.value,
                "memory_bytes": device.memory_bytes or 0,
                "state": state,
            }
        )
    unavailable = [] if fakes else list(greeting.unavailable)
    if as_json:
        print_json({"devices": found, "unavailable": unavailable})
        return
    rows = []
    for each in found:
        memory = format_bytes(each["memory_bytes"]) if each["memory_bytes"] else "-"
        rows.append([each["uuid"], each["type"], memory, each["kind"], each["state"] or "-"])
    print_table(["DEVICE", "TYPE", "MEMORY", "KIND", "REMARKS"], rows, wide=wide)
    for line in unavailable:
        say(f"not usable: {line}")


@click.command()
def stop() -> None:
    """Stop the agent of this machine.

    The command stops the agent, its warm interpreters, and the Ray and MLflow servers of the home directory. Running
    attempts continue.
    """
    home = find_home(os.environ)
    ended = stop_agent(home.root)
    say("stopped" if ended else "no agent is running")
    if stop_ray(home.root):
        say("Ray has stopped on this machine. Runs continue")
    if said := stop_mlflow(home):
        say_lines(said)


class ServerState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the server that a home directory uses."""

    url: str
    ok: bool
    problem: str = ""  # Reason why the server is unusable, or "" for a usable server.
    principal: str = ""  # Name and role of the caller; "" if unknown.
    version: str = ""
    waiting: int = 0  # Number of queued runs that the caller may see.
    going: int = 0  # Number of running runs that the caller may see.
    waits: tuple[str, ...] = ()  # Messages of a few of the caller's queued runs, oldest first.
    nodes: dict[str, int] | None = None  # Node counts by state; None if nodes are hidden from the caller.
    draining: str = ""  # Operator and reason of a drain; "" without a drain.
    unwell: tuple[str, ...] = ()  # Problems in the server's health report.
    checks: dict[str, float] = {}  # Durations of the health checks in milliseconds, by check name.

    def lines(self) -> Iterator[str]:
        """Yield the server state as lines of text."""
        if not self.ok:
            yield f"server: {self.url or 'cannot be used'}: {self.problem} (run `sgpu doctor`)"
            return
        how = "unwell" if self.unwell else "ok"
        yield f"server: {self.url} · {how} · {self.version} · you are {self.principal}"
        for problem in self.unwell:
            yield f"  {problem} (see `sgpu server logs` on the server's machine)"
        if looked := [f"{name} {ms:.0f} ms" for name, ms in self.checks.items() if ms]:
            yield f"health: {', '.join(looked)}"
        yield f"queue: {self.going} running, {self.waiting} waiting"
        yield from (f"  {wait}" for wait in self.waits)
        if self.nodes is not None:
            counts = ", ".join(f"{count} {state}" for state, count in sorted(self.nodes.items()))
            yield f"nodes: {counts or 'none has joined'}"
        if self.draining:
            yield f"drained by {self.draining}: no new runs start until `sgpu server resume`"


def server_status(home: Path) -> ServerState | None:
    """Return the state of the configured server without waiting for the server.

    Return None if no server is configured.
    """
    url = ""
    try:
        profile = find_profile(home, os.environ)
        url = profile.url
        connection = server_connection.connect(profile)
    except ServerNotConfigured as error:
        is_lacking = not (home / "server.json").exists() and not os.environ.get("SERVERLESS_GPU_SERVER")
        return None if is_lacking else ServerState(url=url, ok=False, problem=error.message)
    except ServerlessGpuError as error:
        return ServerState(url=url, ok=False, problem=error.message)
    state, runs = load("serverless_gpu.wire.server_status"), load("serverless_gpu.wire.runs")
    access, fleet = load("serverless_gpu.wire.access"), load("serverless_gpu.wire.nodes")
    try:
        health = connection.health()
        version = connection.ask("GET", "/version", answer=state.Version)
        me = connection.ask("GET", "/whoami", answer=access.PrincipalView)
        live = ",".join(each.value for each in State if each not in TERMINAL)
        query = {"state": live, "limit": str(_RUNS_MAX)}
        found = connection.ask("GET", "/runs", answer=runs.RunPage, query=query).runs
        nodes: dict[str, int] | None = None
        draining = ""
        with contextlib.suppress(NotAllowed):
            states = [node.state for node in connection.ask("GET", "/nodes", answer=fleet.NodeList).nodes]
            nodes = {each: states.count(each) for each in dict.fromkeys(states)}
            drain = connection.ask("GET", "/drain", answer=state.DrainView)
            draining = f"{drain.by}{f' ({drain.note})' if drain.note else ''}" if drain.on else ""
    except ServerlessGpuError as error:
        return ServerState(url=url, ok=False, problem=error.message)
    finally:
        connection.close()
    queued = [run for run in found if run.state is State.QUEUED]
    own = [run for run in reversed(queued) if run.owner == me.name]
    waits = [f"{run.name or run.id} waits: {sentence_of(run)}" for run in own[:_WAITS_MAX]]
    if len(own) > _WAITS_MAX:
        waits.append(f"and {len(own) - _WAITS_MAX} more of your runs are waiting: `sgpu runs --state QUEUED`")
    return ServerState(
        url=url,
        ok=True,
        principal=f"{me.name} ({me.role})",
        version=version.version,
        waiting=len(queued),
        going=len(found) - len(queued),
        waits=tuple(waits),
        nodes=nodes,
        draining=draining,
        unwell=health.problems,
        checks={check.name: check.ms for check in health.checks},
    )


_START_S = 300.0
_LOOK_S = 0.1
_RUNS_LOOKED_AT = 200


@click.command()
@click.argument("store", required=False, default="")
@click.option(
    "--stop", "is_end", is_flag=True, help="Stop the MLflow server of STORE, or all MLflow servers without STORE."
)
@json_option(JsonType("cli.json_types:MlflowState"))
def mlflow(store: str, is_end: bool, as_json: bool) -> None:
    """Start MLflow's server and print its address.

    If the MLflow server is already running, the command only prints the address. For your own STORE
    (sqlite:////path/mlflow.db, or a directory), the command starts a separate MLflow server.
    """
    home = durable_home("the MLflow server stores its runs in the home directory")
    if store and ":" not in store:
        store = os.path.abspath(store)
    if is_end:
        count = int(stop_server(place_of(home, store))) if store else stop_servers(home)
        say("stopped" if count else "no MLflow server is running")
        return
    elsewhere = os.environ.get("MLFLOW_TRACKING_URI", "")
    if elsewhere and not store:
        shown = without_password(elsewhere)
        say(f"sgpu: MLFLOW_TRACKING_URI is set, so MLflow tracks runs of this shell at {shown}", err=True)
    _start(home, store)
    found = look(place_of(home, store), SystemClock())
    if as_json:
        print_json(as_builtins(found))
    else:
        say(found.uri)


def mlflow_servers(home: Home) -> list[MlflowServer]:
    """Return the current and former MLflow servers of a home directory."""
    return [server for server in servers(home) if server.stage != "none"]


def mlflow_lines(found: list[MlflowServer]) -> Iterator[str]:
    """Yield the status lines of MLflow servers."""
    for each in found:
        parts = [each.uri, each.store and without_password(each.store)]
        if each.problem:
            parts += [f"{each.stage}: {each.problem}"]
        elif each.pid is None:
            parts += ["not running (starts with the next tracked run or `sgpu mlflow`)"]
        else:
            parts += [each.stage, f"MLflow {each.version}" if each.version else "", f"pid {each.pid}"]
            parts += [format_bytes(each.memory_bytes), f"used {format_duration_ms(round(each.used_s * 1000))} ago"]
        yield f"mlflow: {' · '.join(part for part in parts if part)}"


def as_builtins(server: MlflowServer) -> dict[str, object]:
    """Return the state of an MLflow server as JSON values."""
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
    """Stop the MLflow servers unless running attempts may use these servers. Return a message."""
    running = [server for server in servers(home) if server.pid is not None]
    if not running:
        return ""
    if any(is_live(path) for each in run_ids(home.runs)[:_RUNS_LOOKED_AT] for path in (home.runs / each).glob("*")):
        return (
            "MLflow's server keeps running, because active runs may use the server. "
            "Stop the server with `sgpu mlflow --stop`"
        )
    stop_servers(home)
    return "MLflow's server has stopped"


def _start(home: Home, store: str) -> None:
    """Start an MLflow server unless one is already running. Print a notice before a slow start."""
    clock = SystemClock()
    python = _python(home, store)
    deadline_ns = clock.boottime_ns() + int(_START_S * 1e9)
    serving = ensure_server(home, python, store, environ=os.environ, now=True)
    if not serving.ready and (serving.is_restarting or not serving.problem):
        say("sgpu: starting MLflow's server (this takes a few seconds)", err=True)
    while not serving.ready:
        if serving.problem and not serving.is_restarting:
            raise ServerProblem(serving.problem, hint=f"read its log: {place_of(home, store).log}")
        if clock.boottime_ns() > deadline_ns:
            raise ServerProblem(f"MLflow's server did not answer within {_START_S:.0f} s")
        select.select([], [], [], _LOOK_S)
        serving = ensure_server(home, python, store, environ=os.environ)


def _python(home: Home, store: str) -> str:
    """Return this interpreter if it has MLflow, or the previous MLflow server's interpreter."""
    if importlib.util.find_spec("mlflow") is not None:
        return sys.executable
    before = look(place_of(home, store), SystemClock())
    if before.pid is not None or os.path.exists(before.served_by):
        return before.served_by or before.python
    raise ServerProblem(
        f"{sys.executable} has no MLflow, and no earlier MLflow server exists in this home directory",
        hint="run pip install 'serverless-gpu[mlflow]', or run `sgpu` from an environment that has MLflow",
    )
