"""The caller of a request, as far as routes and services need to know it."""

from __future__ import annotations

import msgspec


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
