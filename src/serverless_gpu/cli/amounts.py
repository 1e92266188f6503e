"""Ages and sizes as they are typed after an option."""

from __future__ import annotations

import contextlib

import click

from serverless_gpu.errors import InvalidValue, UsageError
from serverless_gpu.model.spec import parse_bytes
from serverless_gpu.units import parse_duration_s


def age_s(option: str, text: str) -> int:
    """Return the seconds of an age: 12h, 7d, 2w.

    Raises:
        InvalidValue: it does not read like that.
    """
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise InvalidValue(f"{option}: {error}") from None


def duration_s(option: str, text: str) -> float:
    """Return the seconds of a duration: 30s, 12h, 30d.

    Raises:
        click.BadParameter: it does not read like that.
    """
    try:
        return float(parse_duration_s(text))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from None


def size_bytes(option: str, text: str) -> int:
    """Return the bytes of a size: 500MB, 20GiB, 0.

    Raises:
        InvalidValue: it does not read like that.
    """
    written = text.strip().upper()
    if written.rstrip("KMGTIB ") == "0":
        return 0
    if not written.isdecimal():
        with contextlib.suppress(UsageError):
            return parse_bytes(option, written)
    raise InvalidValue(f"{option}: {text!r} is not a size; write a number and a unit: 500MB, 20GiB, or 0")
