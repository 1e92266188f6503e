"""`sgpu`: command tables, error handling and exit codes.

`sgpu gpus` starts an agent. Other commands that only show state start no process.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import click

from serverless_gpu.cli.command_group import CommandEntry, LazyGroup
from serverless_gpu.cli.exit_codes import CANCELLED, USAGE, exit_code
from serverless_gpu.errors import ServerlessGpuError, ServerNotConfigured
from serverless_gpu.lazy_import import load
from serverless_gpu.version import __version__

_ON_LINUX = frozenset({"doctor", "down", "gpus", "join", "mlflow", "server", "top", "up"})
"""Commands that use this machine as a node or server."""

_QUEUE = CommandEntry("pools:queue", "List waiting runs in queue order.")

RUN_COMMANDS = {
    "attach": CommandEntry("runs.run_actions:attach", "Follow a run until it ends."),
    "cancel": CommandEntry("runs.run_actions:cancel", "Stop a run and wait for its devices."),
    "list": CommandEntry("runs.run_table:runs", "List runs, newest first."),
    "logs": CommandEntry("runs.logs:logs", "Print the output of a run."),
    "metrics": CommandEntry("runs.run_details:metrics", "Show the telemetry of a run."),
    "preempt": CommandEntry("runs.run_actions:preempt", "Ask a run to yield its devices."),
    "queue": _QUEUE,
    "result": CommandEntry("runs.results:result", "Copy the results of ranks to files."),
    "show": CommandEntry("runs.run_details:show", "Show everything about one run."),
    "submit": CommandEntry("submit:submit", "Run a script or a program on GPUs."),
}
"""Subcommands of `sgpu run`. Most subcommands also have a short name, such as `sgpu logs`."""

run = LazyGroup(name="run", table=RUN_COMMANDS, help="List, show, follow and cancel runs.")

COMMANDS = {
    "advise": CommandEntry("planning.advise:advise_command", "Recommend how many GPUs to reserve."),
    "attach": RUN_COMMANDS["attach"],
    "audit": CommandEntry("access.audit:audit", "List, export and verify the audit log."),
    "budget": CommandEntry("money.budgets:budget", "List, set and delete budgets."),
    "cancel": RUN_COMMANDS["cancel"],
    "clean": CommandEntry("runs.run_actions:clean", "Delete directories of ended runs."),
    "completion": CommandEntry("help:completion", "Print the completion script of a shell."),
    "doctor": CommandEntry("doctor:doctor", "Find what prevents runs on this machine."),
    "down": CommandEntry("server:down", "Stop the server of this home."),
    "env": CommandEntry("environments:env", "Capture, restore and compare environments."),
    "gpus": CommandEntry("this_machine:gpus", "List the GPUs and CPU slots of this machine."),
    "help": CommandEntry("help:help_command", "Show the help of a command."),
    "index": CommandEntry("access.indexes:index", "List, set and delete package indexes."),
    "join": CommandEntry("join:join", "Make this machine a node of a server."),
    "login": CommandEntry("access.sign_in:login", "Log in to a server."),
    "logout": CommandEntry("access.principals:logout", "Delete this home's server address and token."),
    "logs": RUN_COMMANDS["logs"],
    "metrics": RUN_COMMANDS["metrics"],
    "mlflow": CommandEntry("this_machine:mlflow", "Start MLflow's server and print its address."),
    "node": CommandEntry("nodes:node", "List, drain and invite nodes."),
    "policy": CommandEntry("access.policies:policy", "List, set and attach usage policies."),
    "pool": CommandEntry("pools:pool", "List, set and delete pools."),
    "price": CommandEntry("money.prices:price", "List, set and end prices."),
    "queue": _QUEUE,
    "result": RUN_COMMANDS["result"],
    "run": CommandEntry("program:run", "List, show, follow and cancel runs."),
    "runs": RUN_COMMANDS["list"],
    "schema": CommandEntry("help:schema", "Print the JSON schema of `--json` output."),
    "secret": CommandEntry("access.secrets:secret", "List, set and delete secrets for runs."),
    "server": CommandEntry("server:server_group", "Configure, drain and back up a server."),
    "session": CommandEntry("access.sign_in:session", "List and end sessions of browsers."),
    "share": CommandEntry("pools:share", "List, set and delete fair-share weights."),
    "show": RUN_COMMANDS["show"],
    "simulate": CommandEntry("planning.simulate:simulate_command", "Replay a trace on a simulated cluster."),
    "status": CommandEntry("this_machine:status", "Show the agent, MLflow and the server."),
    "stop": CommandEntry("this_machine:stop", "Stop the agent of this machine."),
    "submit": RUN_COMMANDS["submit"],
    "team": CommandEntry("access.principals:team", "List, create, change and delete teams."),
    "token": CommandEntry("access.principals:token", "List, create and revoke tokens."),
    "top": CommandEntry("top:top", "Show GPUs, runs and ranks, live."),
    "up": CommandEntry("server:up", "Start a server in the foreground."),
    "usage": CommandEntry("money.usage:usage", "Report usage and cost."),
    "user": CommandEntry("access.principals:user", "List, create, change and delete users."),
    "version": CommandEntry("help:version", "Print the version."),
    "web": CommandEntry("access.sign_in:web", "Open the web pages in a browser."),
    "whoami": CommandEntry("access.principals:whoami", "Show your name, role and teams."),
}

SHORT_NAMES = frozenset(name for name, entry in COMMANDS.items() if entry in RUN_COMMANDS.values())
"""Top-level commands that are also subcommands of `sgpu run`."""

SECTIONS = {
    "Runs": ("submit", "run", "runs", "queue", "show", "logs", "attach", "cancel", "result", "metrics"),
    "This machine": ("status", "gpus", "top", "doctor", "clean", "mlflow", "stop"),
    "Server": ("up", "down", "server", "login", "logout", "web"),
    "Nodes and pools": ("node", "pool", "share", "join"),
    "People and access": ("whoami", "user", "team", "token", "session", "secret", "policy", "audit"),
    "Money": ("usage", "budget", "price"),
    "Environments": ("env", "index"),
    "Planning": ("advise", "simulate"),
    "Help": ("help", "version", "completion", "schema"),
}

RENAMED = {"nodes": "node list", "pools": "pool list"}
"""Old command names, mapped to the current command paths."""


class _Commands(LazyGroup):
    """Group of all `sgpu` commands. After Ctrl-C, a command exits with 130."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command. Raise an error if the command needs Linux and this machine does not run Linux."""
        # On Windows, `load` already raises an error for node and server commands.
        if cmd_name in _ON_LINUX and sys.platform not in ("linux", "win32"):
            load("serverless_gpu.operating_system").require_linux(f"nodes and servers (`sgpu {cmd_name}`)")
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that the arguments name."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(CANCELLED)
        except ServerNotConfigured as error:
            if not error.is_missing:
                raise
            raise load("serverless_gpu.client.launch.remedies").no_server(f"sgpu {ctx.invoked_subcommand}") from None


