"""Compares what a command prints with `--json` with the type that it declares."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_args, get_origin, is_typeddict

import click
import msgspec

from serverless_gpu.cli import program
from serverless_gpu.cli.help import json_type_of
from serverless_gpu.cli.json_types import LogLine


def check_json(arguments: Sequence[str], output: str) -> None:
    """Fail unless the output of a command has the type that its `--json` declares, and no key beside it.

    `sgpu server logs` prints one JSON value on each line.
    """
    command: click.Command = program.sgpu
    context = click.Context(command, resilient_parsing=True)
    rest = list(arguments)
    while isinstance(command, click.Group):
        _, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command, context = found, click.Context(found, parent=context, resilient_parsing=True)
    json_type = json_type_of(command)
    assert json_type is not None, f"{command.name} declares no type of its JSON"
    for text in output.splitlines() if json_type == LogLine else [output]:
        value = json.loads(text)
        msgspec.convert(value, json_type)
        _refuse_undeclared(value, json_type)


def _refuse_undeclared(value: Any, declared: Any) -> None:
    if is_typeddict(declared):
        undeclared = set(value) - set(declared.__annotations__)
        assert not undeclared, f"{declared.__name__} does not declare {undeclared}"
    elif get_origin(declared) is list:
        for each in value:
            _refuse_undeclared(each, get_args(declared)[0])
