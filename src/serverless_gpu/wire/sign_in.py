"""Defines bodies for logins of terminals, passwords, and identities at an identity provider.

    POST   /device/codes                 DeviceCodeRequest  → DeviceCode          public
    POST   /device/token                 DevicePoll         → DeviceAnswer        public
    GET    /device/requests/{code}                          → DeviceRequestView   a terminal that waits for approval
    POST   /device/requests/{code}       DeviceDecision     → DeviceRequestView   approve or refuse
    GET    /users/{name}/password                           → PasswordView
    PUT    /users/{name}/password        PasswordRequest    → None                (DELETE removes it)
    POST   /users/{name}/password-links                     → SignInLink          one-time link to set a password
    GET    /users/{name}                                    → PrincipalDetails
    POST   /identities                   LinkRequest        → IdentityView
    DELETE /identities/{id}                                 → IdentityView

The login of a terminal follows RFC 8628 (device authorization grant) with JSON bodies. The terminal polls
`/device/token` at most every `interval_s` seconds. `DeviceAnswer.state` names the answers of the RFC.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from serverless_gpu.wire.access import PrincipalView, TokenMade
from serverless_gpu.wire.base import Answer, Request

PASSWORD_CHARACTERS_MIN = 12
PASSWORD_CHARACTERS_MAX = 256
DeviceState = Literal["pending", "slow_down", "approved", "refused", "expired"]
Password = Annotated[str, msgspec.Meta(max_length=PASSWORD_CHARACTERS_MAX)]
Secret = Annotated[str, msgspec.Meta(max_length=100)]


class DeviceCodeRequest(Request, frozen=True, kw_only=True):
    """Ask for a code with which a signed-in user approves a terminal's login.

    Attributes:
        host: name of the terminal's machine, for display and for the label of the token.
    """

    host: Annotated[str, msgspec.Meta(max_length=100)] = ""


class DeviceCode(Answer, frozen=True, kw_only=True):
    """Codes for the login of a terminal.

    Attributes:
        device_code: secret with which the terminal polls.
        user_code: code that the terminal displays and the user approves.
        path: path of the page that approves codes, below the server's address.
        expires_s: seconds until both codes expire.
        interval_s: minimum seconds between two polls.
    """

    device_code: str
    user_code: str
    path: str
    expires_s: float
    interval_s: float

    def __repr__(self) -> str:
        """Omit the secret."""
        return f"DeviceCode(user_code={self.user_code!r})"


class DevicePoll(Request, frozen=True, kw_only=True):
    """Ask if a user has approved the login."""

    device_code: Secret

    def __repr__(self) -> str:
        """Omit the secret."""
        return "DevicePoll(…)"


class DeviceAnswer(Answer, frozen=True, kw_only=True):
    """State of a terminal's login.

    Attributes:
        state: "approved" comes with a token. "expired" also means that the server does not know the code, for example
            after a restart.
        interval_s: minimum seconds until the next poll.
        made: the token of the terminal; None without approval.
    """

    state: DeviceState
    interval_s: float = 0.0
    made: TokenMade | None = None


class DeviceRequestView(Answer, frozen=True, kw_only=True):
    """A terminal that waits for approval.

    Attributes:
        user_code: code that the terminal displays.
        host: name of the terminal's machine, as the terminal reports it. Nothing proves the name.
        address: network address from which the terminal asked for the code.
        created_ns: time of the request, nanoseconds since 1970.
        expires_ns: end of the code's validity, nanoseconds since 1970.
        state: "pending", "approved" or "refused".
    """

    user_code: str
    host: str
    address: str
    created_ns: int
    expires_ns: int
    state: DeviceState


class DeviceDecision(Request, frozen=True, kw_only=True):
    """Approve or refuse a terminal's login. The terminal receives a token of the caller."""

    approve: bool


class PasswordRequest(Request, frozen=True, kw_only=True):
    """Set a password.

    Attributes:
        password: the new password, with at least 12 characters.
        current: the caller's current password. Required to change an own password.
    """

    password: Password
    current: Password = ""

    def __repr__(self) -> str:
        """Omit the passwords."""
        return "PasswordRequest(…)"


class PasswordView(Answer, frozen=True, kw_only=True):
    """The password of a user, without its value.

    Attributes:
        is_set: True if the user has a password.
        changed_ns: time of the last change, nanoseconds since 1970; None without a password.
    """

    is_set: bool
    changed_ns: int | None


class IdentityView(Answer, frozen=True, kw_only=True):
    """An account at an identity provider that is linked with a user.

    Attributes:
        issuer: address of the provider.
        subject: permanent identifier of the account at the provider.
        shown: name or e-mail address of the account, for display only.
        used_ns: last sign-in with the account, nanoseconds since 1970.
    """

    id: str
    principal: str
    issuer: str
    subject: str
    shown: str
    created_ns: int
    used_ns: int | None


class LinkRequest(Request, frozen=True, kw_only=True):
    """Link a verified account at the identity provider with the caller."""

    ticket: Secret

    def __repr__(self) -> str:
        """Omit the secret."""
        return "LinkRequest(…)"


class PrincipalDetails(Answer, frozen=True, kw_only=True):
    """A user or service with the ways to sign in.

    Attributes:
        has_password: True if the user has a password.
        password_changed_ns: time of the last change of the password, nanoseconds since 1970.
        reset_until_ns: expiry of an unused link to set a password, nanoseconds since 1970.
        identities: accounts at the identity provider.
        tokens: number of valid tokens.
        sessions: number of open sessions.
    """

    principal: PrincipalView
    has_password: bool = False
    password_changed_ns: int | None = None
    reset_until_ns: int | None = None
    identities: tuple[IdentityView, ...] = ()
    tokens: int = 0
    sessions: int = 0
