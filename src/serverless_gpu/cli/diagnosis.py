"""`sgpu doctor`: what is wrong with this machine or environment, and what mends it."""

from __future__ import annotations

import os
import sys

import click
import msgspec

from serverless_gpu.doctor.findings import Outcome
from serverless_gpu.doctor.gathering import gather
from serverless_gpu.doctor.report import as_builtins, has_failed, lines
from serverless_gpu.doctor.table import judge

_COLOURS = {Outcome.OK: "green", Outcome.WARNING: "yellow", Outcome.FAILED: "red", Outcome.UNKNOWN: "magenta"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--limit",
    type=click.FloatRange(min=0.1, max=600),
    default=8.0,
    show_default=True,
    metavar="SECONDS",
    help="How long each look may take.",
)
def doctor(as_json: bool, limit: float) -> None:
    """Look for what keeps runs from working here, and say what mends it.

    Looks at this machine, the agent, GPUs, and the environment of the interpreter that sgpu belongs to, and starts no
    agent. Ends with 1 when a check failed, else with 0; a warning or an unknown is no failure.
    """
    facts = gather(os.environ, limit)
    judged = judge(facts)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(as_builtins(judged, facts.python)), indent=2).decode())
    else:
        for line in lines(judged, _paint):
            click.echo(line)
    sys.exit(1 if has_failed(judged) else 0)


def _paint(word: str, outcome: Outcome) -> str:
    return word if "NO_COLOR" in os.environ else click.style(word, fg=_COLOURS[outcome])
