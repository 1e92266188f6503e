"""`sgpu simulate`: replays a trace with several schedulers and compares the results."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from serverless_gpu.cli.amounts import duration_s
from serverless_gpu.cli.exit_codes import CANCELLED
from serverless_gpu.cli.output import JsonType, columns, json_option, print_json, say
from serverless_gpu.cli.planning.pictures import load_drawing, write_picture
from serverless_gpu.cli.runs.run_location import this_home
from serverless_gpu.cli.server_connection import connect
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.lazy_import import load
from serverless_gpu.model.scheduling.values import QueuePolicy
from serverless_gpu.replay import (
    POLICIES,
    Cluster,
    Outcome,
    Settings,
    Trace,
    generate,
    read_cluster,
    read_trace,
    simulate,
)
from serverless_gpu.replay.traces import jobs_of, rows_of_json
from serverless_gpu.units import format_duration_ms

_PAGE = 500
_HISTORY_MAX = 100_000
_TEAMS_MAX = 10
_DRAWING = "serverless_gpu.replay.charts"


class _TraceChoice(NamedTuple):
    """The source of the jobs to replay. Exactly one of the three fields is set."""

    trace: Path | None
    history: bool
    made_up: int | None


@click.command("simulate")
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option("--history", is_flag=True, help="Replay the server's ended runs that are visible to you.")
@click.option(
    "--generate", "made_up", type=click.IntRange(min=1), metavar="JOBS", help="Replay this number of generated jobs."
)
@click.option(
    "--load",
    type=float,
    default=0.9,
    show_default=True,
    help="Ratio of the generated jobs' GPU time to the cluster's GPU time.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed of generated jobs.")
@click.option(
    "--only", multiple=True, metavar="COLUMN=VALUE", help="Replay only trace rows with this value. Repeatable."
)
@click.option(
    "--cluster",
    default="8x8",
    show_default=True,
    metavar="NxG|FILE",
    help="Number of nodes and GPUs per node, or a cluster file.",
)
@click.option(
    "--placement",
    type=click.Choice(["nodes", "count"]),
    default="nodes",
    show_default=True,
    help="Place jobs on separate nodes, or on one large node (count).",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(POLICIES),
    help="Scheduler to replay (default: first-fit and ours). Repeatable.",
)
@click.option(
    "--durations",
    type=click.Choice(["unknown", "learned", "known"]),
    default="unknown",
    show_default=True,
    help="Knowledge of our scheduler about job durations.",
)
@click.option("--preemption", is_flag=True, help="Allow our scheduler to preempt any job and resume the job later.")
@click.option("--half-life", metavar="AGE", help="Half-life of past usage in fair-share scheduling, for example 7d.")
@click.option(
    "--guard", metavar="AGE", help="Waiting time after which a job moves to the front of the queue, for example 14d."
)
@click.option(
    "--reservations",
    type=click.IntRange(min=0),
    help="Number of blocked gangs for which the scheduler reserves devices.",
)
@click.option("--share", multiple=True, metavar="TEAM=WEIGHT", help="Weight of a team (default: 1). Repeatable.")
@click.option(
    "--png",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a chart of the results to a .png, .svg or .pdf file.",
)
@json_option(JsonType("cli.json_types:Simulation"))
def simulate_command(**options: Any) -> None:
    """Replay a trace on a simulated cluster.

    The command compares the outcomes of several schedulers without starting any run. TRACE is a Parquet or CSV file
    with the columns submit_time_s, duration_s and num_gpus. Philly's cluster_job_log and the output of `sgpu runs
    --json` are also valid traces.
    """
    asked = _TraceChoice(options["trace"], options["history"], options["made_up"])
    if sum(map(bool, asked)) != 1:
        raise click.UsageError("specify one source of jobs: TRACE, --history or --generate JOBS")
    cluster = read_cluster(options["cluster"])
    trace = _trace(asked, cluster, options)
    shown = cluster.as_sum() if options["placement"] == "count" else cluster
    settings = Settings(
        durations=options["durations"],
        preemption=options["preemption"],
        scheduling=_scheduling(options),
    )
    drawing = None if options["png"] is None else load_drawing(options["png"], _DRAWING)
    outcomes = []
    try:
        for policy in dict.fromkeys(options["policies"] or ("first-fit", "ours")):
            with _Progress(policy) as progress:
                outcomes.append(simulate(trace, shown, policy, settings=settings, progress=progress.tell))
    except KeyboardInterrupt:
        say(f"sgpu: interrupted while {policy} was replayed. No results were written", err=True)
        sys.exit(CANCELLED)
    if options["as_json"]:
        print_json(_as_json(outcomes, trace))
    else:
        for line in _lines(outcomes, trace):
            say(line)
    if drawing is not None:
        title = f"{len(outcomes[0].jobs):,} jobs of {trace.source} on {outcomes[0].cluster.text()}"
        write_picture(lambda: drawing.draw_replays(outcomes, title, options["png"]), options["png"])


# --- sources of jobs --------------------------------------------------------------------------------------------------


def _trace(asked: _TraceChoice, cluster: Cluster, options: Mapping[str, Any]) -> Trace:
    only = _pairs("--only", options["only"])
    if asked.trace is not None:
        return read_trace(asked.trace, only)
    if asked.made_up is not None:
        if only:
            raise click.UsageError("--only requires TRACE or --history")
        return generate(asked.made_up, gpus=cluster.gpus, load=options["load"], seed=options["seed"])
    return jobs_of(rows_of_json(_history()), "the server's runs", only)


def _history() -> Iterator[dict[str, Any]]:
    """Yield the server's runs in the format of `sgpu runs --json`, newest first."""
    wire, remote = load("serverless_gpu.wire.runs"), load("serverless_gpu.cli.runs.run_rows")
    connection = connect(find_profile(this_home().root, os.environ))
    try:
        cursor, count = "", 0
        while True:
            query = {"limit": str(_PAGE)} | ({"cursor": cursor} if cursor else {})
            page = connection.ask("GET", "/runs", answer=wire.RunPage, query=query)
            for view in page.runs:
                yield remote.as_json(view)
            cursor, count = page.cursor, count + len(page.runs)
            if not cursor or not page.runs or count >= _HISTORY_MAX:
                return
    finally:
        connection.close()


def _scheduling(options: Mapping[str, Any]) -> QueuePolicy:
    told: dict[str, Any] = {}
    if options["half_life"]:
        told["half_life_s"] = duration_s("--half-life", options["half_life"])
    if options["guard"]:
        told["guard_s"] = duration_s("--guard", options["guard"])
    if options["reservations"] is not None:
        told["reservations"] = options["reservations"]
    shares: dict[str, float] = {}
    for team, text in _pairs("--share", options["share"]).items():
        try:
            shares[team] = float(text)
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a number", param_hint="--share") from None
        if not 0 < shares[team] < 1e9:
            raise click.BadParameter(f"{text} is not a weight. Write a number above 0", param_hint="--share")
    return msgspec.structs.replace(QueuePolicy(), team_weights=shares, **told)


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{text!r} does not have the form NAME=VALUE", param_hint=option)
        pairs[name] = value
    return pairs


class _Progress:
    """Shows the progress of a replay on stderr if stderr is a terminal."""

    def __init__(self, policy: str) -> None:
        self._policy, self._shown = policy, sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        if self._shown:
            click.echo(f"\r{self._policy} …\x1b[K", err=True, nl=False)
        return self

    def tell(self, done: int, total: int) -> None:
        """Print the number of completed jobs."""
        if self._shown:
            click.echo(f"\r{self._policy}: {done:,} of {total:,} jobs\x1b[K", err=True, nl=False)

    def __exit__(self, *_: object) -> None:
        if self._shown:
            click.echo("\r\x1b[K", err=True, nl=False)


# --- output -----------------------------------------------------------------------------------------------------------


def _lines(outcomes: Sequence[Outcome], trace: Trace) -> list[str]:
    first = outcomes[0]
    gangs = f"gangs (≥ {first.cluster.gang_gpus} GPUs)"
    rows = [["", *(outcome.policy for outcome in outcomes)]]
    for name, field in (("wait", "wait"), (f"wait of {gangs}", "gang_wait"), ("completion", "completion")):
        for part in ("mean", "p50", "p95", "p99"):
            spreads = [getattr(outcome.figures, field) for outcome in outcomes]
            times = ["-" if one is None else format_duration_ms(round(1000 * getattr(one, part))) for one in spreads]
            rows.append([f"{name}, {part}", *times])
    for name, field in (("in use", "utilisation"), ("free while jobs wait", "idle"), ("fragmented", "fragmented")):
        rows.append([name, *(f"{100 * getattr(outcome.figures, field):.1f} %" for outcome in outcomes)])
    teams = list(first.figures.teams)
    for team in teams[:_TEAMS_MAX]:
        parts = (100 * outcome.figures.teams.get(team, 0.0) for outcome in outcomes)
        rows.append([f"share of {team or 'no team'}", *(f"{part:.1f} %" for part in parts)])
    rows.append(["stopped for other jobs", *(str(outcome.figures.preemptions) for outcome in outcomes)])
    lines = [f"{len(first.jobs):,} jobs of {trace.source} on {first.cluster.text()}"]
    lines += [f"left out: {count:,} {why}" for why, count in trace.left_out.items()]
    lines += [f"left out: {count:,} {why}" for why, count in first.impossible.items()]
    lines += [f"{each.policy} never placed {each.unserved:,}" for each in outcomes if each.unserved]
    if len(teams) > _TEAMS_MAX:
        lines.append(f"{len(teams) - _TEAMS_MAX} more teams (--json lists the shares of all teams)")
    return [*lines, "", *columns(rows)]


def _as_json(outcomes: Sequence[Outcome], trace: Trace) -> dict[str, object]:
    return {
        "trace": trace.source,
        "left_out": dict(trace.left_out),
        "cluster": outcomes[0].cluster.text(),
        "gpus": outcomes[0].cluster.gpus,
        "gang_gpus": outcomes[0].cluster.gang_gpus,
        "impossible": dict(outcomes[0].impossible),
        "policies": {
            outcome.policy: msgspec.to_builtins(outcome.figures) | {"unserved": outcome.unserved}
            for outcome in outcomes
        },
    }
