"""`sgpu attach`, `cancel`, `run preempt` and `clean`: follows, stops, preempts or deletes runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn

import click
from msgspec.structs import replace

from serverless_gpu.ambient import SystemClock, format_moment
from serverless_gpu.cli.amounts import age_s, size_bytes
from serverless_gpu.cli.completion import complete_run
from serverless_gpu.cli.exit_codes import exit_code
from serverless_gpu.cli.output import columns, say, say_failure
from serverless_gpu.cli.runs import run_rows as remote
from serverless_gpu.cli.runs.run_location import PAGE, choose, locate, own_runs, queued_runs, server_runs, this_home
from serverless_gpu.cli.runs.run_table import row
from serverless_gpu.client.runs.attachment import attach as attach_to
from serverless_gpu.client.runs.run import Run
from serverless_gpu.errors import AlreadyFinished, InvalidValue, ServerlessGpuError, ServerProblem
from serverless_gpu.model.calendars import HOUR_NS
from serverless_gpu.model.lifecycle.attempt import TERMINAL, State
from serverless_gpu.model.lifecycle.retention import Policy, RunDirectory, to_delete
from serverless_gpu.node.attempt.history import FUNCTION, read_run, run_ids, size_on_disk
from serverless_gpu.node.attempt.retention import CleanupResult, cleaned_text, delete_all, empty_trash, scan
from serverless_gpu.node.base.configuration import read_configuration
from serverless_gpu.node.base.home import Home
from serverless_gpu.units import format_bytes, format_duration_ms


@click.command()
@click.argument("run", required=False, shell_complete=complete_run)
def attach(run: str | None) -> None:
    """Follow a run until it ends.

    RUN is a run identifier, or the beginning or end of a run identifier. Without RUN, the command selects the latest
    run. Ctrl-C ends the command but not the run. The command exits with the same codes as `sgpu submit`, and with 130
    after Ctrl-C.
    """
    handle = attach_to(locate(this_home(), run).run_id)
    error = handle.follow(only_looks=True, raises=False)
    if error is None:
        say(f"sgpu: run {handle.id} {handle.status()}", err=True)
    else:
        say_failure(error)
    sys.exit(exit_code(error))


@click.command()
@click.argument("run", shell_complete=complete_run)
def preempt(run: str) -> None:
    """Ask a run to yield its devices.

    The ranks receive the stop reason and can save a checkpoint before they exit. A server run with the option `resume`
    continues as a new attempt when devices are free. A run without `resume` ends. RUN is a run identifier, or the
    beginning or end of a run identifier.
    """
    found = locate(this_home(), run)
    handle = attach_to(found.run_id)
    state = State(handle.status()) if found.view is None else found.view.state
    if state in TERMINAL:
        raise AlreadyFinished(f"run {handle.id} has ended: {state}")
    handle.preempt()
    resumes = found.view is not None and found.view.spec.resume
    then = "the run continues as a new attempt when devices are free" if resumes else "the run then ends"
    say(f"run {handle.id} must yield its devices, and {then}")


@click.command()
@click.argument("run", required=False, shell_complete=complete_run)
def cancel(run: str | None) -> None:
    """Stop a run and wait for its devices.

    RUN is a run identifier, or the beginning or end of a run identifier. Without RUN, the command lists the running
    runs.
    """
    home = this_home()
    if run is None:
        _refuse_unnamed(home)
    found = locate(home, run)
    wanted = found.run_id
    inside: list[Run[object]] = []  # Runs that use the session's devices.
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
    """List the running runs, and raise UsageError."""
    live = [row(record, home)[:4] for run_id in own_runs(home) if (record := read_run(home.runs, run_id)).live]
    unasked = ""
    try:
        served = server_runs(home, limit=PAGE)
    except ServerProblem as error:
        served, unasked = (), f" on this machine. The server's runs are unknown: {error.message}"
    live += [remote.row(view)[:4] for view in served if view.state not in TERMINAL]
    for line in columns(live):
        say(line, err=True)
    raise click.UsageError(
        "name a run; " + ("these runs are running" if live else "no run is running") + (unasked or ".")
    )


def describe_gate(handle: Run[object]) -> str:
    """Return the release state of a run's devices. A run without devices has no receipt."""
    try:
        receipt = handle.receipt()
    except ServerlessGpuError:
        return "the run had no devices"
    if receipt.state != handle.status():  # The last receipt belongs to an earlier attempt.
        return f"the run had no devices. Attempt {receipt.fence} had released its devices: {receipt.gate}"
    return receipt.gate


