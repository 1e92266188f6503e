"""Parses ages, sizes, amounts and times that users type as option values."""

from __future__ import annotations

import contextlib
from typing import Any

import click

from serverless_gpu.errors import (
    InvalidValue,
    UsageError,
)
from serverless_gpu.model.spec import parse_bytes
from serverless_gpu.units import AMOUNT_MAX, MICROS_PER_UNIT, parse_amount, parse_duration_s, parse_moment_ns


def age_s(option: str, text: str) -> int:
    """Return an age such as 12h, 7d or 2w in seconds."""
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise InvalidValue(f"{option}: {error}") from None


def duration_s(option: str, text: str) -> float:
    """Return a duration such as 30s, 12h or 30d in seconds."""
    try:
        return float(parse_duration_s(text))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from None


class Seconds(click.ParamType[float]):
    """Option type for a duration in seconds, with or without a unit (90, 90s, 5m, 2h)."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the option's value in seconds. The caller checks the value's range."""
        with contextlib.suppress(ValueError):
            return float(value)
        try:
            return float(parse_duration_s(value))
        except ValueError:
            self.fail(f"{value!r} is not a duration. Write a duration such as 90, 90s, 5m or 2h", param, ctx)


def size_bytes(option: str, text: str) -> int:
    """Return a size such as 500MB, 20GiB or 0 in bytes."""
    written = text.strip().upper()
    if written.rstrip("KMGTIB ") == "0":
        return 0
    if not written.isdecimal():
        with contextlib.suppress(UsageError):
            return parse_bytes(option, written)
    raise InvalidValue(f"{option}: {text!r} is not a size. Write a number and a unit, for example 500MB or 20GiB")


def micros(option: str, text: str, *, unit: int = MICROS_PER_UNIT, most: int = AMOUNT_MAX) -> int:
    """Return an amount such as 2.99 in units of 1/`unit`, by default in millionths, rounded to an integer."""
    try:
        return parse_amount(text, unit=unit, most=most)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from None


def moment_ns(option: str, text: str) -> int:
    """Return a time such as 2026-12-01T08:00 in nanoseconds since 1970. The default time zone is UTC."""
    try:
        return parse_moment_ns(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from None
