"""Secrets of a server: what they are called, never what they are.

    GET    /secrets                                   → SecretList     those one may use
    PUT    /secrets/{name}        SecretRequest       → SecretView     the next version; the same value again: the same
    DELETE /secrets/{name}?team                       → SecretView     every version; its values are gone

Values go in here, and out with the order that starts an attempt (`wire/agents.py`), to the attempt's node alone.
"""

from __future__ import annotations

import msgspec

from serverless_gpu.wire.base import Answer, Request


class SecretRequest(Request, frozen=True, kw_only=True):
    """Set a secret.

    Attributes:
        value: any bytes.
        team: whose it is to be; "" for one's own.
    """

    value: bytes
    team: str = ""

    def __repr__(self) -> str:
        """Return it without its value: what is printed may be kept."""
        return f"SecretRequest(team={self.team!r})"


class SecretView(Answer, frozen=True, kw_only=True):
    """A secret without its value.

    Attributes:
        version: that the next attempt gets.
        owner: whose it is; "" for one of a team.
        team: whose it is; "" for a principal's.
        created_ns: of this version, nanoseconds since 1970.
        by: who set it.
    """

    name: str
    version: int
    owner: str
    team: str
    created_ns: int
    by: str


class SecretList(Answer, frozen=True, kw_only=True):
    """Secrets, by name."""

    secrets: tuple[SecretView, ...]


class SecretValue(Answer, frozen=True, kw_only=True):
    """A secret on its way to the node of an attempt.

    Attributes:
        text: name and version for people, ``HF_TOKEN@3``.
        value: None where it was deleted after the attempt was placed: the attempt is refused, and the next one fails.
        variable: that ranks have it as, or "".
    """

    name: str
    text: str
    value: bytes | None = msgspec.field(default=None)
    variable: str = ""

    def __repr__(self) -> str:
        """Return it without its value: what is printed may be kept."""
        return f"SecretValue({self.text})"
