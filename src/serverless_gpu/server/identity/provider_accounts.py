"""Decides what the claims of an account at an identity provider mean for a user. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import msgspec

from serverless_gpu.errors import NotAllowed
from serverless_gpu.model.access_control import ROLES, Role
from serverless_gpu.server.core.settings import OidcSettings

GROUPS_MAX = 1_000
SUBJECT_CHARACTERS_MAX = 255
_NAME_CHARACTERS_MAX = 64


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """A verified account at an identity provider.

    Attributes:
        issuer: address of the provider.
        subject: permanent identifier of the account. Only issuer and subject together identify an account.
        name: name for a new user, or "" without a usable claim.
        shown: e-mail address or name, for display only.
        groups: groups of the account.
    """

    issuer: str
    subject: str
    name: str = ""
    shown: str = ""
    groups: tuple[str, ...] = ()


class TeamChanges(msgspec.Struct, frozen=True):
    """Teams that a user joins and leaves."""

    join: tuple[str, ...]
    leave: tuple[str, ...]


def account_of(settings: OidcSettings, claims: Mapping[str, object], *, issuer: str) -> Account:
    """Return the account that verified claims describe.

    Raises:
        NotAllowed: the account has no subject, or its e-mail domain may not sign in.
    """
    subject = claims.get("sub")
    if not isinstance(subject, str) or not 0 < len(subject) <= SUBJECT_CHARACTERS_MAX:
        raise NotAllowed("the identity provider names no account", hint="ask the administrator of the provider")
    email = claims.get("email")
    email = email if isinstance(email, str) else ""
    if settings.domains:
        # Anyone can enter an unverified address at some providers.
        domain = email.rpartition("@")[2].lower() if claims.get("email_verified") is True else ""
        if domain not in settings.domains:
            raise NotAllowed(
                "accounts without a verified e-mail address of this organization may not sign in",
                hint=f"permitted domains: {', '.join(settings.domains)}",
            )
    name = _text(_claim(claims, settings.name_claim))
    return Account(
        issuer=issuer,
        subject=subject,
        name=_principal_name(name),
        shown="".join(filter(str.isprintable, email or name or subject))[:256],
        groups=_groups(_claim(claims, settings.groups_claim)),
    )


def missing_claims(settings: OidcSettings, claims: Mapping[str, object]) -> bool:
    """Return True if claims lack something that the settings need and the user information may contain."""
    wanted = [settings.name_claim]
    wanted += [settings.groups_claim] if settings.teams or settings.roles else []
    wanted += ["email", "email_verified"] if settings.domains else []
    return any(_claim(claims, name) is None for name in wanted)


def role_of(settings: OidcSettings, groups: Collection[str]) -> Role | None:
    """Return the role of an account's groups, or None if the mapping does not decide.

    The most powerful role of several groups wins.

    Raises:
        NotAllowed: no group of the account may sign in.
    """
    mapped = [settings.roles[group] for group in groups if group in settings.roles]
    if mapped:
        return min(mapped, key=ROLES.index)
    if not settings.role:
        raise NotAllowed("no group of your account may use this server", hint="ask an administrator for access")
    return settings.role if settings.roles else None


def team_changes(settings: OidcSettings, groups: Collection[str], current: Collection[str]) -> TeamChanges:
    """Return the teams to join and leave. Teams outside of the mapping do not change."""
    wanted = {settings.teams[group] for group in groups if group in settings.teams}
    mapped = set(settings.teams.values())
    return TeamChanges(tuple(sorted(wanted - set(current))), tuple(sorted((mapped - wanted) & set(current))))


def _claim(claims: Mapping[str, object], name: str) -> object:
    """Return a claim, also a nested claim such as "realm_access.roles"."""
    if name in claims:
        return claims[name]
    found: object = claims
    for part in name.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(part)
    return found


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _groups(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence):
        return ()
    return tuple(group for group in value[:GROUPS_MAX] if isinstance(group, str))


def _principal_name(text: str) -> str:
    """Return the valid name closest to a claim, or ""."""
    return re.sub(r"[^a-z0-9._@-]", "-", text.strip().lower()).lstrip("._@-")[:_NAME_CHARACTERS_MAX]
