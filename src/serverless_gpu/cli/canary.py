"""`sgpu node canary`: starts a run that tries to break out, and reports each attempt.

sgpu node canary NODE    through the server, in the isolation level of the node's pool
sgpu node canary         on this machine, without a server
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from urllib.parse import quote

import click

from serverless_gpu.ambient import SystemClock, format_moment
from serverless_gpu.cli.completion import complete_node
from serverless_gpu.cli.exit_codes import FAILED
from serverless_gpu.cli.output import json_option, print_json, print_table, say, wide_option
from serverless_gpu.cli.runs.run_location import this_home
from serverless_gpu.cli.server_connection import server
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.errors import ServerNotConfigured, ServerProblem
from serverless_gpu.lazy_import import load
from serverless_gpu.model.canary import CanaryReport, CanaryRow, count
from serverless_gpu.model.isolation import LEVELS, Level
from serverless_gpu.wire.canary import CanaryRequest, CanaryView

_ANSWERED_S = 300.0
_LOOK_S = 0.5


@click.command()
@click.argument("name", metavar="[NODE]", required=False, default="", shell_complete=complete_node)
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    help="Isolation level of the run (default: the strongest level of this machine). Only without NODE.",
)
@wide_option
@json_option(CanaryReport)
def canary(name: str, level: Level | None, wide: bool, as_json: bool) -> None:
    """Test the isolation of a node.

    The canary starts two ordinary runs of scratch principals on the node. One run tries to break out: it tries to reach
    the other run, the node and the server. For each attempt, the report contains the result "refused", "possible" or
    "unknown". A refusal counts only if the same attempt succeeds without isolation. Otherwise, the result is unknown.

    With NODE, the server requests the canary in the isolation level of the node's pool. Without NODE, the canary tests
    this machine. As root, the canary proves more refusals.

    The command exits with 1 if an attempt is possible that the isolation level must refuse.
    """
    if name and level is not None:
        raise click.UsageError("the node's pool determines the isolation level. Use --level without NODE")
    report = _through_server(name) if name else _on_this_machine(level)
    if as_json:
        print_json(report)
    else:
        _print(report, wide=wide)
    if report.failed:
        sys.exit(FAILED)


def _through_server(name: str) -> CanaryReport:
    path, clock = f"/nodes/{quote(name, safe='')}/canary", SystemClock()
    deadline_ns = clock.boottime_ns() + round(_ANSWERED_S * 1e9)
    with server() as connection:
        asked = connection.ask("POST", path, CanaryRequest(), answer=CanaryView)
        while clock.boottime_ns() < deadline_ns:
            view = connection.ask("GET", path, answer=CanaryView)
            if view.report is not None and view.id == asked.id:
                return view.report
            time.sleep(_LOOK_S)
    raise ServerProblem(
        f"{name} did not report about its canary within {_ANSWERED_S:.0f} s", hint="read the log of the node's uplink"
    )


def _on_this_machine(level: Level | None) -> CanaryReport:
    home = this_home()
    examination = load("serverless_gpu.node.canary.examination")
    wanted = level or load("serverless_gpu.node.spawner.client").find_spawner(os.environ).measure().level
    services: dict[str, str] = {}
    with contextlib.suppress(ServerNotConfigured):  # Without a server, attempts on a server have no target.
        services = load("serverless_gpu.node.canary.targets").server_address(find_profile(home.root, os.environ).url)
    tested = examination.Examination(socket.gethostname(), wanted, services)
    report: CanaryReport = examination.examine_alone(home, SystemClock(), tested, os.environ)
    return report


def _print(report: CanaryReport, *, wide: bool) -> None:
    if report.problem:
        say(f"the canary could not test {report.node}: {report.problem}")
        return
    head = ["GROUP", "RESULT", "ATTEMPT", "MEASURE", "REMARK"]
    rows = [[row.group, _result(row), row.text, row.measure, _remark(row)] for row in report.rows]
    print_table(head, rows, wide=wide)
    possible = [row for row in report.rows if row.verdict == "possible"]
    required = sum(row.required for row in possible)
    say(
        f"{report.node} at isolation {report.level}, {format_moment(report.at_ns)}, version {report.version}: "
        f"{len(report.rows)} attempts, {count(report.rows, 'refused')} refused, {required} possible, "
        f"{len(possible) - required} open, {count(report.rows, 'unknown')} unknown"
    )
    if len(possible) > required:
        say(f'"open": isolation {report.level} does not claim to refuse the attempt')
    if required:
        say(f"isolation {report.level} does not refuse {required} attempts that it must refuse. See REMARK")


def _result(row: CanaryRow) -> str:
    return row.verdict if row.required or row.verdict != "possible" else "open"


def _remark(row: CanaryRow) -> str:
    """Return the remedy of a possible attempt, or the reason of an unknown result."""
    if row.verdict == "possible":
        return row.remedy if row.required else ""
    return row.detail if row.verdict == "unknown" else ""
