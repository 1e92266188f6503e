"""The command `sgpu`."""

from __future__ import annotations

import os
import sys

import click

from serverless_gpu.client.agent_control import agent_status, stop_agent
from serverless_gpu.client.connection import connect
from serverless_gpu.client.run import attach
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.model.hardware import DeviceKind, parse_fake
from serverless_gpu.node.home import find_home
from serverless_gpu.node.locks import DeviceLocks, lock_directory
from serverless_gpu.units import format_bytes
from serverless_gpu.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="serverless-gpu")
def sgpu() -> None:
    """The function runtime for GPUs you own."""


@sgpu.command()
def status() -> None:
    """Show what the agent of this node keeps warm and looks after."""
    found = agent_status(find_home(os.environ).root)
    if found is None:
        click.echo("no agent is running; the next run starts one")
        return
    click.echo(f"agent: pid {found.pid}")
    click.echo(f"cgroups: {found.cgroups}")
    for line in found.zygotes or ("none",):
        click.echo(f"zygote: {line}")
    for line in found.attempts or ("none",):
        click.echo(f"running: {line}")
    if found.queued:
        click.echo(f"queued: {len(found.queued)}")


@sgpu.command()
def gpus() -> None:
    """List the GPUs and CPU slots of this node, and GPUs in quarantine."""
    home = find_home(os.environ)
    channel, greeting = connect(home)
    channel.close()
    fakes = os.environ.get("SERVERLESS_GPU_FAKE")
    devices = [device for device in greeting.devices if device.kind is not DeviceKind.GPU or not fakes]
    if fakes:
        devices = [*parse_fake(fakes, greeting.own_types), *devices]
    for device in devices:
        notes = DeviceLocks(lock_directory(device.kind, home.root)).quarantined()
        state = f"quarantined: {notes[device.uuid].reason}" if device.uuid in notes else ""
        memory = format_bytes(device.memory_bytes) if device.memory_bytes else ""
        click.echo("  ".join(text for text in (device.uuid, device.type, memory, device.kind, state) if text))

    for line in () if fakes else greeting.unavailable:
        click.echo(f"not usable: {line}")


@sgpu.command()
@click.argument("run_id")
def cancel(run_id: str) -> None:
    """Stop a run and wait until its devices were handed back."""
    run = attach(run_id)
    run.cancel()
    run.wait()
    click.echo(f"{run.status()}: {run.receipt().gate}")


@sgpu.command()
def stop() -> None:
    """End the agent of this node and what it keeps warm; running attempts go on."""
    ended = stop_agent(find_home(os.environ).root)
    click.echo("stopped" if ended else "no agent is running")


def main() -> None:
    """Run the command; an error of ours is a message and exit code 1, not a traceback."""
    try:
        sgpu()
    except ServerlessGpuError as error:
        click.echo(f"sgpu: {error}", err=True)
        sys.exit(1)
