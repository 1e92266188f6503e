"""The command table of `sgpu`: each command's module and the first sentence of its help.

`LazyGroup` imports a command when it runs or shows its help: importing all commands takes 30 times as long as starting
Python. A test compares the table's sentences with the commands' own. Every command but `gpus` leaves the agent as it
is: none is started for looking.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import click

from serverless_gpu.cli.exit_codes import CANCELLED, exit_code
from serverless_gpu.errors import ServerlessGpuError, ServerNotConfigured
from serverless_gpu.lazy_import import load
from serverless_gpu.version import __version__

_ON_LINUX = frozenset({"doctor", "gpus", "join", "mlflow", "server", "top", "up"})
"""Commands that look at this machine as a node, or make it a server."""


class CommandEntry(NamedTuple):
    """One command of the table."""

    place: str  # ``"module:attribute"`` below `serverless_gpu.cli`
    summary: str  # the first sentence of its help


class LazyGroup(click.Group):
    """A group that imports its commands one by one from a table."""

    def __init__(self, *, table: Mapping[str, CommandEntry], **settings: Any) -> None:
        super().__init__(**settings)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, sorted."""
        return sorted({*self.table, *self.commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, imported by now; None for a name that is not in the table."""
        if cmd_name in self.table and cmd_name not in self.commands:
            module, _, attribute = self.table[cmd_name].place.partition(":")
            self.add_command(getattr(load(f"serverless_gpu.cli.{module}"), attribute), cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands for `--help`, without importing them."""
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names))
        summaries = {name: click.Command(name, help=entry.summary) for name, entry in self.table.items()}
        rows = [(name, {**summaries, **self.commands}[name].get_short_help_str(limit)) for name in names]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


