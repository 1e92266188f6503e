"""How commands print: lines, columns, JSON and the failure that ended a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
import msgspec

from serverless_gpu.client.display.terminal_screen import safe
from serverless_gpu.errors import (
    ServerlessGpuError,
)
from serverless_gpu.lazy_import import load


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def say(line: str, *, err: bool = False) -> None:
    """Print one line; on a terminal, escape names and foreign text that could move the cursor."""
    click.echo(safe(line, tty=(sys.stderr if err else sys.stdout).isatty()), err=err)


def say_lines(text: str, *, err: bool = False) -> None:
    """Print text of several lines, each as `say` does."""
    for line in text.split("\n"):
        say(line, err=err)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines whose columns are aligned; the last column is left as long as it is."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def say_failure(error: BaseException) -> None:
    """Print a failure on stderr: the failing rank's traceback, the error and its notes."""
    cause = str(error.__cause__ or "").strip("\n")
    text = (
        str(error)
        if isinstance(error, ServerlessGpuError)
        else f"{type(error).__name__}: {load('serverless_gpu.client.runs.outcome').error_text(error)}"
    )
    for part in (cause, f"sgpu: {text}", *getattr(error, "__notes__", [])):
        if part:
            say_lines(part, err=True)
