"""`sgpu clean`: deleting run directories, by name, by age, or until the rest fits."""

from __future__ import annotations

import sys

import click
from msgspec.structs import replace

from serverless_gpu.ambient import SystemClock, format_moment
from serverless_gpu.cli.amounts import age_s, size_bytes
from serverless_gpu.cli.choosing import choose, queued_runs, this_home
from serverless_gpu.cli.columns import columns
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.retention import HOUR_NS, Entry, Policy, to_delete
from serverless_gpu.node.configuration import read_configuration
from serverless_gpu.node.history import read_run, run_ids, size_on_disk
from serverless_gpu.node.home import Home
from serverless_gpu.node.retention import cleaned_text, delete_all, empty_trash, scan
from serverless_gpu.units import format_bytes, format_duration_ms


@click.command()
@click.argument("run", nargs=-1)
@click.option("--older-than", metavar="AGE", help="Delete what ended longer ago: 12h, 7d, 2w.")
@click.option("--keep", metavar="SIZE", help="Delete the oldest until the rest takes at most this: 20GiB.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
def clean(run: tuple[str, ...], older_than: str | None, keep: str | None, dry_run: bool) -> None:
    """Delete directories of ended runs, with their results and logs.

    Without RUN and options: what the configuration keeps no longer, which the agent deletes by itself every hour. What
    ended less than an hour ago stays unless it is named, or AGE is shorter. A running run is never deleted.
    """
    home = this_home()
    if run and (older_than or keep):
        raise click.UsageError("name runs, or give --older-than and --keep; not both")
    chosen, spared = (_named(home, run), "") if run else _kept_no_longer(home, older_than, keep)
    if dry_run:
        for line in columns([_row(entry) for entry in chosen]):
            click.echo(line)
        total = sum(entry.size_bytes for entry in chosen)
        click.echo(f"would delete {_count(len(chosen))}, {format_bytes(total)}{spared}")
        return
    empty_trash(home.runs)
    done = delete_all(home.runs, chosen)
    said = cleaned_text(done) if chosen else f"nothing to delete; {_count(len(run_ids(home.runs)))} stay"
    click.echo(said + spared)
    for problem in done.problems:
        click.echo(f"sgpu: {problem}", err=True)
    if done.problems:
        sys.exit(1)


def _named(home: Home, runs: tuple[str, ...]) -> list[Entry]:
    queued = queued_runs(home)
    chosen = []
    for run_id in dict.fromkeys(choose(home, run) for run in runs):
        record = read_run(home.runs, run_id, queued)
        if record.live or record.ended_ns is None:
            raise InvalidValue(f"run {run_id} is {record.state}", hint=f"`sgpu cancel {run_id}` stops it")
        chosen.append(Entry(run_id=run_id, ended_ns=record.ended_ns, size_bytes=size_on_disk(home.runs / run_id)))
    return chosen


def _kept_no_longer(home: Home, older_than: str | None, keep: str | None) -> tuple[list[Entry], str]:
    """Return what the rules delete, and in words what they would if it had not ended only just."""
    policy, now_ns = _policy(home, older_than, keep), SystemClock().wall_ns()
    entries = scan(home.runs, queued_runs(home), now_ns)
    chosen = to_delete(entries, policy, now_ns)
    young = len(to_delete(entries, replace(policy, spared_ns=0), now_ns)) - len(chosen)
    if not young:
        return list(chosen), ""
    age = "an hour" if policy.spared_ns == HOUR_NS else format_duration_ms(policy.spared_ns // 1_000_000)
    more = f"; {_count(young)} that ended less than {age} ago {'is' if young == 1 else 'are'} kept by that rule"
    return list(chosen), f"{more}: name {'it' if young == 1 else 'them'} to delete {'it' if young == 1 else 'them'} now"


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


def _row(entry: Entry) -> list[str]:
    ended = "" if entry.ended_ns is None else format_moment(entry.ended_ns)
    return [entry.run_id, ended, format_bytes(entry.size_bytes)]
