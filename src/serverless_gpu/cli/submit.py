"""`sgpu submit`: submits a script or program as a run and follows the run by default.

    sgpu submit --gpus 2 train.py --lr 1     a script: this Python runs it
    sgpu submit -m pkg.train --lr 1          a module: `python -m`, found in the working directory first
    sgpu submit job.sh                       a file of the working directory, or a program of PATH

The command validates the command line before submitting the run. A mistyped option, a program name with a leading dash,
or a missing script or module raises an error. The command also raises an error if checks on this machine show that the
ranks cannot find the program.

`--dry-run` prints the request, the server, and the estimated start and cost. A dry run sends only an estimate request.
If the server would reject the run, the dry run prints the known values. A rejected dry run exits with the message and
exit code of the rejected submission. If no node can ever execute the run, the dry run exits with 1. If the server is
unreachable, the dry run prints an unknown start and the reason.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import msgspec

from serverless_gpu.ambient import format_utc
from serverless_gpu.cli.amounts import Seconds
from serverless_gpu.cli.completion import complete_policy, complete_pool, complete_team
from serverless_gpu.cli.exit_codes import exit_code
from serverless_gpu.cli.output import JsonType, json_option, print_json, say, say_failure
from serverless_gpu.client.caller_context import terminable, variables_elsewhere
from serverless_gpu.client.decorator import parse_options
from serverless_gpu.client.estimating import Estimate, estimate_run
from serverless_gpu.client.launch import snapshot_environment
from serverless_gpu.client.launch.launch import launch_command
from serverless_gpu.client.launch.remedies import explain, no_server
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.client.runs.run import Run
from serverless_gpu.environment.service_messages import StoreLocation
from serverless_gpu.errors import EnvironmentProblem, NoSuitableNode, ServerNotConfigured, ServerUnavailable
from serverless_gpu.lazy_import import load
from serverless_gpu.model.spec import Command, Priority, RunSpec, check_command
from serverless_gpu.node.base.home import Home, find_home
from serverless_gpu.node.supervisor.rank_environment import program_path

_OPTIONS = ("cpus", "memory", "pool", "team", "policy", "priority", "retries", "grace", "idle_timeout", "env")
_RANKS_ALL = "all"
_SUBMITTING = "serverless_gpu.client.remote.submission"
_SHORT = 12
_NEVER = 1  # Exit code for a run that no node can execute.
_ENVIRONMENT_TEXTS = {
    "live": "this machine's files, without a copy",
    "auto": "this machine's files if this machine is the server's only node, or a snapshot otherwise",
}
MODULE = "-m"
_HEAD_BYTES = 256
_SHELL = "/bin/sh"
# Options of other launchers, mapped to sgpu options.
_KNOWN_ELSEWHERE = {
    "nproc-per-node": "--gpus",
    "nproc": "--gpus",
    "num-gpus": "--gpus",
    "num-processes": "--gpus",
    "gpus-per-node": "--gpus",
    "ntasks": "--gpus",
    "gres": "--gpus",
    "n": "--gpus",
    "gpu": "--gpus",
    "accelerator": "--gpu-type",
    "partition": "--pool",
    "queue": "--pool",
    "job-name": "--name",
    "time": "--timeout",
    "mem": "--memory",
    "cpus-per-task": "--cpus",
    "chdir": "--workdir",
    "cwd": "--workdir",
    "working-dir": "--workdir",
    "export": "--env-var",
    "e": "--env-var",
    "module": "-m",
}


class SubmitCommand(click.Command):
    """Click command whose options end at the program or at `-m`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options. Raise UsageError for an unknown option, and suggest the most similar option."""
        end = self._end_of_options(ctx, args)
        try:
            return super().parse_args(
                ctx, [*args[:end], "--", *args[end:]] if args[end : end + 1] == [MODULE] else args
            )
        except click.NoSuchOption as error:
            raise click.UsageError(self._unknown(error.option_name), ctx) from None

    def _end_of_options(self, ctx: click.Context, args: Sequence[str]) -> int:
        """Return the index of the first argument after the sgpu options."""
        takes_value = {
            name
            for parameter in self.get_params(ctx)
            if isinstance(parameter, click.Option) and not parameter.is_flag
            for name in parameter.opts
        }
        index = 0
        while index < len(args) and args[index].startswith("--") and args[index] != "--":
            index += 2 if args[index] in takes_value else 1
        return index

    def _unknown(self, name: str) -> str:
        options = [
            opt for each in self.params if isinstance(each, click.Option) for opt in each.opts if opt.startswith("--")
        ]
        bare = name.lstrip("-").replace("_", "-")
        known = _KNOWN_ELSEWHERE.get(bare)
        close = [known] if known else difflib.get_close_matches(f"--{bare}", options, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        return (
            f"sgpu submit has no option {name}: {meant}Put sgpu options before the program, and options of the "
            "program after it"
        )


@click.command(cls=SubmitCommand, context_settings={"allow_interspersed_args": False})
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="Number of GPUs, with one rank each."
)
@click.option("--gpu-type", help="GPU type, for example H100, or CPU for CPU slots.")
@click.option("--same-node", is_flag=True, help="Run all ranks on one node.")
@click.option(
    "--per-node",
    is_flag=True,
    help="Start the program once per node instead of once per rank, for example for torchrun.",
)
@click.option("--name", help="Name of the run (default: the program's name).")
@click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Tag of the run. Repeatable.")
@click.option(
    "--timeout",
    type=Seconds(),
    metavar="DURATION",
    help="Time limit of the program, such as 300, 5m or 2h.",
)
@click.option(
    "--idle-timeout",
    type=Seconds(),
    metavar="DURATION",
    help="Stop the run after its devices have been idle for this time.",
)
@click.option("--grace", type=Seconds(), metavar="DURATION", help="Time between SIGTERM and SIGKILL for a stopped run.")
@click.option("--retries", type=click.IntRange(min=0), help="Maximum number of new attempts after a failure.")
@click.option("--retry-on-infra", is_flag=True, help="Start up to 3 new attempts after a failure of a GPU or node.")
@click.option("--resume", is_flag=True, help="Continue as a new attempt after a preemption or the loss of a node.")
@click.option("--cpus", type=click.IntRange(min=1), help="CPU cores of the gang.")
@click.option("--memory", metavar="SIZE", help="Host memory limit of the gang, for example 64GiB.")
@click.option("--pool", help="Pool of the run.", shell_complete=complete_pool)
@click.option("--team", help="Team to which the run belongs.", shell_complete=complete_team)
@click.option("--policy", help="Usage policy of the run, if several policies apply.", shell_complete=complete_policy)
@click.option(
    "--workdir",
    type=click.Path(exists=True, file_okay=False),
    help="Working directory of the ranks (default: the current directory).",
)
@click.option(
    "--env-var",
    "variables",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set an environment variable in the ranks. Repeatable.",
)
@click.option("--secret", "secrets", multiple=True, metavar="NAME[=VARIABLE]", help="Secret for the ranks. Repeatable.")
@click.option("--priority", type=click.Choice([each.value for each in Priority], case_sensitive=False))
@click.option(
    "--env",
    type=click.Choice(["live", "snapshot"]),
    help="Python environment of the ranks (default: the server's choice).",
)
@click.option(
    "--ranks-log", default="0", show_default=True, metavar="N,…|all", help="Ranks whose output the command prints."
)
@click.option("--wait", is_flag=True, help="Queue the run even if no current node can execute the run.")
@click.option("--local", is_flag=True, help="Run on this machine, without a server.")
@click.option("--detach", is_flag=True, help="Print only the run identifier and exit without following the run.")
@click.option("--dry-run", is_flag=True, help="Print the request and its estimated start without submitting a run.")
@json_option(JsonType("cli.json_types:DryRun"), text="Print the result of --dry-run as JSON.")
def submit(program: str, arguments: Sequence[str], local: bool, detach: bool, **options: Any) -> None:
    """Run a script or a program on GPUs.

    PROGRAM is a Python script (*.py), a module (-m NAME) or an executable program. The program receives all arguments
    after PROGRAM, without a leading --. The command prints the run's output until the run ends.

    The command exits with 0 for success, or with the program's own exit code. Exit code 124 means that the run timed
    out. Exit code 130 means that the run was cancelled. Exit code 137 means that a signal or the out-of-memory killer
    ended a rank. Exit code 75 means that the run, its node or the server is lost. Exit code 1 means that the run failed
    for another reason.
    """
    dry_run, as_json = options.pop("dry_run"), options.pop("as_json")
    if as_json and not dry_run:
        raise click.UsageError("--json requires --dry-run. For a submitted run, use `sgpu show --json`")
    _enter(options.pop("workdir"), options.pop("variables"), is_here=local)
    spec = _spec(program, arguments, remote=not local, options=options)
    if dry_run:
        with _command_line_syntax(program):
            print_dry_run(spec, as_json=as_json)
        return
    if detach:
        say(_launch(spec, program, watch=False).id)
        return
    with terminable():
        error = _launch(spec, program, watch=True).follow(raises=False)
    if error is not None:
        say_failure(error)
    sys.exit(exit_code(error))


def _launch(spec: RunSpec, program: str, *, watch: bool) -> Run[None]:
    with _command_line_syntax(program):
        return launch_command(spec, watch=watch)


@contextlib.contextmanager
def _command_line_syntax(program: str) -> Iterator[None]:
    """Rewrite error messages in the syntax of `sgpu submit`."""
    try:
        yield
    except NoSuitableNode as error:
        explain(error, "command line")
        raise
    except ServerNotConfigured as error:
        if error.is_missing:
            typed = shlex.join(("sgpu", "submit", program))
            raise no_server(
                typed, f"to run without a server, use `sgpu submit --local {shlex.quote(program)} …`"
            ) from None
        raise


def _spec(program: str, arguments: Sequence[str], *, remote: bool, options: Mapping[str, Any]) -> RunSpec:
    argv, name = command_of(program, arguments, is_here=not remote)
    given = {name: options[name] for name in _OPTIONS if options.get(name) is not None}
    secrets = [pair.partition("=")[::2] for pair in options["secrets"]]
    given |= {"secrets": {name: variable or None for name, variable in secrets}} if secrets else {}
    given |= {name: options[name] for name in ("resume", "retry_on_infra", "same_node", "wait")}
    for pair in options["tags"]:
        if "=" not in pair:
            raise click.BadParameter(f"{pair!r} does not have the form KEY=VALUE", param_hint="--tag")
    tags = dict(pair.split("=", 1) for pair in options["tags"])
    given |= {"tags": tags, "ranks_log": _ranks(options["ranks_log"])}
    spec = parse_options(options["gpus"], options["gpu_type"], remote, options["timeout"], given)
    if isinstance(spec.ranks_log, tuple) and not any(rank < options["gpus"] for rank in spec.ranks_log):
        raise click.BadParameter(f"the run has ranks 0 to {options['gpus'] - 1}", param_hint="--ranks-log")
    command = Command(argv=argv, per="node" if options["per_node"] else "rank")
    return msgspec.structs.replace(spec, payload=command, name=options["name"] or name)


def _enter(workdir: str | None, variables: Sequence[str], *, is_here: bool) -> None:
    """Set the working directory and environment variables in this process, so that ranks inherit both."""
    for pair in variables:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{pair!r} does not have the form KEY=VALUE", param_hint="--env-var")
        if not is_here and not variables_elsewhere({name: value}):
            raise click.BadParameter(
                f"{name} cannot be passed to other machines. Set the variable in the program", param_hint="--env-var"
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
        raise click.BadParameter(f"{text!r} is neither 'all' nor a list of ranks", param_hint="--ranks-log") from None


class _RankEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """Python environment of the ranks."""

    environment: str  # Mode of the environment: ``"live"``, ``"snapshot"``, or ``"auto"`` for the server's choice.
    snapshot: str = ""  # Address of an existing snapshot; "" if the run captures a new snapshot.

    @property
    def text(self) -> str:
        """Return a human-readable description of the environment."""
        if self.environment in _ENVIRONMENT_TEXTS:
            return _ENVIRONMENT_TEXTS[self.environment]
        if self.snapshot:
            return f"existing snapshot {self.snapshot[:_SHORT]} of this environment"
        return "a new snapshot of this environment"


def print_dry_run(spec: RunSpec, *, as_json: bool) -> None:
    """Print a run request and its estimated start.

    If the server would reject the run, raise the server's error.
    """
    command = spec.payload
    assert isinstance(command, Command)
    check_command(command)
    home = find_home(os.environ)
    url = find_profile(home.root, os.environ).url if spec.remote else ""
    spec, imported = _resolve(home, spec)
    if as_json:
        estimate = estimate_run(spec)
        print_json(_as_json(spec, url, imported, estimate))
    else:
        for line in _request_lines(spec, command, url, imported):
            say(line)
        estimate = estimate_run(spec)
        for line in _estimate_lines(estimate):
            say(line)
    if estimate.impossible:
        sys.exit(_NEVER)


def _resolve(home: Home, spec: RunSpec) -> tuple[RunSpec, _RankEnvironment]:
    """Return the request with server defaults. Do not wait for an unreachable server."""
    if not spec.remote:
        return spec, _rank_environment(home, spec.environment, None)
    server = load("serverless_gpu.client.remote.server").server_of(home.root, os.environ)
    try:
        server.version(patiently=False)
        choice = load(_SUBMITTING).choose_pool(spec, os.environ, functools.partial(server.pools, patiently=False))
        environment = load(_SUBMITTING).environment_of(spec, server)
    except ServerUnavailable:
        return spec, _RankEnvironment(environment=spec.environment)
    return choice.applied(spec), _rank_environment(home, environment, server.store())


def _rank_environment(home: Home, environment: str, store: StoreLocation | None) -> _RankEnvironment:
    """Return the ranks' environment without capturing a snapshot."""
    if environment != "snapshot":
        return _RankEnvironment(environment=environment)
    with contextlib.suppress(EnvironmentProblem):  # An actual submission reports the problem.
        recognition = snapshot_environment.Recognition(home, capture=False, store=store)
        try:
            wanted = recognition.wanted()
        finally:
            recognition.close()
        return _RankEnvironment(environment=environment, snapshot=wanted.snapshot if wanted is not None else "")
    return _RankEnvironment(environment=environment)


