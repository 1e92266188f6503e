"""Defines the caller of a request, and validates the caller's text, numbers and names."""

from __future__ import annotations

import unicodedata
import zoneinfo

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.wire.base import NAME_CHARACTERS_MAX


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The authenticated caller of a request: a principal, or the supervisor of an attempt.

    Attributes:
        name: name of the principal; "" on public routes and for an attempt.
        kind: user, service, or "attempt".
        role: a role from `wire.principals`; "" for an attempt.
        teams: teams of the principal.
        scopes: operations that the token permits; empty if the token permits every operation of its owner.
        token_id: identifier of the token, for the audit.
        attempt: run, fence and supervisor number, if the token belongs to an attempt.
        until_ns: end of the token's validity, nanoseconds since 1970; None for a token without an end.
        key: fingerprint of the keys of the node's session; "" for any other token.
        needs_key: True if the token belongs to a node with a key, and the caller has not proven the key.
        late: True if the server has abandoned this attempt and accepts only final reports from the supervisor.
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
    key: str = ""
    needs_key: bool = False


ANONYMOUS = Caller()
# Unicode format characters that can disguise text.
_DECEIVING = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def check_text(name: str, text: str, most: int) -> None:
    """Refuse text that is too long or contains control characters or deceptive format characters."""
    if len(text) > most:
        raise InvalidValue(f"{name} has {len(text)} characters; the maximum is {most}")
    if any(unicodedata.category(letter) == "Cc" or letter in _DECEIVING for letter in text):
        raise InvalidValue(f"{name} contains control characters: {text!r:.80}")


def check_range(name: str, value: float | None, least: float, most: float) -> None:
    """Refuse a number outside its range. None is valid."""
    if value is not None and not least <= value <= most:  # NaN fails this comparison too.
        raise InvalidValue(f"{name} must be between {least} and {most}, not {value}")


def check_time_zone(name: str) -> None:
    """Refuse the name of an unknown time zone. The value "" selects UTC."""
    try:
        zoneinfo.ZoneInfo(name or "UTC")
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidValue(
            f"the server knows no time zone {name[:64]!r}", hint="use a time zone name like Europe/Berlin"
        ) from error


def check_name(what: str, name: str) -> None:
    """Refuse a name that is empty, too long, unprintable, or padded with spaces."""
    if not 0 < len(name) <= NAME_CHARACTERS_MAX or not name.isprintable() or name != name.strip():
        raise InvalidValue(f"{what} cannot be named {name[:64]!r}", hint="use a name of 1 to 64 printable characters")
