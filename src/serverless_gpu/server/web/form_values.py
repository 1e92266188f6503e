"""Parses what people type into forms, and shows a form again with its problem."""

from __future__ import annotations

import msgspec

from serverless_gpu.errors import InvalidValue, ServerlessGpuError
from serverless_gpu.server.web.site import Page
from serverless_gpu.units import MICROS_PER_UNIT, parse_amount, parse_duration_s, parse_moment_ns

NAMED_MAX = 1_000


def amount(what: str, text: str, *, unit: int = MICROS_PER_UNIT) -> int:
    """Return an amount such as 2.99 in units of 1/`unit`, by default in millionths."""
    try:
        return parse_amount(text, unit=unit)
    except ValueError as error:
        raise InvalidValue(f"{what}: {error}") from None


def seconds(what: str, text: str) -> float | None:
    """Return a duration such as 12h in seconds, or None for an empty field."""
    if not text.strip():
        return None
    try:
        return float(parse_duration_s(text))
    except ValueError as error:
        raise InvalidValue(f"{what}: {error}") from None


def moment_ns(what: str, text: str) -> int | None:
    """Return a UTC time in nanoseconds since 1970, or None for an empty field."""
    if not text.strip():
        return None
    try:
        return parse_moment_ns(text)
    except ValueError as error:
        raise InvalidValue(f"{what}: {error}") from None


def count(what: str, text: str) -> int | None:
    """Return a whole number, or None for an empty field."""
    written = text.strip()
    if not written:
        return None
    if not (written.isascii() and written.isdigit() and len(written) <= 9):
        raise InvalidValue(f"{what}: {text[:40]!r} is not a whole number")
    return int(written)


def names(text: str) -> tuple[str, ...]:
    """Return names that commas or line breaks separate."""
    found = tuple(name.strip() for name in text.replace("\n", ",").split(",") if name.strip())
    if len(found) > NAMED_MAX:
        raise InvalidValue(f"a field has {len(found)} names, over the limit of {NAMED_MAX}")
    return found


def lines(text: str) -> tuple[str, ...]:
    """Return the lines of a field that are not empty."""
    return tuple(line.strip() for line in text.split("\n") if line.strip())


def with_problem(page: Page, problem: ServerlessGpuError) -> Page:
    """Return a page that shows a form again, with its problem and the problem's status."""
    return msgspec.structs.replace(page, values={**page.values, "problem": problem}, status=problem.status)
