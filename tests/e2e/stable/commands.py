"""Sections of the surface: `sgpu` with all commands, arguments and options, exit codes, settings of a server."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import click
from click.testing import CliRunner

Sections = dict[str, dict[str, str]]


def sections() -> Sections:
    """Return what users type in a shell, and what they can set for a server."""
    found: Sections = {}
    for words, command in _commands(root(), click.Context(root(), info_name="sgpu", resilient_parsing=True)):
        arguments = [one for one in command.params if isinstance(one, click.Argument)]
        lines = {name: f"place {number}, {line}" for number, (name, line) in enumerate(map(_parameter, arguments))}
        options = map(_parameter, (one for one in command.params if one not in arguments))
        found[f"command {words}"] = {**lines, **dict(options)}
    settings = CliRunner().invoke(root(), ["server", "config", "--json"], catch_exceptions=False)
    found["server settings"] = {row["name"]: f"default {row['value']!r}" for row in json.loads(settings.output)}
    return found


def root() -> click.Group:
    """Return the command that the entry point `sgpu` runs."""
    group: list[click.Command] = []
    _run_entry_point(lambda self: group.append(self))
    assert isinstance(group[0], click.Group)
    return group[0]


def exit_code(error: BaseException) -> int:
    """Return the exit code of `sgpu` for a command that raises an error."""

    def fail(_: click.Command) -> None:
        raise error

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            _run_entry_point(fail)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code
    raise AssertionError(f"sgpu ended well although {error!r} was raised")


def _run_entry_point(instead: Callable[[click.Command], None]) -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="sgpu")
    with mock.patch.object(click.Command, "main", lambda self, *_, **__: instead(self)):
        entry.load()()


def _commands(command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    """Yield every command, renamed ones by their old names, too: they work for a release."""
    yield context.command_path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                yield from _commands(inner, _below(context, inner, name))
        for name in getattr(command, "renamed", ()):
            yield f"{context.command_path} {name}", _resolved(command, context, [name])


def _resolved(command: click.Command, context: click.Context, arguments: list[str]) -> click.Command:
    while arguments and isinstance(command, click.Group):
        name, found, arguments = command.resolve_command(context, arguments)
        assert found is not None and name is not None
        command, context = found, _below(context, found, name)
    return command


def _below(context: click.Context, command: click.Command, name: str) -> click.Context:
    return click.Context(command, info_name=name, parent=context, resilient_parsing=True)


def _parameter(parameter: click.Parameter) -> tuple[str, str]:
    names = sorted(parameter.opts, key=len)
    if isinstance(parameter, click.Argument):
        name = str(parameter.human_readable_name)
    else:
        name = " ".join(names) + "".join(f"/{other}" for other in parameter.secondary_opts)
    words = ["switch" if getattr(parameter, "is_flag", False) else _type(parameter.type)]
    if parameter.required:
        words.append("required")
    if parameter.multiple if isinstance(parameter, click.Option) else parameter.nargs != 1:
        words.append("repeatable")
    default: Any = parameter.default
    if isinstance(default, str | int | float) and not isinstance(default, bool):
        words.append(f"default {default!r}")
    return name, ", ".join(words)


def _type(kind: Any) -> str:
    if isinstance(kind, click.Choice):
        return "one of " + " ".join(sorted(json.dumps(str(getattr(value, "value", value))) for value in kind.choices))
    return str(kind.name)
