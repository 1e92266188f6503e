"""Binds the answer of an identity provider to the browser that began the sign-in."""

from __future__ import annotations

import secrets

import msgspec

LOGIN_S = 600.0
"""Seconds in which a user must finish a sign-in at the provider."""
_RANDOM_BYTES = 32


class LoginState(msgspec.Struct, frozen=True, kw_only=True):
    """Values that bind a callback to the browser that began the sign-in.

    A cookie of the browser contains the values.

    Attributes:
        state: random text that the provider returns.
        nonce: random text that the ID token contains.
        verifier: secret of PKCE, whose hash the provider receives first.
        to: path of the page to open afterwards.
        links: True if the user links the account with an existing user.
        until_s: end of the sign-in's validity, seconds since 1970.
    """

    state: str
    nonce: str
    verifier: str
    to: str = ""
    links: bool = False
    until_s: int

    @classmethod
    def random(cls, *, to: str, links: bool, now_ns: int) -> LoginState:
        """Return a state with random values."""
        state, nonce, verifier = (secrets.token_urlsafe(_RANDOM_BYTES) for _ in range(3))
        until_s = round(now_ns / 1e9 + LOGIN_S)
        return cls(state=state, nonce=nonce, verifier=verifier, to=to, links=links, until_s=until_s)

    def __repr__(self) -> str:
        """Omit the secrets."""
        return f"LoginState(to={self.to!r})"