def _request_lines(spec: RunSpec, command: Command, url: str, imported: _RankEnvironment) -> Iterator[str]:
    """Yield the lines of the request, including relevant defaults."""
    resources = spec.resources
    per = "process per node" if command.per == "node" else "process per GPU"
    yield f"would run: {shlex.join(command.argv)}"
    yield f"called: {spec.name}"
    some = "GPU" if resources.gpus == 1 else "GPUs"
    place = ", all on one node" if resources.same_node else ""
    yield f"on: {resources.gpus} {resources.gpu_type or f'{some} of the only available type'}, one {per}{place}"
    yield f"where: {url}, pool {spec.pool or 'any on-demand one'}" if spec.remote else "where: this machine"
    if spec.remote:
        policy = f", policy {spec.policy}" if spec.policy else ""
        yield f"class: {Priority(spec.priority).value}{f', team {spec.team}' if spec.team else ''}{policy}"
    yield f"imports: {imported.text}"
    usual = msgspec.to_builtins(RunSpec())
    said = {"name", "resources", "payload", "remote", "environment", "pool", "priority", "team", "policy"}
    wished = {name: value for name, value in msgspec.to_builtins(spec).items() if name not in {*said, "spec_version"}}
    parts = [f"{name}={value}" for name, value in wished.items() if value != usual[name]]
    parts += [f"{name}={value}" for name in ("cpus", "memory_bytes") if (value := getattr(resources, name, None))]
    yield f"further: {' · '.join(parts) or 'nothing'}"


