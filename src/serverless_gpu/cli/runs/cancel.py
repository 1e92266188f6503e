"""`sgpu cancel`: stopping one run, of this machine or of the server."""

from __future__ import annotations

from typing import NoReturn

import click

from serverless_gpu.cli.output import columns, say
from serverless_gpu.cli.runs import server_runs as remote
from serverless_gpu.cli.runs.run_location import PAGE, locate, own_runs, server_runs, this_home
from serverless_gpu.cli.runs.run_table import row
from serverless_gpu.client.runs.attachment import attach as attach_to
from serverless_gpu.client.runs.run import Run
from serverless_gpu.errors import ServerlessGpuError, ServerProblem
from serverless_gpu.model.lifecycle.attempt import TERMINAL
from serverless_gpu.node.attempt.history import FUNCTION, read_run, run_ids
from serverless_gpu.node.base.home import Home


@click.command()
@click.argument("run", required=False)
def cancel(run: str | None) -> None:
    """Stop a run and wait until its devices were handed back.

    RUN is an identifier, or any beginning or end of one that no other run has; without it, what runs is listed.
    """
    home = this_home()
    if run is None:
        _refuse_unnamed(home)
    found = locate(home, run)
    wanted = found.run_id
    inside: list[Run[object]] = []  # the runs that use a session's devices
    if found.view is None and read_run(home.runs, wanted).kind != FUNCTION:
        records = [read_run(home.runs, run_id) for run_id in run_ids(home.runs)]
        inside = [attach_to(record.run_id) for record in records if record.live and record.session == wanted]
    for handle in inside:
        handle.cancel()
    for handle in inside:
        handle.wait()
        say(f"run {handle.id} {handle.status()}: {handle.receipt().gate}")
    handle = attach_to(wanted)
    handle.cancel()
    handle.wait()
    say(f"{handle.status()}: {describe_gate(handle)}")


def _refuse_unnamed(home: Home) -> NoReturn:
    """List the runs to choose from and raise."""
    live = [row(record, home)[:4] for run_id in own_runs(home) if (record := read_run(home.runs, run_id)).live]
    unasked = ""
    try:
        served = server_runs(home, limit=PAGE)
    except ServerProblem as error:
        served, unasked = (), f" here; runs of the server are not known: {error.message}"
    live += [remote.row(view)[:4] for view in served if view.state not in TERMINAL]
    for line in columns(live):
        say(line, err=True)
    raise click.UsageError("which run? " + ("These are running" if live else "None is running") + (unasked or "."))


def describe_gate(handle: Run[object]) -> str:
    """Return the release state of a run's devices; a run that never had any has no receipt."""
    try:
        receipt = handle.receipt()
    except ServerlessGpuError:
        return "it had no devices"
    if receipt.state != handle.status():  # it waited again: the last receipt is of what it had before
        return f"it had no devices any more; attempt {receipt.fence} gave them back, {receipt.gate}"
    return receipt.gate
