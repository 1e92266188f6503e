"""Prints command output: lines, tables, JSON with a schema, and run failures.

    print_table(head, rows)   a file or a pipe gets whole cells; a terminal gets colours for states, and cells cut to
                              its width unless the command has --wide
    json_option(TYPE)         adds --json; `sgpu schema COMMAND` prints the JSON schema of TYPE

Messages go to stderr and start with "sgpu: ". Colours carry no information beyond the text. NO_COLOR turns colours off.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import click
import msgspec

from serverless_gpu.client.display.terminal_screen import safe
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.lazy_import import load

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

JSON_TYPE = "sgpu_json_type"
"""Function attribute that holds the type of a command's JSON output, or a `JsonType`."""


class JsonType(NamedTuple):
    """Import path of a command's JSON output type, which only `sgpu schema` imports."""

    place: str  # Import path of the type below `serverless_gpu`, as ``"module:name"``.
    is_list: bool = False


CELL_CHARACTERS_MIN = 8
"""Minimum width of a shortened table cell, in characters."""
SHORT_ID_CHARACTERS = 8
"""Number of identifier characters in a table on a terminal.

Commands accept the last characters of a run identifier as RUN.
"""
_RUN_ID = re.compile(r"[0-9a-z]{26}\b")
_MOMENT = re.compile(r"\b\d{4}-(\d\d-\d\d \d\d:\d\d):\d\d\b")
_STATE_COLOURS = {
    "green": ("SUCCEEDED", "UP", "active"),
    "cyan": ("STARTING", "RUNNING"),
    "yellow": ("QUEUED", "STOPPING", "UNREACHABLE", "PENDING", "DRAINING", "DEGRADED"),
    "red": ("FAILED", "TIMED_OUT", "BUDGET_STOPPED", "LOST", "SILENT", "GONE", "disabled", "revoked"),
}
_COLOUR_OF = {state: colour for colour, states in _STATE_COLOURS.items() for state in states}


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def json_option(json_type: object, *, text: str = "Print JSON.") -> Callable[[Decorated], Decorated]:
    """Return a decorator that adds `--json` (argument `as_json`) and records the output type.

    Args:
        json_type: A type, or a `JsonType` if importing the type would slow the command down.
        text: Help of the option.
    """

    def decorate(function: Decorated) -> Decorated:
        setattr(function, JSON_TYPE, json_type)
        return click.option("--json", "as_json", is_flag=True, help=text)(function)

    return decorate


def wide_option(function: Decorated) -> Decorated:
    """Add `--wide` (argument `wide`) to a command that prints a table."""
    return click.option(
        "--wide", is_flag=True, help="Print complete table cells, even if a line exceeds the terminal width."
    )(function)


def say(line: str, *, err: bool = False) -> None:
    """Print one line. On a terminal, escape control characters."""
    click.echo(safe(line, tty=(sys.stderr if err else sys.stdout).isatty()), err=err)


def say_lines(text: str, *, err: bool = False) -> None:
    """Print each line of a text with `say`."""
    for line in text.split("\n"):
        say(line, err=err)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns. The last column has no padding."""
    widths = _widths(rows)
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, wide: bool = False) -> None:
    """Print a table. On a terminal, colour the run states and, without `wide`, shorten cells to fit."""
    if not sys.stdout.isatty():
        for line in columns([head, *rows]):
            click.echo(line)
        return
    clean = [[safe(cell, tty=True) for cell in row] for row in rows]
    shown = clean if wide else fit_table(head, clean, shutil.get_terminal_size().columns)
    lines = columns([head, *shown])
    if "NO_COLOR" not in os.environ:
        lines = _coloured(lines, head, shown)
    for line in lines:
        click.echo(line)
    if not wide and any("…" in cell and cell not in row for row, cut in zip(clean, shown, strict=True) for cell in cut):
        click.echo(
            "sgpu: some table cells are shortened to fit the terminal. Use --wide to print complete cells", err=True
        )


def fit_table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """Return the cells of a table, shortened to fit a terminal width.

    The function shortens the run identifiers first, then times, then the widest columns.

    Args:
        head: The titles of the columns, which are never cut.
        rows: The cells, without control characters.
        width: Number of columns of the terminal.
    """
    # Shorten only identifiers in the column RUN, because only run commands accept partial identifiers.
    cut = [
        [_RUN_ID.sub(_short_id, cell) if title == "RUN" else cell for title, cell in zip(head, row, strict=True)]
        for row in rows
    ]
    if _excess(head, cut, width) > 0:
        cut = [[_MOMENT.sub(r"\1", cell) for cell in row] for row in cut]
    widths = _widths([head, *cut])
    least = [max(len(title), CELL_CHARACTERS_MIN) for title in head]
    excess = _excess(head, cut, width)
    while excess > 0:
        at = max(range(len(widths)), key=lambda index: widths[index] - least[index])
        if widths[at] <= least[at]:
            break
        widths[at] -= 1
        excess -= 1
    return [
        [cell if len(cell) <= limit else f"{cell[: limit - 1]}…" for cell, limit in zip(row, widths, strict=True)]
        for row in cut
    ]


def _short_id(found: re.Match[str]) -> str:
    return found[0][-SHORT_ID_CHARACTERS:]


def _coloured(lines: Sequence[str], head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the table lines with a bold header and coloured run states."""
    start = sum(width + 2 for width in _widths([head, *rows])[: list(head).index("STATE")]) if "STATE" in head else None
    coloured = [click.style(lines[0], bold=True)]
    for line in lines[1:]:
        state = "" if start is None else line[start:].partition(" ")[0]
        if colour := _COLOUR_OF.get(state):
            assert start is not None
            line = f"{line[:start]}{click.style(state, fg=colour)}{line[start + len(state) :]}"
        coloured.append(line)
    return coloured


def _excess(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> int:
    widths = _widths([head, *rows])
    return sum(widths) + 2 * (len(widths) - 1) - width


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[index]) for row in rows) for index in range(len(rows[0]))] if rows else []


def say_failure(error: BaseException) -> None:
    """Print an error on stderr with the failing rank's traceback and the error's notes."""
    cause = str(error.__cause__ or "").strip("\n")
    text = (
        str(error)
        if isinstance(error, ServerlessGpuError)
        else f"{type(error).__name__}: {load('serverless_gpu.client.runs.outcome').error_text(error)}"
    )
    for part in (cause, f"sgpu: {text}", *getattr(error, "__notes__", [])):
        if part:
            say_lines(part, err=True)
