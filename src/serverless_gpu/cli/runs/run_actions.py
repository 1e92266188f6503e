"""`sgpu attach`, `sgpu cancel`, `sgpu run preempt`: follows one run, stops it, or asks it to make room."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from serverless_gpu.cli.output import columns, exit_code, say, say_failure
from serverless_gpu.cli.runs import server_runs as remote
from serverless_gpu.cli.runs.run_details import show
from serverless_gpu.cli.runs.run_location import PAGE, locate, own_runs, server_runs, this_home
from serverless_gpu.cli.runs.run_table import row
from serverless_gpu.client.runs.attachment import attach as attach_to
from serverless_gpu.client.runs.run import Run
from serverless_gpu.errors import AlreadyFinished, ServerlessGpuError, ServerProblem
from serverless_gpu.model.lifecycle.attempt import TERMINAL, State
from serverless_gpu.node.attempt.history import FUNCTION, read_run, run_ids
from serverless_gpu.node.base.home import Home


@click.command()
@click.argument("run", required=False)
def attach(run: str | None) -> None:
    """Show a run until it ends, as the call itself does; Ctrl-C leaves it to itself.

    RUN is an identifier, or any beginning or end of one that no other run has; without it, the latest run. Exit codes
    are those of `sgpu submit`: how the run ended; 130 after Ctrl-C.
    """
    handle = attach_to(locate(this_home(), run).run_id)
    error = handle.follow(only_looks=True, raises=False)
    if error is None:
        say(f"sgpu: run {handle.id} {handle.status()}", err=True)
    else:
        say_failure(error)
    sys.exit(exit_code(error))


@click.group("run")
def run_group() -> None:
    """Look at one run, or act on it."""


@run_group.command()
@click.argument("run")
def preempt(run: str) -> None:
    """Ask a run to make room: its ranks may save first, and are told why.

    A run of the server that asked for `resume` continues as a new attempt once there is room; any other ends. RUN is an
    identifier, or any beginning or end of one that no other run has.
    """
    found = locate(this_home(), run)
    handle = attach_to(found.run_id)
    state = State(handle.status()) if found.view is None else found.view.state
    if state in TERMINAL:
        raise AlreadyFinished(f"run {handle.id} has ended: {state}")
    handle.preempt()
    resumes = found.view is not None and found.view.spec.resume
    then = "it continues as a new attempt when there is room" if resumes else "it ends then"
    say(f"run {handle.id} was asked to make room; {then}")


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


run_group.add_command(show)
run_group.add_command(cancel)