def _estimate_lines(estimate: Estimate) -> Iterator[str]:
    """Yield the lines of an estimate from the server or this machine."""
    yield f"would start: {estimate.start_text()}"
    if estimate.policy:
        yield f"under policy: {estimate.policy}"
    if estimate.cost is not None:
        yield f"would cost: {estimate.cost}"
    yield from (f"from budget: {budget}" for budget in estimate.budgets)


def _as_json(spec: RunSpec, url: str, imported: _RankEnvironment, estimate: Estimate) -> dict[str, object]:
    start = estimate.start
    return {
        "submitted": False,
        "server": url or None,
        "imports": imported.environment,
        "snapshot": imported.snapshot or None,
        "spec": spec,
        "estimate": {
            "start": None if start is None else format_utc(round(start.timestamp() * 1e9)),
            "seconds": estimate.seconds,
            "is_bound": estimate.is_bound,
            "basis": estimate.basis,
            "node": estimate.node,
            "nodes": estimate.nodes,
            "place": estimate.place,
            "impossible": estimate.impossible,
            "cost": estimate.cost,
            "policy": estimate.policy,
            "budgets": estimate.budgets,
        },
    }


def command_of(program: str, arguments: Sequence[str], *, is_here: bool) -> tuple[tuple[str, ...], str]:
    """Return the command line and the program name.

    With `is_here`, raise an error if this machine lacks the program.
    """
    if program == MODULE:
        return _module_command(arguments)
    rest = tuple(arguments[1:] if arguments[:1] == ("--",) else arguments)
    if program.startswith("-"):
        raise click.UsageError(
            f"the program {program} must not begin with a dash. For a file with this name, write ./{program}"
        )
    if program.endswith(".py"):
        if not Path(program).is_file():
            raise click.UsageError(f"the file {program!r} does not exist")
        return (sys.executable, program, *rest), Path(program).name
    script = rest[0] if rest else ""
    if Path(program).name.startswith("python") and script.endswith(".py") and not Path(script).is_file():
        raise click.UsageError(f"the file {script!r} does not exist")
    return (*_program(program, is_here=is_here), *rest), Path(program).name


