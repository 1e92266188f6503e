"""`sgpu submit`: a script or a program as a run, watched until it ends or left to itself."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import msgspec

from serverless_gpu.cli.amounts import Seconds
from serverless_gpu.cli.exit_codes import exit_code
from serverless_gpu.cli.output import say
from serverless_gpu.cli.runs.failures import say_failure
from serverless_gpu.cli.submit.command_line import SubmitCommand, command_of
from serverless_gpu.cli.submit.dry_run import rehearse
from serverless_gpu.client.caller.interrupts import terminable
from serverless_gpu.client.decorator import parse_options
from serverless_gpu.client.launch.launch import launch_command
from serverless_gpu.client.launch.remedies import explain, no_server
from serverless_gpu.client.remote.environment_variables import elsewhere
from serverless_gpu.client.runs.run import Run
from serverless_gpu.errors import NoSuitableNode, ServerNotConfigured
from serverless_gpu.model.spec import Command, Priority, RunSpec

_OPTIONS = ("cpus", "memory", "pool", "team", "policy", "priority", "retries", "grace", "idle_timeout", "env")
_RANKS_ALL = "all"


@click.command(cls=SubmitCommand, context_settings={"allow_interspersed_args": False})
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs, one rank each.")
@click.option("--gpu-type", help="For example H100, or CPU for CPU slots.")
@click.option("--same-node", is_flag=True, help="Wait for one node with all of them; never several.")
@click.option("--per-node", is_flag=True, help="Start the program once per node, not once per rank: for torchrun.")
@click.option("--name", help="What the run is called; the program's name without it.")
@click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Repeatable.")
@click.option("--timeout", type=Seconds(), metavar="DURATION", help="Time limit from the first line on: 300, 5m, 2h.")
@click.option("--idle-timeout", type=Seconds(), metavar="DURATION", help="Stop it when its devices idled so long.")
@click.option("--grace", type=Seconds(), metavar="DURATION", help="Between SIGTERM and SIGKILL when it is stopped.")
@click.option("--retries", type=click.IntRange(min=0), help="New attempts after a failure.")
@click.option("--retry-on-infra", is_flag=True, help="New attempts, up to 3, after a GPU or a node failed.")
@click.option("--resume", is_flag=True, help="Continue as a new attempt after a preemption or the loss of a node.")
@click.option("--cpus", type=click.IntRange(min=1), help="Cores of the gang.")
@click.option("--memory", metavar="SIZE", help="Host memory limit of the gang, for example 64GiB.")
@click.option("--pool", help="Which nodes.")
@click.option("--team", help="Whose run it is, beside yours.")
@click.option("--policy", help="Which usage policy, where several apply.")
@click.option("--workdir", type=click.Path(exists=True, file_okay=False), help="Where it runs; default: here.")
@click.option("--env-var", "variables", multiple=True, metavar="KEY=VALUE", help="A variable it gets. Repeatable.")
@click.option("--secret", "secrets", multiple=True, metavar="NAME[=VARIABLE]", help="A secret it gets. Repeatable.")
@click.option("--priority", type=click.Choice([each.value for each in Priority], case_sensitive=False))
@click.option("--env", type=click.Choice(["live", "snapshot"]), help="What it imports; the server's place decides.")
@click.option("--ranks-log", default="0", show_default=True, metavar="N,…|all", help="Ranks whose output is shown.")
@click.option("--wait", is_flag=True, help="Queue it although no node known could ever serve it.")
@click.option("--local", is_flag=True, help="On this machine, without a server.")
@click.option("--detach", is_flag=True, help="Print the run's identifier, alone on stdout, and leave it to itself.")
@click.option("--dry-run", is_flag=True, help="Only say what would be asked for, and when it would start.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print JSON.")
def submit(program: str, arguments: Sequence[str], local: bool, detach: bool, **options: Any) -> None:
    """Run a Python script (PROGRAM ends in .py), a module (-m) or any program; show its output to the end.

    A file of the working directory is found without ./ before it. Everything after PROGRAM goes to it, a first --
    aside. Exit codes: 0 it succeeded; the program's own where that ended the run; 124 its time was up, 130 it was
    cancelled, 137 a signal or memory ended a rank, 75 the run or its node was lost or the server is away, 1 all else.
    """
    dry_run, as_json = options.pop("dry_run"), options.pop("as_json")
    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run; `sgpu show --json` has a run's own")
    _enter(options.pop("workdir"), options.pop("variables"), is_here=local)
    spec = _spec(program, arguments, remote=not local, options=options)
    if dry_run:
        with _in_words_of_the_shell(program):
            rehearse(spec, as_json=as_json)
        return
    if detach:
        say(_launched(spec, program, watch=False).id)
        return
    with terminable():
        error = _launched(spec, program, watch=True).follow(raises=False)
    if error is not None:
        say_failure(error)
    sys.exit(exit_code(error))


def _launched(spec: RunSpec, program: str, *, watch: bool) -> Run[None]:
    with _in_words_of_the_shell(program):
        return launch_command(spec, watch=watch)


@contextlib.contextmanager
def _in_words_of_the_shell(program: str) -> Iterator[None]:
    """Let a refusal name options as they are typed after `sgpu submit`."""
    try:
        yield
    except NoSuitableNode as error:
        explain(error, "command line")
        raise
    except ServerNotConfigured as error:
        if error.is_missing:
            typed = shlex.join(("sgpu", "submit", program))
            raise no_server(typed, f"`sgpu submit --local {shlex.quote(program)} …` needs none") from None
        raise


def _spec(program: str, arguments: Sequence[str], *, remote: bool, options: Mapping[str, Any]) -> RunSpec:
    argv, name = command_of(program, arguments, is_here=not remote)
    given = {name: options[name] for name in _OPTIONS if options.get(name) is not None}
    secrets = [pair.partition("=")[::2] for pair in options["secrets"]]
    given |= {"secrets": {name: variable or None for name, variable in secrets}} if secrets else {}
    given |= {name: options[name] for name in ("resume", "retry_on_infra", "same_node", "wait")}
    for pair in options["tags"]:
        if "=" not in pair:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--tag")
    tags = dict(pair.split("=", 1) for pair in options["tags"])
    given |= {"tags": tags, "ranks_log": _ranks(options["ranks_log"])}
    spec = parse_options(options["gpus"], options["gpu_type"], remote, options["timeout"], given)
    if isinstance(spec.ranks_log, tuple) and not any(rank < options["gpus"] for rank in spec.ranks_log):
        raise click.BadParameter(f"the run has ranks 0 to {options['gpus'] - 1}", param_hint="--ranks-log")
    command = Command(argv=argv, per="node" if options["per_node"] else "rank")
    return msgspec.structs.replace(spec, payload=command, name=options["name"] or name)


def _enter(workdir: str | None, variables: Sequence[str], *, is_here: bool) -> None:
    """Enter the ranks' working directory and variables in this process, which ranks inherit."""
    for pair in variables:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--env-var")
        if not is_here and not elsewhere({name: value}):
            raise click.BadParameter(
                f"{name} does not travel to other machines; set it in the program", param_hint="--env-var"
            )
        os.environ[name] = value
    if workdir is not None:
        os.chdir(workdir)
        os.environ["PWD"] = os.getcwd()


def _ranks(text: str) -> str | tuple[int, ...]:
    if text == _RANKS_ALL:
        return text
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither 'all' nor ranks", param_hint="--ranks-log") from None
