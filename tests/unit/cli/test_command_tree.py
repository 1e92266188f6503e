"""Every command has a help that fits, a section, `--json` or a reason, and completion."""

from __future__ import annotations

import click
import msgspec
import pytest

from serverless_gpu.cli import program
from serverless_gpu.cli.command_group import HELP_CHARACTERS_MAX, LazyGroup, leaf_commands
from serverless_gpu.cli.help import find_command, json_type_of

WITHOUT_JSON = {
    "prints a stream until it ends": {"attach", "logs", "join", "node spawner", "up"},
    "changes something and confirms it": {
        "budget delete",
        "budget reopen",
        "budget set",
        "cancel",
        "clean",
        "down",
        "index delete",
        "index set",
        "login",
        "logout",
        "node approve",
        "node drain",
        "node forget",
        "node invite",
        "node quarantine",
        "node release",
        "node resume",
        "node revoke",
        "node rotate",
        "policy attach",
        "policy delete",
        "policy detach",
        "policy set",
        "pool delete",
        "pool set",
        "run preempt",
        "secret delete",
        "secret set",
        "session end",
        "server drain",
        "server resume",
        "server rotate",
        "share delete",
        "share set",
        "stop",
        "team create",
        "team delete",
        "team join",
        "team leave",
        "team set",
        "token revoke",
        "user delete",
        "user password",
        "user set",
    },
    "writes files, and prints one line": {"audit export", "audit verify", "server backup", "server restore"},
    "checks files, and exits with 1 otherwise": {"server verify"},
    "prints text in another format": {"completion", "help", "schema", "server unit", "node unit", "version"},
    "opens a page, or prints its address": {"web"},
}
"""Commands without `--json`, by the reason."""

FREE = {
    "address": "an address of a snapshot: the store may be a bucket",
    "amount": "a number",
    "arguments": "arguments of the user's program",
    "command": "a command, which the shell completes in its own place",
    "first": "an address of a snapshot",
    "gpu": "a number or a uuid",
    "host": "an address",
    "identifier": "a token",
    "resource": "a GPU type",
    "second": "an address of a snapshot",
    "store": "an address or a directory",
    "url": "an address",
    "weight": "a number",
}
"""Arguments that nothing can complete, with what they are."""
NEW_NAMES = {"budget set", "node invite", "policy set", "secret set", "team create", "user create", "share set"}
"""Commands whose NAME may be new."""


ROOT = click.Context(program.sgpu, info_name="sgpu")


def command_at(path: tuple[str, ...]) -> click.Command:
    """Return the command at a path."""
    return find_command(ROOT, path)[0]


LEAVES = sorted(tuple(context.command_path.split()[1:]) for _, context in leaf_commands(program.sgpu, ROOT))


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_the_one_line_help_is_a_short_sentence(path: tuple[str, ...]) -> None:
    text = command_at(path).get_short_help_str(200)
    assert len(text) <= HELP_CHARACTERS_MAX, text
    assert text[0].isupper() and text.endswith(".")


def test_every_command_is_in_one_section_of_the_help() -> None:
    shown = [name for names in program.SECTIONS.values() for name in names]
    assert sorted(shown) == sorted(program.COMMANDS)


def test_the_list_of_commands_fits_eighty_columns() -> None:
    text = program.sgpu.get_help(click.Context(program.sgpu, info_name="sgpu", terminal_width=80))
    assert max(map(len, text.splitlines())) <= 80
    assert "..." not in text.replace("[ARGS]...", "")


def test_every_command_prints_json_or_has_a_reason_not_to() -> None:
    without = {" ".join(path) for path in LEAVES if json_type_of(command_at(path)) is None}
    reasoned = set().union(*WITHOUT_JSON.values())
    assert {path for path in without if not {path, path.removeprefix("run ")} & reasoned} == set()
    assert reasoned <= without


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_the_json_of_a_command_has_a_schema(path: tuple[str, ...]) -> None:
    json_type = json_type_of(command_at(path))
    has_option = any("--json" in parameter.opts for parameter in command_at(path).params)
    assert has_option == (json_type is not None)
    if json_type is not None:
        assert msgspec.json.schema(json_type)


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_argument_is_completed_or_free(path: tuple[str, ...]) -> None:
    for argument in command_at(path).params:
        if not isinstance(argument, click.Argument) or argument.name in FREE:
            continue
        completes = argument._custom_shell_complete is not None
        assert completes or isinstance(argument.type, (click.Path, click.Choice)) or " ".join(path) in (
            NEW_NAMES | {"submit", "run submit", "share delete"}
        ), argument.name  # fmt: skip


def test_one_verb_deletes() -> None:
    assert {path for path in LEAVES if path[-1] in ("remove", "rm", "del")} == set()


def test_a_name_and_its_plural_are_the_same_command() -> None:
    names = set(program.COMMANDS)
    assert {name for name in names if f"{name}s" in names} == {"run"}
    assert program.COMMANDS["runs"] == program.RUN_COMMANDS["list"]


@pytest.mark.parametrize(
    "group", [program.sgpu, command_at(("user",)), command_at(("team",)), command_at(("share",))], ids=str
)
def test_a_renamed_command_leads_to_one_that_exists(group: LazyGroup) -> None:
    assert group.renamed
    for old, new in group.renamed.items():
        assert old not in group.list_commands(click.Context(group))
        command_at(tuple(new.split()))  # fails for a path that leads nowhere
