"""The commands of `sgpu`.

    node.py      status · gpus · stop             what this machine keeps warm and lends
    mlflow_server.py  mlflow                      the MLflow server in front of this home's runs
    top/         top                              what this node does, live
    runs.py      runs · show · cancel             run directories, and the runs behind them
    attending.py attach · run                     being there while one goes on, asking one to make room
    logs.py      logs                             what ranks wrote
    results.py   result                           what ranks returned, as files
    metrics.py   metrics                          what was sampled of a run
    cleaning.py  clean                            deleting run directories
    simulate.py  simulate                         schedulers, side by side, on a trace
    advise.py    advise                           how many GPUs to reserve, and who had too many
    diagnosis.py doctor                           what is wrong here, and what mends it
    environments/ env                             what Python sees: captured, restored, compared
    server/      up · login · token · user · …    a server, who one is there, and its machines

Every command but `gpus` leaves the agent as it is: none is started for looking.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from serverless_gpu.cli.advise import advise_command
from serverless_gpu.cli.attending import attach, run_group
from serverless_gpu.cli.cleaning import clean
from serverless_gpu.cli.diagnosis import doctor
from serverless_gpu.cli.environments import env
from serverless_gpu.cli.logs import logs
from serverless_gpu.cli.metrics import metrics
from serverless_gpu.cli.mlflow_server import mlflow
from serverless_gpu.cli.node import gpus, status, stop
from serverless_gpu.cli.output import say_lines
from serverless_gpu.cli.results import result
from serverless_gpu.cli.runs import cancel, runs, show
from serverless_gpu.cli.server.audit import audit
from serverless_gpu.cli.server.budgets import budget
from serverless_gpu.cli.server.dividing import pool, pools, queue, share
from serverless_gpu.cli.server.exit_codes import CANCELLED
from serverless_gpu.cli.server.join import join
from serverless_gpu.cli.server.logbook import server_logs
from serverless_gpu.cli.server.machines import node, nodes
from serverless_gpu.cli.server.node_rules import node_commands
from serverless_gpu.cli.server.operating import server_group
from serverless_gpu.cli.server.people import login, team, user, whoami
from serverless_gpu.cli.server.policies import policy
from serverless_gpu.cli.server.prices import price
from serverless_gpu.cli.server.secrets import secret
from serverless_gpu.cli.server.submitting import submit
from serverless_gpu.cli.server.tokens import token
from serverless_gpu.cli.server.up import up
from serverless_gpu.cli.server.usage import usage
from serverless_gpu.cli.simulate import simulate_command
from serverless_gpu.cli.top.command import top
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.version import __version__


class _Commands(click.Group):
    """All commands. Ctrl-C is exit code 130 in each of them, and no word more than it has said itself."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the one that was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(CANCELLED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="serverless-gpu")
def sgpu() -> None:
    """The function runtime for GPUs you own."""


for _command in (
    advise_command,
    attach,
    cancel,
    clean,
    doctor,
    env,
    gpus,
    logs,
    metrics,
    mlflow,
    price,
    result,
    run_group,
    runs,
    show,
    simulate_command,
    status,
    stop,
):
    sgpu.add_command(_command)
for _command in (
    audit,
    budget,
    login,
    node,
    nodes,
    join,
    policy,
    pool,
    pools,
    queue,
    secret,
    server_group,
    share,
    submit,
    team,
    token,
    top,
    up,
    usage,
    user,
    whoami,
):
    sgpu.add_command(_command)
server_group.add_command(server_logs)
for _command in node_commands:
    node.add_command(_command)


def main() -> None:
    """Run the command; an error of ours is a message and exit code 1, not a traceback."""
    try:
        sgpu(prog_name="sgpu")
    except (ServerlessGpuError, OSError) as error:  # OSError: a file or terminal that cannot be written to
        say_lines(f"sgpu: {error}", err=True)
        sys.exit(1)
