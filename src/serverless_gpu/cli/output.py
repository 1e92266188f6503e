"""How commands print: lines, columns, JSON and the failure that ended a run."""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import msgspec

from serverless_gpu.client.display.terminal_screen import safe
from serverless_gpu.errors import (
    CommandFailed,
    InvalidValue,
    NodeLost,
    OutOfMemory,
    RankCrashed,
    RunCancelled,
    RunTimedOut,
    RuntimeLost,
    ServerlessGpuError,
    ServerUnavailable,
    StorageError,
    UsageError,
)
from serverless_gpu.lazy_import import load
from serverless_gpu.model.spec import parse_bytes
from serverless_gpu.node.base.private_files import refuse_irregular
from serverless_gpu.units import MICROS_PER_UNIT, parse_duration_s


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


_KINDS = (".png", ".svg", ".pdf")


def load_drawing(path: Path, module: str) -> ModuleType:
    """Return the drawing module after checking for Matplotlib, the directory and the file type."""
    if path.suffix.lower() not in _KINDS:
        raise InvalidValue(f"{path} cannot be written: a picture ends in {', '.join(_KINDS)}")
    refuse_irregular(path)
    if not path.parent.is_dir():
        message = f"the picture cannot be written to {path}: there is no directory {path.parent}"
        raise StorageError(message, hint="give the path of a file in a directory you can write to")
    try:
        return load(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        message = "--png draws with Matplotlib, which this Python does not have"
        raise ServerlessGpuError(message, hint="pip install 'serverless-gpu[simulate]'") from None


def write_picture(draw: Callable[[], None], path: Path) -> None:
    """Draw a picture and print its path; raise StorageError when it cannot be written."""
    try:
        draw()
    except OSError as error:
        message = f"the picture cannot be written to {path}: {error.strerror or error}"
        raise StorageError(message, hint="give the path of a file in a directory you can write to") from None
    say(f"{path} shows it", err=True)


_LIMIT = 10**12
_MILLIONTH = Decimal("0.000001")
_DAYS_MAX = 140 * 365  # of nanoseconds that every number holds
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def age_s(option: str, text: str) -> int:
    """Return the seconds of an age: 12h, 7d, 2w."""
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise InvalidValue(f"{option}: {error}") from None


def duration_s(option: str, text: str) -> float:
    """Return the seconds of a duration: 30s, 12h, 30d."""
    try:
        return float(parse_duration_s(text))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from None


class Seconds(click.ParamType[float]):
    """A duration in seconds, as a number of them or with a unit: 90, 90s, 5m, 2h."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds; the option's reader checks the range."""
        with contextlib.suppress(ValueError):
            return float(value)
        try:
            return float(parse_duration_s(value))
        except ValueError:
            self.fail(f"{value!r} is not a duration: 90, 90s, 5m, 2h", param, ctx)


def size_bytes(option: str, text: str) -> int:
    """Return the bytes of a size: 500MB, 20GiB, 0."""
    written = text.strip().upper()
    if written.rstrip("KMGTIB ") == "0":
        return 0
    if not written.isdecimal():
        with contextlib.suppress(UsageError):
            return parse_bytes(option, written)
    raise InvalidValue(f"{option}: {text!r} is not a size; write a number and a unit: 500MB, 20GiB, or 0")


def micros(option: str, text: str, *, unit: int = MICROS_PER_UNIT, most: int = _LIMIT) -> int:
    """Return the exact millionths of an amount such as 2.99; `unit` scales it, rounded to the nearest."""
    try:
        amount = Decimal(text.strip())
        if not (amount.is_finite() and 0 <= amount <= most):
            raise click.BadParameter(f"{text[:40]} is not an amount from 0 to {most:,}", param_hint=option)
        if amount != amount.quantize(_MILLIONTH):
            raise click.BadParameter(f"{text[:40]} has more than six digits behind the point", param_hint=option)
    except ArithmeticError:
        raise click.BadParameter(f"{text[:40]!r} is not a number", param_hint=option) from None
    return round(amount * unit)


def moment_ns(option: str, text: str) -> int:
    """Return nanoseconds since 1970 of 2026-12-01 or 2026-12-01T08:00, in UTC unless it has an offset."""
    try:
        moment = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a time: 2026-12-01, 2026-12-01T08:00", param_hint=option) from None
    since = (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)) - _EPOCH
    if not datetime.timedelta() <= since < datetime.timedelta(days=_DAYS_MAX):
        raise click.BadParameter(f"{text} is not between 1970 and 2110", param_hint=option)
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000
