"""The reference names what the code has: options, reasons, errors, variables, commands."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import click
import pytest

from serverless_gpu import cli, errors
from serverless_gpu.client.decorator import distributed
from serverless_gpu.model.attempt import MEANINGS, State
from serverless_gpu.model.spec import Options

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))

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


@pytest.mark.parametrize("command", sorted(cli.sgpu.commands))
def test_every_command_is_in_the_readme(command: str) -> None:
    assert f"$ sgpu {command}" in README


@pytest.mark.parametrize("command", sorted(cli.sgpu.commands))
def test_every_command_is_in_the_reference(command: str) -> None:
    assert re.search(rf"^\| `sgpu {command}[ `]", REFERENCE, re.MULTILINE)


COMMAND_OPTIONS = [
    (command.name, name)
    for command in cli.sgpu.commands.values()
    for option in command.params
    if isinstance(option, click.Option)
    for name in (*option.opts, *option.secondary_opts)
]


@pytest.mark.parametrize(("command", "option"), COMMAND_OPTIONS)
def test_every_option_of_a_command_is_in_its_rows_of_the_reference(command: str, option: str) -> None:
    rows = re.findall(rf"^\| `sgpu {command}(?: [^`]*)?` \| (.*?) \| ", REFERENCE, re.MULTILINE)
    assert any(re.search(rf"`{option}[ `]", row) for row in rows), f"`{option}` of sgpu {command}"
