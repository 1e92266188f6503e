"""`sgpu attach`, `sgpu run`: being there while a run goes on, and asking one to make room."""

from __future__ import annotations

import sys

import click

from serverless_gpu.cli.exit_codes import exit_code
from serverless_gpu.cli.output import say
from serverless_gpu.cli.runs.cancel import cancel
from serverless_gpu.cli.runs.failures import say_failure
from serverless_gpu.cli.runs.run_details import show
from serverless_gpu.cli.runs.run_location import locate, this_home
from serverless_gpu.client.runs.attachment import attach as attach_to
from serverless_gpu.errors import AlreadyFinished
from serverless_gpu.model.lifecycle.attempt import TERMINAL, State


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


run_group.add_command(show)
run_group.add_command(cancel)
