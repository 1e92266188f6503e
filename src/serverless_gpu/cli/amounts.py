"""Ages, sizes and amounts as they are typed after an option."""

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
