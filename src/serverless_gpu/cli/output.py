"""How commands print: lines, columns, JSON, the failure that ended a run, and its exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
import msgspec

from serverless_gpu.client.display.terminal_screen import safe
from serverless_gpu.errors import (
    CommandFailed,
    NodeLost,
    OutOfMemory,
    RankCrashed,
    RunCancelled,
    RunTimedOut,
    RuntimeLost,
    ServerlessGpuError,
    ServerUnavailable,
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


TEMPORARY, TIMED_OUT, CANCELLED, KILLED, FAILED = 75, 124, 130, 137, 1
_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (RunTimedOut, TIMED_OUT),
    (RunCancelled, CANCELLED),
    (KeyboardInterrupt, CANCELLED),
    (RankCrashed, KILLED),
    (OutOfMemory, KILLED),
    (RuntimeLost, KILLED),
    (NodeLost, TEMPORARY),
    (ServerUnavailable, TEMPORARY),
)


def exit_code(error: BaseException | None) -> int:
    """Return the exit code for an ending; None is success."""
    if error is None:
        return 0
    if isinstance(error, CommandFailed):
        return error.exit_code if 0 < error.exit_code < 256 else FAILED
    return next((code for cls, code in _CODES if isinstance(error, cls)), FAILED)
