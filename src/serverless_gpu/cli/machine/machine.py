"""`sgpu status`, `sgpu gpus`, `sgpu stop`: the agent of this machine, its devices, and the state of its server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli import server_connection
from serverless_gpu.cli.machine.mlflow_server import as_builtins, mlflow_lines, mlflow_servers, stop_mlflow
from serverless_gpu.cli.output import print_json, say, say_lines
from serverless_gpu.cli.runs.server_runs import sentence_of
from serverless_gpu.client.agent import agent_status, stop_agent
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.engines.ray.ray_keeper import stop_ray
from serverless_gpu.errors import NotAllowed, ServerlessGpuError, ServerNotConfigured
from serverless_gpu.lazy_import import load
from serverless_gpu.model.hardware import DeviceKind, parse_fake
from serverless_gpu.model.lifecycle.attempt import TERMINAL, State
from serverless_gpu.node.agent.connection import connect
from serverless_gpu.node.base.home import find_home
from serverless_gpu.node.base.protocol import AttemptStatus, Status
from serverless_gpu.node.devices.locks import DeviceLocks, lock_directory
from serverless_gpu.node.supervisor.gpu_faults import suspects
from serverless_gpu.units import format_bytes

_SHORT = 12
_RUNS_MAX = 500
_WAITS_MAX = 3


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(as_json: bool) -> None:
    """Show what the agent of this node keeps warm and looks after, and how the servers are if there are any."""
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
        say("no agent is running; the next run starts one")
        return
    say(f"agent: pid {found.pid}")
    say(f"cgroups: {found.cgroups or f'none: {found.cgroups_problem}'}")
    for zygote in found.zygotes:
        process = "none" if zygote.pid is None else f"pid {zygote.pid}"
        state = zygote.state + (f": {zygote.reason}" if zygote.reason else "")
        parts = (process, zygote.python, _snapshot_text(zygote.environment), state)
        say(f"zygote: {' · '.join(filter(None, parts))}")
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
def gpus() -> None:
    """List the GPUs and CPU slots of this node, and GPUs in quarantine."""
    home = find_home(os.environ)
    channel, greeting = connect(home)
    channel.close()
    fakes = os.environ.get("SERVERLESS_GPU_FAKE")
    devices = [device for device in greeting.devices if device.kind is not DeviceKind.GPU or not fakes]
    if fakes:
        devices = [*parse_fake(fakes, greeting.own_types), *devices]
    clock = SystemClock()
    for device in devices:
        locks = DeviceLocks(lock_directory(device.kind, home.root))
        notes = locks.quarantined()
        state = f"quarantined: {notes[device.uuid].reason}" if device.uuid in notes else ""
        state = state or "".join(suspects(locks.directory, [device.uuid], clock.wall_ns())).partition(": ")[2]
        memory = format_bytes(device.memory_bytes) if device.memory_bytes else ""
        say("  ".join(text for text in (device.uuid, device.type, memory, device.kind, state) if text))

    for line in () if fakes else greeting.unavailable:
        say(f"not usable: {line}")


@click.command()
def stop() -> None:
    """End the agent of this node and what it keeps warm, and the Ray of a server here; running attempts go on."""
    home = find_home(os.environ)
    ended = stop_agent(home.root)
    say("stopped" if ended else "no agent is running")
    if stop_ray(home.root):
        say("Ray has ended here; runs go on")
    if said := stop_mlflow(home):
        say_lines(said)


class ServerState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the server."""

    url: str
    ok: bool
    problem: str = ""  # why it is unusable, or ""
    principal: str = ""  # the caller's; "" where unknown
    version: str = ""
    waiting: int = 0  # visible queued runs
    going: int = 0  # visible running runs
    waits: tuple[str, ...] = ()  # sentences of a few of the caller's queued runs, oldest first
    nodes: dict[str, int] | None = None  # by state; None where the caller may not see them
    draining: str = ""  # who drains it and why, or ""
    unwell: tuple[str, ...] = ()  # its own complaints although it answers
    checks: dict[str, float] = {}  # milliseconds by part

    def lines(self) -> Iterator[str]:
        """Yield the state as text."""
        if not self.ok:
            yield f"server: {self.url or 'cannot be used'}: {self.problem}; `sgpu doctor` looks"
            return
        how = "unwell" if self.unwell else "ok"
        yield f"server: {self.url} · {how} · {self.version} · you are {self.principal}"
        for problem in self.unwell:
            yield f"  {problem}; `sgpu server logs` there says more"
        if looked := [f"{name} {ms:.0f} ms" for name, ms in self.checks.items() if ms]:
            yield f"health: {', '.join(looked)}"
        yield f"queue: {self.going} going on, {self.waiting} waiting"
        yield from (f"  {wait}" for wait in self.waits)
        if self.nodes is not None:
            counts = ", ".join(f"{count} {state}" for state, count in sorted(self.nodes.items()))
            yield f"nodes: {counts or 'none has joined'}"
        if self.draining:
            yield f"drained by {self.draining}: nothing new is started until `sgpu server resume`"


def server_status(home: Path) -> ServerState | None:
    """Return the state of a home's server without waiting for it; None without a server."""
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
        waits.append(f"and {len(own) - _WAITS_MAX} more of yours: `sgpu runs --state QUEUED`")
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
