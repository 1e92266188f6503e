"""The caller of a request, and checks of text, numbers and names that come from outside."""

from __future__ import annotations

import unicodedata
import zoneinfo

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.wire.base import NAME_CHARACTERS_MAX


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """A principal, or one crew of an attempt.

    Attributes:
        name: of the principal; "" on public routes, and for an attempt.
        kind: user, service, or "attempt".
        role: of `wire.principals`; "" for an attempt.
        teams: it is in.
        scopes: what the token may be used for; none means everything its owner may do.
        token_id: for the audit.
        attempt: run, fence and number of the crew, for the token of an attempt.
        until_ns: when that ends, nanoseconds since 1970; None where it does not.
        late: that crew was given up: what it has to tell is heard, and nothing else is taken.
    """

    name: str = ""
    kind: str = "user"
    role: str = ""
    teams: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()
    token_id: str = ""
    attempt: tuple[str, int, int] | None = None
    until_ns: int | None = None
    late: bool = False


ANONYMOUS = Caller()
# Characters that make text read as something else than it is, beside control characters.
_DECEIVING = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def check_text(name: str, text: str, most: int) -> None:
    """Refuse text that is too long, or that a terminal or a reader would take for something else."""
    if len(text) > most:
        raise InvalidValue(f"{name} has {len(text)} characters; {most} are the most")
    if any(unicodedata.category(letter) == "Cc" or letter in _DECEIVING for letter in text):
        raise InvalidValue(f"{name} has control characters in it: {text!r:.80}")


def check_range(name: str, value: float | None, least: float, most: float) -> None:
    """Refuse a number that is not between two others; None is no number."""
    if value is not None and not least <= value <= most:  # NaN is neither
        raise InvalidValue(f"{name} must be between {least} and {most}, not {value}")


def check_time_zone(name: str) -> None:
    """Refuse the name of a time zone that the server does not know; "" is UTC."""
    try:
        zoneinfo.ZoneInfo(name or "UTC")
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidValue(f"there is no time zone {name[:64]!r} on the server", hint="as Europe/Berlin") from error


def check_name(what: str, name: str) -> None:
    """Refuse a name that is hard to read or type."""
    if not 0 < len(name) <= NAME_CHARACTERS_MAX or not name.isprintable() or name != name.strip():
        raise InvalidValue(f"{what} cannot be named {name[:64]!r}", hint="1 to 64 printable characters")
