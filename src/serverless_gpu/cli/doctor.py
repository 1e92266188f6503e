"""`sgpu doctor`: diagnoses problems of this machine and its Python environment, and suggests remedies."""

from __future__ import annotations

import importlib.util
import os
import sys

import click

from serverless_gpu.cli.output import JsonType, json_option, say

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "unknown": "magenta"}


@click.command()
@json_option(JsonType("cli.json_types:DoctorReport"))
@click.option(
    "--limit",
    type=click.FloatRange(min=0.1, max=600),
    default=8.0,
    show_default=True,
    metavar="SECONDS",
    help="Maximum duration of each check.",
)
def doctor(as_json: bool, limit: float) -> None:
    """Find what prevents runs on this machine.

    The command checks this machine, the agent, the GPUs, and the Python environment that runs sgpu. `sgpu doctor`
    starts no agent. `sgpu doctor` exits with 1 if a check failed. Warnings and unknown results do not change the exit
    code.
    """
    # Importing the doctor's modules at the top of this file would slow the start of every command by a fifth.
    examination = importlib.import_module("serverless_gpu.doctor.examination")
    report, has_failed = examination.examine(limit, as_json=as_json, paint=_paint)
    for line in report:
        say(line)
    sys.exit(1 if has_failed else 0)


def _paint(word: str, outcome: str) -> str:
    return word if "NO_COLOR" in os.environ else click.style(word, fg=_COLOURS[outcome])
