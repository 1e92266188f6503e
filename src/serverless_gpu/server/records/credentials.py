"""Repository of passwords and of identities at an identity provider.

The database contains an Argon2 hash of each password, and the SHA-256 of each reset link's code.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue, NotFound
from serverless_gpu.server.db.tables import identities, passwords
from serverless_gpu.wire.sign_in import IdentityView

SHOWN_CHARACTERS_MAX = 256


class StoredPassword(NamedTuple):
    """A row of the table `passwords`."""

    hash: str | None
    changed_ns: int | None
    reset_until_ns: int | None


NO_PASSWORD = StoredPassword(None, None, None)


def password(connection: sa.Connection, principal: str) -> StoredPassword:
    """Return the password of a user, or `NO_PASSWORD`."""
    query = sa.select(passwords.c.hash, passwords.c.changed_ns, passwords.c.reset_until_ns)
    row = connection.execute(query.where(passwords.c.principal == principal)).one_or_none()
    return NO_PASSWORD if row is None else StoredPassword(*row)


def has_passwords(connection: sa.Connection) -> bool:
    """Return True if any user has a password."""
    return connection.scalar(sa.select(sa.exists().where(passwords.c.hash.is_not(None)))) or False


def set_password(connection: sa.Connection, principal: str, text: str, *, now_ns: int) -> None:
    """Store the hash of a password, and make a reset link invalid."""
    _put(connection, principal, hash=text, changed_ns=now_ns, reset_sha256=None, reset_until_ns=None)


def remove_password(connection: sa.Connection, principal: str) -> bool:
    """Delete a user's password and reset link, and return False if there was neither."""
    return connection.execute(sa.delete(passwords).where(passwords.c.principal == principal)).rowcount > 0


def set_reset(connection: sa.Connection, principal: str, code: str, *, until_ns: int) -> None:
    """Store the code of a reset link, which replaces an earlier link."""
    _put(connection, principal, reset_sha256=_digest(code), reset_until_ns=until_ns)


def principal_of_reset(connection: sa.Connection, code: str, *, now_ns: int) -> str:
    """Return the user of a valid reset link, or ""."""
    is_valid = sa.and_(passwords.c.reset_sha256 == _digest(code), passwords.c.reset_until_ns > now_ns)
    return connection.scalar(sa.select(passwords.c.principal).where(is_valid)) or ""


def _put(connection: sa.Connection, principal: str, **values: str | int | None) -> None:
    mine = passwords.c.principal == principal
    if not connection.execute(sa.update(passwords).where(mine).values(values)).rowcount:
        connection.execute(sa.insert(passwords).values(principal=principal, **values))


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()


def identity(connection: sa.Connection, issuer: str, subject: str) -> IdentityView | None:
    """Return an identity by its issuer and subject, or None."""
    where = sa.and_(identities.c.issuer == issuer, identities.c.subject == subject)
    row = connection.execute(sa.select(identities).where(where)).one_or_none()
    return None if row is None else _view(row)


def identity_by_id(connection: sa.Connection, identifier: str) -> IdentityView:
    """Return an identity by its identifier."""
    row = connection.execute(sa.select(identities).where(identities.c.id == identifier)).one_or_none()
    if row is None:
        raise NotFound(f"there is no identity {identifier[:64]!r}")
    return _view(row)


def identities_of(connection: sa.Connection, principal: str) -> tuple[IdentityView, ...]:
    """Return the identities of a user, oldest first."""
    query = sa.select(identities).where(identities.c.principal == principal).order_by(identities.c.id)
    return tuple(_view(row) for row in connection.execute(query))


def add_identity(connection: sa.Connection, made: IdentityView) -> None:
    """Link an identity with a user."""
    there = identity(connection, made.issuer, made.subject)
    if there is not None:
        raise InvalidValue("this account is already linked with a user", hint="sign in with the account")
    values = {name: getattr(made, name) for name in IdentityView.__struct_fields__}
    connection.execute(sa.insert(identities).values(values))


def note_identity_use(connection: sa.Connection, identifier: str, *, shown: str, now_ns: int) -> None:
    """Store a sign-in with an identity."""
    mine = identities.c.id == identifier
    connection.execute(sa.update(identities).where(mine).values(used_ns=now_ns, shown=shown[:SHOWN_CHARACTERS_MAX]))


def remove_identity(connection: sa.Connection, identifier: str) -> None:
    """Delete the link of an identity with its user."""
    connection.execute(sa.delete(identities).where(identities.c.id == identifier))


def remove_all(connection: sa.Connection, principal: str) -> None:
    """Delete the password and the identities of a user."""
    connection.execute(sa.delete(passwords).where(passwords.c.principal == principal))
    connection.execute(sa.delete(identities).where(identities.c.principal == principal))


def _view(row: sa.Row[tuple[object, ...]]) -> IdentityView:
    return IdentityView(**{name: getattr(row, name) for name in IdentityView.__struct_fields__})
