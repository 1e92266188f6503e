"""Calculates and formats durations, bytes, GPU time and money with integers.

Milliseconds, bytes, device-milliseconds and micros (millionths of a currency unit) are integers everywhere. The package
never stores money or metered time in a float. The functions do not depend on runs, clocks or current prices.

Failure cases: The calculations raise `ValueError` for a negative duration, GPU count or price. The ``format_``
functions accept every integer. The format functions accept negative numbers, because users must be able to print a
receipt with wrong numbers.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from decimal import Decimal

MS_PER_HOUR = 3_600_000
MS_PER_DAY = 24 * MS_PER_HOUR
MICROS_PER_UNIT = 1_000_000

AMOUNT_MAX = 10**12
_MILLIONTH = Decimal("0.000001")
_DAYS_MAX = 140 * 365  # 140 years in nanoseconds fit a signed 64-bit integer.
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

_BYTE_UNITS = ("kB", "MB", "GB", "TB", "PB")
_LARGEST_BYTE_UNIT = "EB"
_GIB = 1 << 30

_DURATION = re.compile(r"(\d{1,9})\s*([smhdw])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def gpu_milliseconds(gpus: int, ms: int) -> int:
    """Return the GPU time of several GPUs for one duration, in device-milliseconds."""
    if gpus < 0 or ms < 0:
        raise ValueError(f"GPU time cannot be negative: {gpus} GPUs for {ms} ms")
    return gpus * ms


def micros_for(gpu_ms: int, micros_per_gpu_hour: int) -> int:
    """Return the cost of GPU time, rounded up to a whole micro.

    Call `cost_micros` once per attempt with the total GPU time, because the sum of rounded parts would exceed the
    rounded total.
    """
    if gpu_ms < 0 or micros_per_gpu_hour < 0:
        raise ValueError(f"a cost cannot be negative: {gpu_ms} GPU-ms at {micros_per_gpu_hour} micros per GPU-hour")
    return -(-gpu_ms * micros_per_gpu_hour // MS_PER_HOUR)


def format_duration_ms(ms: int) -> str:
    """Format a duration for people, such as ``34 ms``, ``0.4 s``, ``3 min 05 s`` or ``2 h 10 min``."""
    if ms < 0:
        return "-" + format_duration_ms(-ms)
    if ms < 100:
        return f"{ms} ms"
    tenths = _divide(ms, 100)
    if tenths < 600:
        return f"{tenths // 10}.{tenths % 10} s"
    seconds = _divide(ms, 1000)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    minutes = _divide(ms, 60_000)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_days_ms(ms: int) -> str:
    """Format a long duration for people, such as ``30 days``.

    Durations below two days have the format of `format_duration_ms`.
    """
    days = ms // MS_PER_DAY
    return format_duration_ms(ms) if days < 2 else f"{days} days"


def format_bytes(size: int) -> str:
    """Format a size for people in decimal units, such as ``512 B`` or ``1.2 GB`` (1 GB = 10^9 bytes)."""
    if size < 0:
        return "-" + format_bytes(-size)
    if size < 1000:
        return f"{size} B"
    scale = 1000
    for unit in _BYTE_UNITS:
        tenths = _divide(size, scale // 10)
        if tenths < 10_000:
            return f"{tenths // 10}.{tenths % 10} {unit}"
        scale *= 1000
    # The largest unit has no maximum value.
    tenths = _divide(size, scale // 10)
    return f"{tenths // 10}.{tenths % 10} {_LARGEST_BYTE_UNIT}"


def format_gpu_memory(size: int) -> str:
    """Format GPU memory in nvidia-smi's units, such as ``512 MiB`` or ``61.3 GiB`` (1 GiB = 2^30 bytes)."""
    if size < 0:
        return "-" + format_gpu_memory(-size)
    if size < _GIB:
        return f"{size >> 20} MiB"
    tenths = _divide(10 * size, _GIB)
    return f"{tenths // 10}.{tenths % 10} GiB"