def _module_command(arguments: Sequence[str]) -> tuple[tuple[str, ...], str]:
    if not arguments or arguments[0].startswith("-"):
        raise click.UsageError("-m requires a module name, for example: sgpu submit -m pkg.train")
    module = arguments[0]
    if not _has_module(module):
        raise click.UsageError(
            f"python -m cannot find the module {module!r} in {os.getcwd()} or among the installed packages"
        )
    return (sys.executable, MODULE, *arguments), module


def _has_module(name: str) -> bool:
    """Return True if `python -m` finds a module. Do not import the module."""
    first, *inner = name.split(".")
    spec = PathFinder.find_spec(first, [os.getcwd()]) or _find_installed(first)
    for position in range(1, len(inner) + 1):
        places = spec.submodule_search_locations if spec is not None else None
        if places is None:
            return False
        spec = PathFinder.find_spec(".".join((first, *inner[:position])), list(places))
    if spec is not None and spec.submodule_search_locations is not None:
        spec = PathFinder.find_spec(f"{name}.__main__", list(spec.submodule_search_locations))
    return spec is not None


def _find_installed(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except (ImportError, ValueError):  # ValueError: an invalid module name, or a module without a spec.
        return None


def _program(program: str, *, is_here: bool) -> tuple[str, ...]:
    """Return the program of a command line, preceded by an interpreter if necessary."""
    path = program_path(os.environ.get("PATH", os.defpath), sys.executable)
    if os.sep not in program and shutil.which(program, path=path) is not None:
        return (program,)
    if not Path(program).is_file():
        is_ours = os.sep in program and not os.path.isabs(
            program
        )  # Other machines get a copy of the working directory.
        if is_here or is_ours:
            raise click.UsageError(f"the program {program!r} exists neither in PATH nor in {os.getcwd()}")
        return (program,)
    file = program if os.sep in program else os.path.join(os.curdir, program)
    if os.access(file, os.X_OK):
        return (file,)
    return (*_interpreter(file), file)


def _interpreter(path: str) -> tuple[str, ...]:
    """Return the interpreter in a script's first line, or the shell for a script without an interpreter."""
    with open(path, "rb") as file:
        line = file.read(_HEAD_BYTES).partition(b"\n")[0]
    if line.startswith(b"#!"):
        return tuple(shlex.split(os.fsdecode(line[2:]))) or (_SHELL,)
    if path.endswith(".sh"):
        return (_SHELL,)
    raise click.UsageError(f"{path} is not executable. Run chmod +x {path}")
