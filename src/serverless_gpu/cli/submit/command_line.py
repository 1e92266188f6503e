"""The command line of `sgpu submit`: the end of its own options, and the program.

    sgpu submit --gpus 2 train.py --lr 1     a script: this Python runs it
    sgpu submit -m pkg.train --lr 1          a module: `python -m`, found in the working directory first
    sgpu submit job.sh                       a file of the working directory, or a program of PATH

Usage errors, before anything is queued: a mistyped option before the program, a program that begins with a dash, a
missing script or module, and a program that ranks could not find, where that can be seen here.
"""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

import click

from serverless_gpu.node.supervisor.rank_environment import program_path

MODULE = "-m"

_HEAD_BYTES = 256
_SHELL = "/bin/sh"

# What launchers of neighbours call it.
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
    """A command whose options end at the program, or at `-m`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options; an unknown option is a usage error that suggests the nearest one."""
        end = self._end_of_options(ctx, args)
        try:
            return super().parse_args(
                ctx, [*args[:end], "--", *args[end:]] if args[end : end + 1] == [MODULE] else args
            )
        except click.NoSuchOption as error:
            raise click.UsageError(self._unknown(error.option_name), ctx) from None

    def _end_of_options(self, ctx: click.Context, args: Sequence[str]) -> int:
        """Return the index of the first word that is no option of ours, and no value of one."""
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
        return f"there is no option {name}: {meant}Options of sgpu come before the program, the program's after it"


def command_of(program: str, arguments: Sequence[str], *, is_here: bool) -> tuple[tuple[str, ...], str]:
    """Return the command and its name; `is_here` also refuses a program that is not on this machine."""
    if program == MODULE:
        return _module_command(arguments)
    rest = tuple(arguments[1:] if arguments[:1] == ("--",) else arguments)
    if program.startswith("-"):
        raise click.UsageError(f"a program cannot begin with a dash: {program}. For a file of that name: ./{program}")
    if program.endswith(".py"):
        if not Path(program).is_file():
            raise click.UsageError(f"there is no file {program!r}")
        return (sys.executable, program, *rest), Path(program).name
    script = rest[0] if rest else ""
    if Path(program).name.startswith("python") and script.endswith(".py") and not Path(script).is_file():
        raise click.UsageError(f"there is no file {script!r}")
    return (*_program(program, is_here=is_here), *rest), Path(program).name


def _module_command(arguments: Sequence[str]) -> tuple[tuple[str, ...], str]:
    if not arguments or arguments[0].startswith("-"):
        raise click.UsageError("-m needs a module: sgpu submit -m pkg.train")
    module = arguments[0]
    if not _has_module(module):
        raise click.UsageError(
            f"there is no module {module!r} that python -m could run, in {os.getcwd()} or installed here"
        )
    return (sys.executable, MODULE, *arguments), module


def _has_module(name: str) -> bool:
    """Return whether `python -m` finds a module, without importing it."""
    first, *inner = name.split(".")
    spec = PathFinder.find_spec(first, [os.getcwd()]) or _installed(first)
    for position in range(1, len(inner) + 1):
        places = spec.submodule_search_locations if spec is not None else None
        if places is None:
            return False
        spec = PathFinder.find_spec(".".join((first, *inner[:position])), list(places))
    if spec is not None and spec.submodule_search_locations is not None:
        spec = PathFinder.find_spec(f"{name}.__main__", list(spec.submodule_search_locations))
    return spec is not None


def _installed(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except (ImportError, ValueError):  # ValueError: not a valid name, or a module without a spec
        return None


def _program(program: str, *, is_here: bool) -> tuple[str, ...]:
    """Return a program's start: a name in the ranks' PATH, or a file of the working directory by path."""
    path = program_path(os.environ.get("PATH", os.defpath), sys.executable)
    if os.sep not in program and shutil.which(program, path=path) is not None:
        return (program,)
    if not Path(program).is_file():
        is_ours = os.sep in program and not os.path.isabs(program)  # on another machine it is a copy of this directory
        if is_here or is_ours:
            raise click.UsageError(f"there is no program {program!r} in PATH, and no such file in {os.getcwd()}")
        return (program,)
    file = program if os.sep in program else os.path.join(os.curdir, program)
    if os.access(file, os.X_OK):
        return (file,)
    return (*_interpreter(file), file)


def _interpreter(path: str) -> tuple[str, ...]:
    """Return the interpreter of a non-executable script: its first line's, else the shell."""
    with open(path, "rb") as file:
        line = file.read(_HEAD_BYTES).partition(b"\n")[0]
    if line.startswith(b"#!"):
        return tuple(shlex.split(os.fsdecode(line[2:]))) or (_SHELL,)
    if path.endswith(".sh"):
        return (_SHELL,)
    raise click.UsageError(f"{path} is not executable: chmod +x {path}")