@click.group(
    cls=_Commands,
    table=COMMANDS,
    sections=SECTIONS,
    renamed=RENAMED,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="serverless-gpu")
@click.pass_context
def sgpu(ctx: click.Context) -> None:
    """The function runtime for GPUs you own."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """Run the command, and report each error of this package as a message and an exit code."""
    try:
        status = sgpu.main(prog_name="sgpu", standalone_mode=False)
    except (ServerlessGpuError, OSError) as error:  # OSError: a file or terminal is not writable.
        _end(error)
    except click.exceptions.Abort:
        sys.exit(CANCELLED)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        status = 0
    except click.ClickException as error:
        _refuse(error)
    except RuntimeError as error:
        threads = load("serverless_gpu.operating_system")
        if not threads.is_thread_limit(error):
            raise
        _end(threads.thread_limit())
    if isinstance(status, int) and status:
        sys.exit(status)


def _refuse(error: click.ClickException) -> NoReturn:
    """Print a command line error and the matching help command."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    lines = [f"sgpu: {error.format_message()}"]
    if context is not None:
        lines.append(f"hint: {context.command_path} --help")
    load("serverless_gpu.cli.output").say_lines("\n".join(lines), err=True)
    sys.exit(USAGE if isinstance(error, click.UsageError) else error.exit_code)


def _end(error: ServerlessGpuError | OSError) -> NoReturn:
    load("serverless_gpu.cli.output").say_lines(f"sgpu: {error}", err=True)
    if isinstance(error, OSError):
        # Python flushes stdout at exit and would exit with 120 if the flush failed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(exit_code(error))
