"""`sgpu status`, `sgpu gpus`, `sgpu stop`: the agent of this machine and its devices."""

from __future__ import annotations

import os

import click

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli.machine.mlflow_server import as_builtins, mlflow_lines, mlflow_servers, stop_mlflow
from serverless_gpu.cli.output import print_json, say, say_lines
from serverless_gpu.cli.server.state import server_status
from serverless_gpu.client.agent_control import stop_agent
from serverless_gpu.client.agent_status import agent_status
from serverless_gpu.engines.ray.head_keeper import stop_ray
from serverless_gpu.model.hardware import DeviceKind, parse_fake
from serverless_gpu.node.agent.connection import connect
from serverless_gpu.node.base.home import find_home
from serverless_gpu.node.base.protocol import Status
from serverless_gpu.node.base.statuses import AttemptStatus
from serverless_gpu.node.devices.locks import DeviceLocks, lock_directory
from serverless_gpu.node.supervisor.gpu_faults import suspects
from serverless_gpu.units import format_bytes

_SHORT = 12


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
