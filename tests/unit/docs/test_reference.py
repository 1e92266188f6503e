"""The reference names what the code has: options, reasons, errors, variables, renamed commands."""

from __future__ import annotations

import inspect
import re

import click
import pytest

from serverless_gpu import errors
from serverless_gpu.cli import program
from serverless_gpu.cli.command_group import LazyGroup
from serverless_gpu.client.decorator import distributed
from serverless_gpu.model.lifecycle.attempt import MEANINGS, State
from serverless_gpu.model.spec import Options
from tests.support.paths import REPOSITORY

REFERENCE = (REPOSITORY / "docs" / "reference.md").read_text(encoding="utf-8")
COMMANDS_PAGE = (REPOSITORY / "docs" / "api" / "command-line.md").read_text(encoding="utf-8")
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
    assert f"\n- `{error.__name__}` (`{error.code}`): " in REFERENCE


def test_every_variable_is_in_the_reference() -> None:
    assert {name for name in re.findall(r'"(SERVERLESS_GPU_[A-Z_]+)"', SOURCE) if f"`{name}`" not in REFERENCE} == set()


def test_every_section_of_commands_is_on_the_page_of_commands() -> None:
    shown = re.findall(r"^## (.+)\n\n```\{commands\} (.+)\n```$", COMMANDS_PAGE, re.MULTILINE)
    assert shown == [(title, title) for title in program.SECTIONS]


def test_every_renamed_command_is_in_the_reference() -> None:
    rows = re.findall(r"^\| `sgpu ([^`]+)` \| `sgpu ([^`]+)` \|$", REFERENCE, re.MULTILINE)
    assert dict(rows) == _renamed(program.sgpu)


def _renamed(group: LazyGroup, above: str = "") -> dict[str, str]:
    """Return the old name and the path now of every renamed command."""
    found = {f"{above}{old}": new for old, new in group.renamed.items()}
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, LazyGroup):
            found |= _renamed(command, f"{above}{name} ")
    return found
