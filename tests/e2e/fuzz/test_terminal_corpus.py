"""Row 2.34: names and words of others on a person's terminal. Every command of `sgpu` prints through one door, and what
a rank raised or printed comes through others; here a corpus goes through all of them."""

from __future__ import annotations

import ast
import io
import re
import types
from pathlib import Path

import click
import pytest

from serverless_gpu.cli import output
from serverless_gpu.cli.output import columns
from serverless_gpu.client.runs import outcome
from serverless_gpu.node.inside import failure

CORPUS = (
    "\x1b]52;c;cm0gLXJmIH4K\x07",  # fills the clipboard
    "\x1b]8;;https://evil.example\x1b\\click\x1b]8;;\x1b\\",  # a link that says something else
    "\x9b2J\x9b31m",  # C1: the same without an escape
    "\x1b[2J\x1b[H\x1b[3A",  # clears, and goes elsewhere
    "safe\rharmful",  # overwrites
    "user\u202etxt.exe\u2066",  # reads backwards
    "one\nsgpu: your token has ended, say it here:",  # forges a line of ours
    "\x1b]0;title\x07\x1bc\x1bP0q\x1b\\",
    "\x1b[?1049h\x1b[6n",
    "\0\x07\x08\x7f\x85",
)
COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
FORBIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
CLI = Path(output.__file__).parent
MAY_ECHO = {
    "output.py",  # the door itself, and JSON, which escapes
    "command_group.py",  # names of commands, in a notice
    "help.py",  # help texts, the version, a completion script
    "program.py",  # help texts
    "runs/logs.py",  # what ranks print: `safe`, by the screen that it goes through
    "server.py",  # a unit file, of paths of this machine
    "planning/simulate.py",  # a line of progress that is replaced: our own words and numbers
}


class Terminal(io.StringIO):
    """A stream that says that a person reads it."""

    def isatty(self) -> bool:
        """Say so."""
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Have everything that this process prints go to a terminal, and return it."""
    made = Terminal()
    monkeypatch.setattr(click, "echo", lambda text, err=False: made.write(f"{text}\n"))
    monkeypatch.setattr(output, "sys", types.SimpleNamespace(stdout=made, stderr=made))
    return made


def harmless(text: str) -> bool:
    """Return whether nothing in a text moves a cursor, hides or forges."""
    return not FORBIDDEN.search(COLOURS.sub("", text))


@pytest.mark.parametrize("hostile", CORPUS)
def test_a_name_stays_in_its_line(hostile: str, terminal: Terminal) -> None:
    for line in columns([["NODE", "STATE"], [hostile, "UP"]]):
        output.say(line)
    output.say(f"{hostile} is UP", err=True)
    said = terminal.getvalue()
    assert harmless(said) and said.count("\n") == 3, said


@pytest.mark.parametrize("hostile", CORPUS)
def test_an_error_has_its_lines_and_nothing_moves(hostile: str, terminal: Terminal) -> None:
    output.say_lines(f"sgpu: there is no run {hostile}\nhint: look", err=True)
    said = terminal.getvalue()
    assert harmless(said) and said.endswith("\nhint: look\n"), said


def test_no_command_prints_past_the_door() -> None:
    found = []
    for path in CLI.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("click.echo", "click.secho"):
                found.append(path.relative_to(CLI).as_posix())
    assert set(found) <= MAY_ECHO, sorted(set(found) - MAY_ECHO)


@pytest.mark.parametrize("hostile", CORPUS)
def test_what_a_rank_raised_is_told_without_what_moves(hostile: str) -> None:
    try:
        raise ValueError(hostile)
    except ValueError as caught:
        described = failure.describe(caught)
    told = outcome.rebuild_exception(described, None, rank=0, host=hostile, run_id="r", log_path="l")
    said = [str(told), str(told.__cause__), *getattr(told, "__notes__", [])]
    assert all(harmless(text) for text in said), said
