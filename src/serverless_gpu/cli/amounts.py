"""Parses ages, sizes, amounts and times that users type as option values."""

from __future__ import annotations

import contextlib
import datetime
from decimal import Decimal
from typing import Any

import click

from serverless_gpu.errors import (
    InvalidValue,
    UsageError,
)
from serverless_gpu.model.spec import parse_bytes
from serverless_gpu.units import MICROS_PER_UNIT, parse_duration_s

_LIMIT = 10**12
_MILLIONTH = Decimal("0.000001")
_DAYS_MAX = 140 * 365  # 140 years in nanoseconds fit a signed 64-bit integer.
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


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


def micros(option: str, text: str, *, unit: int = MICROS_PER_UNIT, most: int = _LIMIT) -> int:
    """Return an amount such as 2.99 in units of 1/`unit`, by default in millionths, rounded to an integer."""
    try:
        amount = Decimal(text.strip())
        if not (amount.is_finite() and 0 <= amount <= most):
            raise click.BadParameter(f"{text[:40]} is not an amount from 0 to {most:,}", param_hint=option)
        if amount != amount.quantize(_MILLIONTH):
            raise click.BadParameter(f"{text[:40]} has more than six digits after the decimal point", param_hint=option)
    except ArithmeticError:
        raise click.BadParameter(f"{text[:40]!r} is not a number", param_hint=option) from None
    return round(amount * unit)


def moment_ns(option: str, text: str) -> int:
    """Return a time such as 2026-12-01T08:00 in nanoseconds since 1970. The default time zone is UTC."""
    try:
        moment = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a time. Write a time such as 2026-12-01 or 2026-12-01T08:00", param_hint=option
        ) from None
    since = (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)) - _EPOCH
    if not datetime.timedelta() <= since < datetime.timedelta(days=_DAYS_MAX):
        raise click.BadParameter(f"the time {text} is not between 1970 and 2110", param_hint=option)
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000