@click.command()
@click.argument("run", nargs=-1, shell_complete=complete_run)
@click.option("--older-than", metavar="AGE", help="Delete runs that ended before this age, such as 12h, 7d or 2w.")
@click.option(
    "--keep",
    metavar="SIZE",
    help="Delete the oldest runs until the remaining runs use at most this size, such as 20GiB.",
)
@click.option("--dry-run", is_flag=True, help="List the runs that the command would delete.")
def clean(run: tuple[str, ...], older_than: str | None, keep: str | None, dry_run: bool) -> None:
    """Delete directories of ended runs.

    The command deletes the logs and results of ended runs. The command also deletes local copies of results from the
    server. Without RUN and options, the command applies the retention limits in the configuration. The agent applies
    the same limits every hour. The command deletes a run that ended within the last hour only if you name the run or
    set a shorter AGE. The command never deletes running runs.
    """
    home = this_home()
    if run and (older_than or keep):
        raise click.UsageError("RUN cannot be combined with --older-than or --keep")
    chosen, spared = (_find_named(home, run), "") if run else _find_expired(home, older_than, keep)
    if dry_run:
        rows = []
        for place, entry in chosen:
            ended = "" if entry.ended_ns is None else format_moment(entry.ended_ns)
            copies = "copies of results" if place == home.remote else ""
            rows.append([entry.run_id, ended, format_bytes(entry.size_bytes), copies])
        for line in columns(rows):
            say(line)
        total = sum(each.entry.size_bytes for each in chosen)
        say(f"would delete {_count(_runs_of(chosen))}, {format_bytes(total)}{spared}")
        return
    done = []
    for place in _places(home):
        empty_trash(place)
        done.append(delete_all(place, [each.entry for each in chosen if each.place == place]))
    deleted = {run_id for each in done for run_id in each.deleted}
    problems = tuple(problem for each in done for problem in each.problems)
    cleaned = CleanupResult(tuple(deleted), sum(each.freed_bytes for each in done), problems)
    stay = {run_id for place in _places(home) for run_id in run_ids(place)}
    said = cleaned_text(cleaned) if chosen else f"nothing to delete. The command kept {_count(len(stay))}"
    say(said + spared)
    for problem in problems:
        say(f"sgpu: {problem}", err=True)
    if problems:
        sys.exit(1)


class _Directory(NamedTuple):
    """A run directory and its parent directory."""

    place: Path
    entry: RunDirectory


def _places(home: Home) -> tuple[Path, Path]:
    """Return the parent directories of local runs and of result copies from a server."""
    return home.runs, home.remote


def _find_named(home: Home, runs: tuple[str, ...]) -> list[_Directory]:
    queued = queued_runs(home)
    own, copied = (run_ids(place) for place in _places(home))
    ids = sorted({*own, *copied}, reverse=True)
    chosen = []
    for run_id in dict.fromkeys(choose(home, run, ids) for run in runs):
        if run_id in own:
            record = read_run(home.runs, run_id, queued)
            if record.live and record.stopped is not None:
                why = f"run {run_id} is {record.state} and has not released its devices yet"
                raise InvalidValue(why, hint="delete the run after the release of its devices")
            if record.live or record.ended_ns is None:
                raise InvalidValue(f"run {run_id} is {record.state}", hint=f"stop the run with `sgpu cancel {run_id}`")
            chosen.append(_entry(home.runs, run_id, record.ended_ns))
        if run_id in copied:  # The server still has the original results.
            chosen.append(_entry(home.remote, run_id, read_run(home.remote, run_id, ()).ended_ns))
    return chosen


def _entry(place: Path, run_id: str, ended_ns: int | None) -> _Directory:
    return _Directory(place, RunDirectory(run_id=run_id, ended_ns=ended_ns, size_bytes=size_on_disk(place / run_id)))


def _find_expired(home: Home, older_than: str | None, keep: str | None) -> tuple[list[_Directory], str]:
    """Return the expired run directories, and a text about recently ended runs."""
    policy, now_ns, queued = _policy(home, older_than, keep), SystemClock().wall_ns(), queued_runs(home)
    scanned = [[_Directory(place, entry) for entry in scan(place, queued, now_ns)] for place in _places(home)]
    # A size limit in the configuration applies to each parent directory. A size limit on the command line applies to
    # both parent directories together.
    groups = scanned if keep is None else [[*scanned[0], *scanned[1]]]
    chosen = [each for group in groups for each in _deletable(group, policy, now_ns)]
    old = [each for group in groups for each in _deletable(group, replace(policy, spared_ns=0), now_ns)]
    young = _runs_of(old) - _runs_of(chosen)
    if not young:
        return chosen, ""
    age = "an hour" if policy.spared_ns == HOUR_NS else format_duration_ms(policy.spared_ns // 1_000_000)
    more = f"; {_count(young)} that ended less than {age} ago {'is' if young == 1 else 'are'} kept"
    return chosen, (
        f"{more}; to delete {'it' if young == 1 else 'them'} now, name {'it' if young == 1 else 'them'}: sgpu clean RUN"
    )


def _deletable(group: list[_Directory], policy: Policy, now_ns: int) -> list[_Directory]:
    lost = {id(entry) for entry in to_delete([each.entry for each in group], policy, now_ns)}
    return [each for each in group if id(each.entry) in lost]


def _runs_of(chosen: Iterable[_Directory]) -> int:
    return len({each.entry.run_id for each in chosen})


def _policy(home: Home, older_than: str | None, keep: str | None) -> Policy:
    if older_than is None and keep is None:
        return read_configuration(home).retention
    policy = Policy(age_ns=None, size_bytes_max=None)
    if older_than is not None:
        age_ns = age_s("--older-than", older_than) * 1_000_000_000
        policy = replace(policy, age_ns=age_ns, spared_ns=min(HOUR_NS, age_ns))
    if keep is not None:
        policy = replace(policy, size_bytes_max=size_bytes("--keep", keep))
    return policy


def _count(runs: int) -> str:
    return f"{runs} run{'' if runs == 1 else 's'}"