def format_micros(micros: int, currency: str, *, exact: bool = False) -> str:
    """Format an amount of money, such as ``1.23 USD``.

    Amounts below one cent have all digits, so that no cost looks like zero.
    """
    if micros < 0:
        return "-" + format_micros(-micros, currency, exact=exact)
    if exact:
        return f"{micros // MICROS_PER_UNIT:,}.{micros % MICROS_PER_UNIT:06d} {currency}"
    if 0 < micros < MICROS_PER_UNIT // 100:
        return f"0.{micros:06d}".rstrip("0") + f" {currency}"
    cents = _divide(micros, MICROS_PER_UNIT // 100)
    return f"{cents // 100:,}.{cents % 100:02d} {currency}"


def is_any_below_cent(amounts: Iterable[int | None]) -> bool:
    """Return True if a nonzero amount in micros is below one cent."""
    return any(0 < abs(micros) < MICROS_PER_UNIT // 100 for micros in amounts if micros is not None)


def format_gpu_ms(gpu_ms: int, *, unit: str = "GPU") -> str:
    """Format device-milliseconds, such as ``0.040 GPU-seconds`` or ``1.5 GPU-hours``."""
    if gpu_ms < 0:
        return "-" + format_gpu_ms(-gpu_ms, unit=unit)
    if 0 < gpu_ms < 100:
        return f"0.{gpu_ms:03d} {unit}-seconds"
    tenths = _divide(gpu_ms, 100)
    if tenths < 36_000:
        return f"{tenths // 10}.{tenths % 10} {unit}-seconds"
    tenths = _divide(gpu_ms, MS_PER_HOUR // 10)
    return f"{tenths // 10:,}.{tenths % 10} {unit}-hours"


def format_joules(joules: float) -> str:
    """Format energy, such as ``0.3 Wh``, ``61.2 Wh``, ``0.42 kWh`` or ``12.3 kWh``.

    The format of energy below 0.05 Wh is ``0.0 Wh``.
    """
    watt_hours = joules / 3_600
    if abs(watt_hours) < 99.95:
        return f"{watt_hours:.1f} Wh"
    return f"{watt_hours / 1000:.2f} kWh" if abs(watt_hours) < 9_995 else f"{watt_hours / 1000:,.1f} kWh"


def parse_duration_s(text: str) -> int:
    """Parse a duration from a user, such as ``90s``, ``15m``, ``12h``, ``7d`` or ``2w``, to seconds."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a duration. Write a whole number and a unit: 90s, 15m, 12h, 7d or 2w")
    return int(match[1]) * _SECONDS[match[2]]


def parse_amount(text: str, *, unit: int = MICROS_PER_UNIT, most: int = AMOUNT_MAX) -> int:
    """Parse an amount from a user, such as ``2.99``, to units of 1/`unit`, rounded to an integer.

    Args:
        text: a decimal number with at most six digits after the decimal point.
        unit: number of parts of one whole, by default millionths.
        most: the largest accepted number of wholes.

    Raises:
        ValueError: the text is no such number. The message names the problem.
    """
    try:
        amount = Decimal(text.strip())
        if not (amount.is_finite() and 0 <= amount <= most):
            raise ValueError(f"{text[:40]} is not an amount from 0 to {most:,}")
        if amount != amount.quantize(_MILLIONTH):
            raise ValueError(f"{text[:40]} has more than six digits after the decimal point")
    except ArithmeticError:
        raise ValueError(f"{text[:40]!r} is not a number") from None
    return round(amount * unit)


def parse_moment_ns(text: str) -> int:
    """Parse a time from a user, such as ``2026-12-01T08:00`` (UTC), to nanoseconds since 1970."""
    try:
        moment = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f"{text!r} is not a time. Write a time such as 2026-12-01 or 2026-12-01T08:00") from None
    since = (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)) - _EPOCH
    if not datetime.timedelta() <= since < datetime.timedelta(days=_DAYS_MAX):
        raise ValueError(f"the time {text} is not between 1970 and 2110")
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000


def _divide(value: int, by: int) -> int:
    """Return ``value / by``, rounded half up to an integer."""
    return (2 * value + by) // (2 * by)
