"""`sgpu metrics`: the samples of a run as numbers or as a picture."""

from __future__ import annotations

from pathlib import Path

import click

from serverless_gpu.cli.output import columns, print_json, say
from serverless_gpu.cli.runs.run_location import locate, this_home
from serverless_gpu.client.runs.attachment import attach


@click.command()
@click.argument("run", required=False)
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE", help="Write a picture of it: .png, .svg, .pdf."
)
@click.option("--json", "as_json", is_flag=True, help="Print every sample as JSON.")
def metrics(run: str | None, plot: Path | None, as_json: bool) -> None:
    """Show what was sampled of a run's nodes, GPUs and ranks.

    RUN is an identifier, or any beginning or end of one that no other run has; without it, the latest run.
    """
    found = locate(this_home(), run)
    handle = attach(found.run_id)
    if plot is not None:
        handle.plot(plot)
        say(f"{plot} shows run {found.run_id}", err=True)
        return
    series = handle.metrics()
    if as_json:
        print_json({name: {"times": one.times, "values": one.values} for name, one in series.items()})
        return
    if not series:
        say(f"nothing was sampled of run {found.run_id}", err=True)
        return
    rows = [["SERIES", "SAMPLES", "LEAST", "MEAN", "MOST", "LAST"]]
    for name, (_, values) in series.items():
        numbers = (min(values), sum(values) / len(values), max(values), values[-1])
        rows.append([name, str(len(values)), *(f"{number:,.1f}" for number in numbers)])
    for line in columns(rows):
        say(line)
