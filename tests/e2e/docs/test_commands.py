"""Commands in console blocks exist, with the options used: `sgpu`, `make`, and scripts of this repository."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from serverless_gpu.cli import program
from tests.support.docs.pages import commands, pages
from tests.support.paths import REPOSITORY

COMMANDS = [
    pytest.param(command, id=f"{path.relative_to(REPOSITORY)}: {command}")
    for path in pages()
    for command in commands(path.read_text(encoding="utf-8"))
]
TARGETS = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_pages_exist(command: str) -> None:
    assert _wrong(command) == ""


def _wrong(command: str) -> str:
    """Return what is wrong with a command line, "" when nothing is known to be."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words.pop(0)
    match words:
        case ["sgpu", *arguments]:
            return _wrong_sgpu(program.sgpu, arguments)
        case ["make", target, *_]:
            return "" if target in TARGETS else f"make has no target {target}"
        case [("python" | ".venv/bin/python"), path, *_] if path.startswith(("examples/", "scripts/")):
            return "" if (REPOSITORY / path).exists() else f"there is no {path}"
    return ""


def _wrong_sgpu(command: click.Command, arguments: list[str]) -> str:
    options = {"-h", "--help"} | {name for option in command.params for name in option.opts}
    taking = {name for p in command.params if isinstance(p, click.Option) and not p.is_flag for name in p.opts}
    places = sum(99 if p.nargs < 0 else p.nargs for p in command.params if isinstance(p, click.Argument))
    words = iter(arguments)
    for word in words:
        if word in (">", "|"):
            break  # what follows is the shell's
        name = word.partition("=")[0]
        if word.startswith("-"):
            if name not in options:
                return f"{command.name} has no option {name}"
            if name in taking and "=" not in word:
                next(words, None)
        elif isinstance(command, click.Group):
            found = command.get_command(click.Context(command), word)
            return f"{command.name} has no command {word}" if found is None else _wrong_sgpu(found, list(words))
        else:
            places -= 1
            if not command.context_settings.get("allow_interspersed_args", True):
                break  # what follows is another program's
    return f"{command.name} does not take so many arguments" if places < 0 else ""


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("sgpu status", ""),
        ("SERVERLESS_GPU_FAKE=H100:8 sgpu cancel 01abc  # words", ""),
        ("sgpu --version", ""),
        ("sgpu start", "sgpu has no command start"),
        ("sgpu status --verbose", "status has no option --verbose"),
        ("sgpu cancel 1 2", "cancel does not take so many arguments"),
        ("sgpu submit --gpus 8 train.py --lr 3e-4", ""),
        ("sgpu submit --lr 3e-4 train.py", "submit has no option --lr"),
        ("make tea", "make has no target tea"),
        ("make demo", ""),
        ("python examples/gone.py", "there is no examples/gone.py"),
        ("pip install -e .", ""),
    ],
)
def test_a_wrong_command_is_found(command: str, wrong: str) -> None:
    assert _wrong(command) == wrong
