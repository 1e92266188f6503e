"""`sgpu doctor`: finds faults of this machine and environment, and their remedies."""

from __future__ import annotations

import importlib.util
import os
import sys

import click

from serverless_gpu.cli.output import say

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "unknown": "magenta"}


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
    # By name, and only now: the doctor's modules would be a fifth of what every other command takes to start.
    examination = importlib.import_module("serverless_gpu.doctor.examination")
    report, has_failed = examination.examine(limit, as_json=as_json, paint=_paint)
    for line in report:
        say(line)
    sys.exit(1 if has_failed else 0)


def _paint(word: str, outcome: str) -> str:
    return word if "NO_COLOR" in os.environ else click.style(word, fg=_COLOURS[outcome])
