"""The reference names what the code has: options, reasons, errors, variables, commands."""

from __future__ import annotations

import inspect
import re

import click
import pytest

from serverless_gpu import errors
from serverless_gpu.cli import program
from serverless_gpu.client.decorator import distributed
from serverless_gpu.model.lifecycle.attempt import MEANINGS, State
from serverless_gpu.model.spec import Options
from tests.support.paths import REPOSITORY

REFERENCE = (REPOSITORY / "docs" / "reference.md").read_text(encoding="utf-8")
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "src").rglob("*.py"))

OPTIONS = sorted({*inspect.signature(distributed).parameters, *Options.__annotations__} - {"options"})
ERRORS = [value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__]


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_in_the_reference(option: str) -> None:
    assert f"`{option}`" in REFERENCE


@pytest.mark.parametrize("reason", sorted(MEANINGS))
def test_every_reason_is_in_the_reference_with_its_state_and_sentence(reason: str) -> None:
    meaning = next(meaning for known, meaning in MEANINGS.items() if known == reason)
    assert f"| `{reason}` | {meaning.state} | {meaning.sentence} |" in REFERENCE


@pytest.mark.parametrize("state", State)
def test_every_state_is_in_the_reference(state: State) -> None:
    assert state.value in REFERENCE


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_every_error_is_in_the_reference_with_its_code(error: type[errors.ServerlessGpuError]) -> None:
    assert f"| `{error.__name__}` | `{error.code}` |" in REFERENCE


def test_every_variable_is_in_the_reference() -> None:
    assert {name for name in re.findall(r'"(SERVERLESS_GPU_[A-Z_]+)"', SOURCE) if f"`{name}`" not in REFERENCE} == set()


@pytest.mark.parametrize("command", sorted(program.COMMANDS))
def test_every_command_is_in_the_readme(command: str) -> None:
    assert f"$ sgpu {command}" in README


@pytest.mark.parametrize("command", sorted(program.COMMANDS))
def test_every_command_is_in_the_reference(command: str) -> None:
    assert re.search(rf"^\| `sgpu {command}[ `]", REFERENCE, re.MULTILINE)


def _leaves(group: click.Group, above: str = "") -> list[tuple[str, click.Command]]:
    """Return every command that does something, with its whole name."""
    found = []
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            found += _leaves(command, f"{above}{name} ")
        else:
            found.append((f"{above}{name}", command))
    return found


COMMANDS = _leaves(program.sgpu)
COMMAND_OPTIONS = [
    (name, option_name)
    for name, command in COMMANDS
    for option in command.params
    if isinstance(option, click.Option)
    for option_name in (*option.opts, *option.secondary_opts)
]


@pytest.mark.parametrize("command", [name for name, _ in COMMANDS])
def test_every_command_of_a_group_is_in_the_reference(command: str) -> None:
    assert re.search(rf"^\| `sgpu {command}[ `]", REFERENCE, re.MULTILINE)


@pytest.mark.parametrize(("command", "option"), COMMAND_OPTIONS)
def test_every_option_of_a_command_is_in_its_rows_of_the_reference(command: str, option: str) -> None:
    rows = re.findall(r"^\| (`sgpu [^|]*) \| (.*?) \| ", REFERENCE, re.MULTILINE)
    assert any(_is_about(names, command) and re.search(rf"`{option}[ `]", options) for names, options in rows), (
        f"`{option}` of sgpu {command}"
    )


def _is_about(names: str, command: str) -> bool:
    """Return whether a row is about a command: `sgpu env show [ADDRESS]`, or one of `sgpu env show`, `capture`."""
    first, *others = re.findall(r"`([^`]*)`", names)
    group = first.rpartition(" ")[0]
    return any(re.match(rf"sgpu {command}( |$)", name) for name in (first, *(f"{group} {other}" for other in others)))