COMMANDS = {
    "advise": CommandEntry(
        "planning.advise:advise_command",
        "Say how many GPUs to reserve, and which runs had more GPU than they used.",
    ),
    "attach": CommandEntry(
        "runs.run_actions:attach",
        "Show a run until it ends, as the call itself does; Ctrl-C leaves it to itself.",
    ),
    "audit": CommandEntry(
        "audit:audit",
        "See who did what on the server, keep a copy, and check that nobody has changed it.",
    ),
    "budget": CommandEntry(
        "budgets:budget",
        "List, make and delete budgets: money or GPU-hours per day, week or month.",
    ),
    "cancel": CommandEntry("runs.run_actions:cancel", "Stop a run and wait until its devices were handed back."),
    "clean": CommandEntry(
        "runs.run_actions:clean",
        "Delete directories of ended runs, with their results and logs, and copies of results of a server's runs.",
    ),
    "doctor": CommandEntry("doctor:doctor", "Look for what keeps runs from working here, and say what mends it."),
    "env": CommandEntry("environments:env", "Capture what Python sees, restore it elsewhere, and tell what changed."),
    "gpus": CommandEntry("this_machine:gpus", "List the GPUs and CPU slots of this node, and GPUs in quarantine."),
    "join": CommandEntry("join:join", "Make this machine a node of the pool of HOST, for as long as this runs."),
    "login": CommandEntry(
        "principals:login",
        "Use a server for remote calls from now on: its address and a token that it knows.",
    ),
    "logs": CommandEntry("runs.logs:logs", "Show what a run wrote: stdout on stdout, stderr on stderr."),
    "metrics": CommandEntry("runs.run_details:metrics", "Show what was sampled of a run's nodes, GPUs and ranks."),
    "mlflow": CommandEntry(
        "this_machine:mlflow",
        "Print the address of the MLflow server in front of this home's runs; start it if it is not running.",
    ),
    "node": CommandEntry("nodes:node", "Act on one machine of the server."),
    "nodes": CommandEntry(
        "nodes:nodes",
        "List the machines of the server: whether they answer, and what they have.",
    ),
    "policy": CommandEntry(
        "policies:policy",
        "List, make and attach usage policies: what runs have to have, and may ask for.",
    ),
    "pool": CommandEntry("pools:pool", "List, make and change pools."),
    "pools": CommandEntry("pools:pools", "List pools: their machines, what is free, and how many runs wait."),
    "price": CommandEntry("prices:price", "List, set and end prices."),
    "queue": CommandEntry(
        "pools:queue",
        "List runs that wait, in the order in which they are looked at: what for, for whom, until when.",
    ),
    "result": CommandEntry(
        "runs.results:result", "Copy what ranks returned to <rank>.pkl in a directory; prints the paths."
    ),
    "run": CommandEntry("runs.run_actions:run_group", "Look at one run, or act on it."),
    "runs": CommandEntry(
        "runs.run_table:runs", "List runs, newest first: those of this home, and those of the server if there is one."
    ),
    "secret": CommandEntry("secrets:secret", 'Set, list and delete secrets that runs get: secrets=["HF_TOKEN"].'),
    "server": CommandEntry("server:server_group", "Look after a server: its settings, its unit, its backups."),
    "share": CommandEntry("pools:share", "List and set who gets how much while others want devices, too."),
    "show": CommandEntry(
        "runs.run_details:show",
        "Show everything about one run: what was asked for, how it ended, its receipt, its files.",
    ),
    "simulate": CommandEntry(
        "planning.simulate:simulate_command",
        "Replay a trace on a cluster, and show what each scheduler makes of it.",
    ),
    "status": CommandEntry(
        "this_machine:status",
        "Show what the agent of this node keeps warm and looks after, and how the servers are if there are any.",
    ),
    "stop": CommandEntry(
        "this_machine:stop",
        "End the agent of this node and what it keeps warm, and the Ray of a server here; running attempts go on.",
    ),
    "submit": CommandEntry(
        "submit:submit",
        "Run a Python script (PROGRAM ends in .py), a module (-m) or any program; show its output to the end.",
    ),
    "team": CommandEntry("principals:team", "List, make and fill teams; a member may read the runs of a team."),
    "token": CommandEntry("principals:token", "Make, list and revoke tokens of a server."),
    "top": CommandEntry(
        "top:top",
        "Show what this node does now: each GPU, who has it, each run and its ranks; once a second.",
    ),
    "up": CommandEntry("server:up", "Start a server: a queue in front of this machine's GPUs, or a team's."),
    "usage": CommandEntry(
        "usage:usage",
        "Show what was used and what it cost, of yourself and your teams; an operator sees everybody's.",
    ),
    "user": CommandEntry("principals:user", "List, add and change users and services of a server."),
    "whoami": CommandEntry("principals:whoami", "Say who you are on the server, and what your role is."),
}


class _Commands(LazyGroup):
    """All commands. Ctrl-C is exit code 130 in each of them, and no word more than it has said itself."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; refuse one that needs Linux elsewhere."""
        if cmd_name in _ON_LINUX and sys.platform not in ("linux", "win32"):  # Windows: see `load`
            load("serverless_gpu.operating_system").require_linux(f"nodes and servers, which `sgpu {cmd_name}` is for,")
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the one that was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(CANCELLED)
        except ServerNotConfigured as error:
            if not error.is_missing:
                raise
            raise load("serverless_gpu.client.launch.remedies").no_server(f"sgpu {ctx.invoked_subcommand}") from None


@click.group(cls=_Commands, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="serverless-gpu")
def sgpu() -> None:
    """The function runtime for GPUs you own."""


def main() -> None:
    """Run the command; an error of ours is a message and an exit code, not a traceback."""
    try:
        sgpu(prog_name="sgpu")
    except (ServerlessGpuError, OSError) as error:  # OSError: a file or terminal that cannot be written to
        _end(error)
    except RuntimeError as error:
        threads = load("serverless_gpu.operating_system")
        if not threads.is_thread_limit(error):
            raise
        _end(threads.thread_limit())


def _end(error: ServerlessGpuError | OSError) -> NoReturn:
    load("serverless_gpu.cli.output").say_lines(f"sgpu: {error}", err=True)
    if isinstance(error, OSError):
        # Python writes at its end what stdout still holds, and exits with 120 where that fails again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(exit_code(error))
