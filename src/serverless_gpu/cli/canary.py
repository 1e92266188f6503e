"""`sgpu node canary`: starts a run that tries to break out, and reports each attempt.

With NODE, the server requests the canary in the isolation level of the node's pool. With `--pool`, the server does the
same for all nodes of a pool. Otherwise, the canary tests this machine without a server.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from urllib.parse import quote

import click

from serverless_gpu.ambient import SystemClock, format_moment
from serverless_gpu.cli.completion import complete_node, complete_pool
from serverless_gpu.cli.exit_codes import FAILED
from serverless_gpu.cli.output import json_option, print_json, print_table, say, wide_option
from serverless_gpu.cli.runs.run_location import this_home
from serverless_gpu.cli.server_connection import server
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.errors import InvalidValue, NotFound, ServerNotConfigured, ServerProblem
from serverless_gpu.lazy_import import load
from serverless_gpu.model.canary import CanaryReport, CanaryRow, count
from serverless_gpu.model.isolation import LEVELS, Level
from serverless_gpu.wire.canary import CanaryRequest, CanaryView
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.nodes import NodeList, NodeView

_ANSWERED_S = 300.0
_LOOK_S = 0.5
_WITHOUT_RUNS = ("PENDING", "REVOKED", "GONE")


@click.command()
@click.argument("name", metavar="[NODE]", required=False, default="", shell_complete=complete_node)
@click.option("--pool", default="", metavar="NAME", help="Test all nodes of a pool.", shell_complete=complete_pool)
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    help="Isolation level of the run (default: the strongest level of this machine). Only for this machine.",
)
@wide_option
@json_option(CanaryReport | tuple[CanaryReport, ...], text="Print JSON: a report, or a list of reports with --pool.")
def canary(name: str, pool: str, level: Level | None, wide: bool, as_json: bool) -> None:
    """Test the isolation of a node.

    The canary starts two ordinary runs of scratch principals on the node. One run tries to break out: it tries to reach
    the other run, the node and the server. For each attempt, the report contains the result "refused", "possible" or
    "unknown". A refusal counts only if the same attempt succeeds without isolation. Otherwise, the result is unknown.

    With NODE or --pool, the server requests the canary in the isolation level of the pool. Only then does the run also
    try to reach the other nodes, and Ray on all nodes. Otherwise, the canary tests this machine. As root, the canary
    proves more refusals.

    The command exits with 1 if an attempt is possible that the isolation level must refuse.
    """
    if name and pool:
        raise click.UsageError("give either NODE or --pool")
    if (name or pool) and level is not None:
        raise click.UsageError("the pool determines the isolation level. Use --level without NODE and --pool")
    if pool:
        reports = _on_pool(pool)
    else:
        reports = (_through_server(name) if name else _on_this_machine(level),)
    if as_json:
        print_json(reports if pool else reports[0])
    elif pool:
        _print_pool(reports, wide=wide)
    else:
        _print(reports[0], wide=wide)
    if any(report.failed for report in reports):
        sys.exit(FAILED)


def _through_server(name: str) -> CanaryReport:
    with server() as connection:
        path = _path(name)
        asked = connection.ask("POST", path, CanaryRequest(), answer=CanaryView)
        report = _awaited(connection, {path: asked.id}).get(path)
    if report is None:
        raise ServerProblem(
            f"{name} did not report about its canary within {_ANSWERED_S:.0f} s",
            hint="read the log of the node's uplink",
        )
    return report


def _on_pool(pool: str) -> tuple[CanaryReport, ...]:
    """Run the canary on all nodes of a pool. A node that cannot be tested has a report with the problem."""
    with server() as connection:
        found = connection.ask("GET", "/nodes", answer=NodeList).nodes
        nodes = [node for node in found if node.pool == pool and node.state not in _WITHOUT_RUNS]
        if not nodes:
            raise NotFound(f"pool {pool!r} has no node that can run anything", hint="list the nodes: sgpu node list")
        reports: dict[str, CanaryReport] = {}
        asked: dict[str, str] = {}
        for node in nodes:
            path = _path(node.id)
            try:
                asked[path] = connection.ask("POST", path, CanaryRequest(), answer=CanaryView).id
            except (InvalidValue, NotFound) as error:
                reports[path] = _untested(node, error.message)
        reports |= _awaited(connection, asked)
    late = f"the node did not report within {_ANSWERED_S:.0f} s"
    return tuple(reports.get(_path(node.id)) or _untested(node, late) for node in nodes)


def _path(node: str) -> str:
    return f"/nodes/{quote(node, safe='')}/canary"


def _untested(node: NodeView, problem: str) -> CanaryReport:
    at_ns = SystemClock().wall_ns()
    return CanaryReport(node=node.name, level=node.isolation, at_ns=at_ns, version=node.version, problem=problem)


def _awaited(connection: Connection, asked: Mapping[str, str]) -> dict[str, CanaryReport]:
    """Return the reports of requests by path, without those that do not arrive in time."""
    reports: dict[str, CanaryReport] = {}
    clock = SystemClock()
    deadline_ns = clock.boottime_ns() + round(_ANSWERED_S * 1e9)
    while len(reports) < len(asked) and clock.boottime_ns() < deadline_ns:
        for path in asked.keys() - reports.keys():
            view = connection.ask("GET", path, answer=CanaryView)
            if view.report is not None and view.id == asked[path]:
                reports[path] = view.report
        if len(reports) < len(asked):
            time.sleep(_LOOK_S)
    return reports


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


def _print_pool(reports: Sequence[CanaryReport], *, wide: bool) -> None:
    """Print one line for each node, with the attempts that succeeded and must not."""
    rows = []
    for report in reports:
        possible = [row for row in report.rows if row.verdict == "possible"]
        required = [row.attempt for row in possible if row.required]
        counts = [count(report.rows, "refused"), len(required), len(possible) - len(required)]
        remark = report.problem or ", ".join(required)
        rows.append([report.node, report.level, *map(str, counts), str(count(report.rows, "unknown")), remark])
    print_table(["NODE", "ISOLATION", "REFUSED", "POSSIBLE", "OPEN", "UNKNOWN", "REMARK"], rows, wide=wide)
    failed = [report.node for report in reports if report.failed]
    if failed:
        say(f"{len(failed)} of {len(reports)} nodes failed. Test one for details: sgpu node canary {failed[0]}")
    else:
        say(f"all {len(reports)} nodes refuse each attempt that their isolation level must refuse")


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
