"""Repository of users, services, teams and tokens, with authentication by token.

    sgpu_<identifier>_<43 characters>          token of a principal: random, shown once
    sgpa_<run>_<fence>_<until>_<43 characters> token of an attempt: computed, see `server_key.py`

The database contains only the SHA-256 of a token. A token is valid until its revocation, its expiry or the disabling of
its owner. Disabling a principal revokes all tokens of the principal. Enabling a disabled principal does not restore the
principal's tokens.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import new_run_id
from serverless_gpu.errors import InvalidValue, NotAuthenticated, NotFound
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.access_control import ROLES, SCOPES, Resource, Right
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.server_key import PREFIX as ATTEMPT_PREFIX
from serverless_gpu.server.core.server_key import (
    SESSION_PREFIX,
    Keys,
    encode,
    parse_attempt_token,
    sha256,
    token_until_s,
)
from serverless_gpu.server.db.tables import (
    crews,
    identities,
    invitations,
    members,
    node_bindings,
    nodes,
    passwords,
    principals,
    shares,
    teams,
    tokens,
)
from serverless_gpu.server.records.crews import WITHOUT_REPORT
from serverless_gpu.wire.access import (
    PrincipalRequest,
    PrincipalView,
    SessionOrigin,
    SessionView,
    TeamView,
    TokenMade,
    TokenView,
)
from serverless_gpu.wire.base import LABEL_CHARACTERS_MAX

PREFIX = "sgpu_"
TOKEN_EXPIRY_S = 90 * 86_400.0
"""Default lifetime of a principal's token, in seconds."""
RENEWED_BELOW_S = 60 * 86_400.0
"""Remaining lifetime in seconds below which the server renews a node's token at use."""
SESSION = "session"
"""Kind of the tokens that identify browsers' sessions."""
SESSION_S = 7 * 86_400.0
"""Lifetime of a session, in seconds."""
SESSION_IDLE_S = 86_400.0
"""Seconds without a request after which a session ends."""
SESSION_KEPT_S = 30 * 86_400.0
"""Seconds for which the database keeps a session after its expiry."""
SESSIONS_MAX = 100
"""Maximum number of open sessions of one user. Another sign-in ends the oldest."""
USED_EVERY_NS = 60_000_000_000
"""Minimum nanoseconds between two writes of a token's last use."""
_ID_CHARACTERS = 26
_SECRET_CHARACTERS = 43
_SECRET_BYTES = 32
_NAME = re.compile(r"[a-z0-9][a-z0-9._@-]{0,63}")
RESERVED = ("server", "attempt")
"""Names that no principal may have, because the audit uses these names for the server and for attempts."""


# --- principals -------------------------------------------------------------------------------------------------------


def create_principal(connection: sa.Connection, request: PrincipalRequest, *, now_ns: int) -> PrincipalView:
    """Create a user or service."""
    name = check_name(request.name)
    if name in RESERVED:
        raise InvalidValue(f"the name {name!r} is reserved for the server")
    if connection.scalar(sa.select(principals.c.name).where(principals.c.name == name)) is not None:
        raise InvalidValue(f"a user or service {name!r} already exists")
    values = {"name": name, "kind": request.kind, "role": request.role, "created_ns": now_ns}
    connection.execute(sa.insert(principals).values(values))
    for team in sorted(set(request.teams)):
        add_member(connection, team=team, principal=name)
    return principal(connection, name)


def principal(connection: sa.Connection, name: str) -> PrincipalView:
    """Return a principal by name."""
    found = _principals(connection, sa.select(principals).where(principals.c.name == name))
    if not found:
        raise NotFound(f"there is no user or service {name[:64]!r}")
    return found[0]


def all_principals(connection: sa.Connection) -> tuple[PrincipalView, ...]:
    """Return all principals, by name."""
    return _principals(connection, sa.select(principals).order_by(principals.c.name))


def change_role(connection: sa.Connection, name: str, role: str) -> None:
    """Change the role of a principal."""
    if role not in ROLES:
        raise InvalidValue(f"there is no role {role!r}", hint=f"roles: {', '.join(ROLES)}")
    if principal(connection, name).role == "admin" and role != "admin":
        _check_another_admin(connection, name)
    connection.execute(sa.update(principals).where(principals.c.name == name).values(role=role))


def set_rights(connection: sa.Connection, name: str, rights: Iterable[str]) -> None:
    """Replace the granted rights of a principal."""
    granted = sorted(set(rights))
    text = msgspec.json.encode(granted).decode() if granted else None
    connection.execute(sa.update(principals).where(principals.c.name == name).values(rights_json=text))


def first_administrator(connection: sa.Connection) -> str:
    """Return the first administrator's name, or "" for a disabled or demoted first administrator.

    The first administrator is the oldest user in the database, normally the user who started the server.
    """
    row = connection.execute(_OLDEST).first()
    return row.name if row is not None and row.role == "admin" and row.disabled_ns is None else ""


def disable(connection: sa.Connection, name: str, *, now_ns: int) -> None:
    """Disable a principal, and revoke all tokens of the principal."""
    found = principal(connection, name)
    if found.disabled:
        return
    if found.role == "admin":
        _check_another_admin(connection, name)
    connection.execute(sa.update(principals).where(principals.c.name == name).values(disabled_ns=now_ns))
    open_tokens = sa.and_(tokens.c.principal == name, tokens.c.revoked_ns.is_(None))
    connection.execute(sa.update(tokens).where(open_tokens).values(revoked_ns=now_ns))


def enable(connection: sa.Connection, name: str) -> None:
    """Enable a disabled principal, who then needs new tokens."""
    principal(connection, name)
    connection.execute(sa.update(principals).where(principals.c.name == name).values(disabled_ns=None))


def delete_principal(connection: sa.Connection, name: str) -> PrincipalView:
    """Delete a principal with its tokens, memberships and share, and return the deleted principal."""
    found = principal(connection, name)
    if found.role == "admin" and not found.disabled:
        _check_another_admin(connection, name)
    theirs = sa.select(tokens.c.id).where(tokens.c.principal == name)
    for table in (node_bindings, invitations):
        connection.execute(sa.delete(table).where(table.c.token.in_(theirs)))
    for owned in (tokens, passwords, identities):
        connection.execute(sa.delete(owned).where(owned.c.principal == name))
    connection.execute(sa.delete(members).where(members.c.principal == name))
    connection.execute(sa.delete(shares).where(shares.c.kind == "user", shares.c.name == name))
    connection.execute(sa.delete(principals).where(principals.c.name == name))
    return found


def check_name(name: str) -> str:
    """Return a name if it is valid for a principal or team."""
    if not _NAME.fullmatch(name):
        hint = "use up to 64 of a-z 0-9 . _ @ -, beginning with a letter or digit"
        raise InvalidValue(f"{name[:100]!r} is not a valid name", hint=hint)
    return name


def _principals(connection: sa.Connection, query: sa.Select[tuple[object, ...]]) -> tuple[PrincipalView, ...]:
    rows = connection.execute(query).all()
    names = [row.name for row in rows]
    in_teams: dict[str, list[str]] = {name: [] for name in names}
    where = members.c.principal == names[0] if len(names) == 1 else sa.true()
    for row in connection.execute(sa.select(members).where(where).order_by(members.c.team)):
        if row.principal in in_teams:
            in_teams[row.principal].append(row.team)
    first = first_administrator(connection)
    return tuple(
        PrincipalView(
            name=row.name,
            kind=row.kind,
            role=row.role,
            teams=tuple(in_teams[row.name]),
            disabled=row.disabled_ns is not None,
            created_ns=row.created_ns,
            rights=tuple(Right) if row.name == first else _granted(row.rights_json),
        )
        for row in rows
    )


def _granted(text: str | None) -> tuple[str, ...]:
    return () if text is None else from_json(text, tuple[str, ...])


_OLDEST = (
    sa.select(principals.c.name, principals.c.role, principals.c.disabled_ns)
    .where(principals.c.kind == "user")
    .order_by(principals.c.created_ns, sa.case((principals.c.role == "admin", 0), else_=1), principals.c.name)
    .limit(1)
)


def _check_another_admin(connection: sa.Connection, name: str) -> None:
    admins = sa.and_(principals.c.role == "admin", principals.c.disabled_ns.is_(None), principals.c.name != name)
    # The update creates a write conflict if two administrators concurrently remove each other.
    if not connection.execute(sa.update(principals).where(admins).values(role="admin")).rowcount:
        raise InvalidValue(f"{name!r} is the only administrator", hint="make another user an administrator first")


# --- teams ------------------------------------------------------------------------------------------------------------


def create_team(connection: sa.Connection, name: str, *, now_ns: int) -> TeamView:
    """Create a team."""
    check_name(name)
    if connection.scalar(sa.select(teams.c.name).where(teams.c.name == name)) is not None:
        raise InvalidValue(f"a team {name!r} already exists")
    connection.execute(sa.insert(teams).values(name=name, created_ns=now_ns))
    return TeamView(name=name, members=())


def team(connection: sa.Connection, name: str) -> TeamView:
    """Return a team by name."""
    if connection.scalar(sa.select(teams.c.name).where(teams.c.name == name)) is None:
        raise NotFound(f"there is no team {name[:64]!r}")
    query = sa.select(members.c.principal).where(members.c.team == name).order_by(members.c.principal)
    zone = connection.scalar(sa.select(teams.c.time_zone).where(teams.c.name == name))
    return TeamView(name=name, members=tuple(connection.scalars(query)), time_zone=zone or "UTC")


def set_time_zone(connection: sa.Connection, name: str, time_zone: str) -> None:
    """Set the time zone of a team's budgets. The names "" and "UTC" both select UTC."""
    zone = None if time_zone in ("", "UTC") else time_zone
    connection.execute(sa.update(teams).where(teams.c.name == name).values(time_zone=zone))


def all_teams(connection: sa.Connection) -> tuple[TeamView, ...]:
    """Return all teams, by name."""
    zones = {row.name: row.time_zone or "UTC" for row in connection.execute(sa.select(teams.c.name, teams.c.time_zone))}
    found: dict[str, list[str]] = {name: [] for name in zones}
    for row in connection.execute(sa.select(members).order_by(members.c.principal)):
        found[row.team].append(row.principal)
    return tuple(TeamView(name=name, members=tuple(who), time_zone=zones[name]) for name, who in sorted(found.items()))


def delete_team(connection: sa.Connection, name: str) -> TeamView:
    """Delete a team with its memberships and share, and return the deleted team."""
    found = team(connection, name)
    connection.execute(sa.delete(members).where(members.c.team == name))
    connection.execute(sa.delete(shares).where(shares.c.kind == "team", shares.c.name == name))
    connection.execute(sa.delete(teams).where(teams.c.name == name))
    return found


def add_member(connection: sa.Connection, *, team: str, principal: str) -> bool:
    """Add a principal to a team, and return False if the principal was already a member."""
    for table, name, noun in ((teams, team, "team"), (principals, principal, "user or service")):
        if connection.scalar(sa.select(table.c.name).where(table.c.name == name)) is None:
            raise NotFound(f"there is no {noun} {name[:64]!r}")
    there = sa.and_(members.c.team == team, members.c.principal == principal)
    if connection.scalar(sa.select(members.c.team).where(there)) is not None:
        return False
    connection.execute(sa.insert(members).values(team=team, principal=principal))
    return True


def remove_member(connection: sa.Connection, *, team: str, principal: str) -> bool:
    """Remove a principal from a team, and return False if the principal was no member."""
    there = sa.and_(members.c.team == team, members.c.principal == principal)
    return connection.execute(sa.delete(members).where(there)).rowcount == 1


# --- tokens -----------------------------------------------------------------------------------------------------------


class NewToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token to create.

    Attributes:
        principal: the owner of the token.
        label: purpose of the token, as described by its owner.
        scopes: names from `model.access_control.SCOPES`. A token without scopes permits every operation of its owner.
        expires_ns: expiry, nanoseconds since 1970; None for `TOKEN_EXPIRY_S` from now.
        made_by: the principal that creates the token, or "server".
    """

    principal: str
    label: str = ""
    scopes: tuple[str, ...] = ()
    expires_ns: int | None = None
    made_by: str = ""


def new_secret() -> str:
    """Return the text of a new token, with a row identifier and 256 random bits."""
    return f"{PREFIX}{new_run_id()}_{encode(secrets.token_bytes(_SECRET_BYTES))}"


def create_token(connection: sa.Connection, new: NewToken, *, secret: str, now_ns: int) -> TokenMade:
    """Create a token.

    The server renews an agent's token at each use, unless the token has an explicit expiry.

    Args:
        connection: connection of the transaction.
        new: the owner and properties of the token.
        secret: result of `new_secret`. The caller creates the secret outside of the transaction, which may run twice.
        now_ns: nanoseconds since 1970.

    Raises:
        InvalidValue: an unknown scope, a label that is too long, an expiry in the past, or a disabled owner.
        NotFound: the principal does not exist.
    """
    for scope in new.scopes:
        if scope not in SCOPES:
            raise InvalidValue(f"there is no scope {scope[:64]!r}", hint=f"scopes: {', '.join(SCOPES)}")
    if len(new.label) > LABEL_CHARACTERS_MAX:
        raise InvalidValue(f"a token's label may have at most {LABEL_CHARACTERS_MAX} characters")
    if not new.label.isprintable():
        raise InvalidValue("the token's label contains a character that is not printable")
    if new.expires_ns is not None and new.expires_ns <= now_ns:
        raise InvalidValue("the expiry of the token is in the past")
    owner = principal(connection, new.principal)
    if owner.disabled:
        raise InvalidValue(f"{new.principal!r} is disabled", hint="enable the principal first")
    values = {
        "id": token_id(secret),
        "sha256": sha256(secret),
        "principal": new.principal,
        "label": new.label,
        "scopes_json": msgspec.json.encode(new.scopes).decode(),
        "created_ns": now_ns,
        "expires_ns": _default_end_ns(now_ns) if new.expires_ns is None else new.expires_ns,
        "renews": new.expires_ns is None and owner.role == "agent" and Resource.JOINING not in new.scopes,
        "made_by": new.made_by or None,
    }
    connection.execute(sa.insert(tokens).values(values))
    return TokenMade(token=token(connection, str(values["id"])), secret=secret)


def token(connection: sa.Connection, identifier: str) -> TokenView:
    """Return a token without its secret, which the server does not store."""
    row = connection.execute(sa.select(tokens).where(tokens.c.id == identifier)).one_or_none()
    if row is None:
        raise NotFound(f"there is no token {identifier[:64]!r}")
    return _token_view(row)


def tokens_of(connection: sa.Connection, principal: str | None = None) -> tuple[TokenView, ...]:
    """Return the API tokens of one principal or of all principals, oldest first."""
    query = sa.select(tokens).where(tokens.c.kind.is_(None)).order_by(tokens.c.id)
    if principal is not None:
        query = query.where(tokens.c.principal == principal)
    return tuple(_token_view(row) for row in connection.execute(query))


def newest_tokens(
    connection: sa.Connection, principal: str | None, *, before: str, limit: int, valid_at_ns: int | None = None
) -> tuple[TokenView, ...]:
    """Return API tokens of one principal or of all principals, newest first.

    Args:
        connection: connection with at least read access.
        principal: the owner, or None for all owners.
        before: identifier of the last token of the previous page, or "".
        limit: maximum number of tokens.
        valid_at_ns: return only tokens that are valid at this time, nanoseconds since 1970; None for all tokens.
    """
    query = sa.select(tokens).where(tokens.c.kind.is_(None)).order_by(tokens.c.id.desc()).limit(limit)
    if principal is not None:
        query = query.where(tokens.c.principal == principal)
    if before:
        query = query.where(tokens.c.id < before)
    if valid_at_ns is not None:
        is_unexpired = sa.or_(tokens.c.expires_ns.is_(None), tokens.c.expires_ns > valid_at_ns)
        query = query.where(tokens.c.revoked_ns.is_(None), is_unexpired)
    return tuple(_token_view(row) for row in connection.execute(query))


def count_valid_tokens(connection: sa.Connection, principal: str, *, now_ns: int) -> int:
    """Return the number of a principal's valid API tokens."""
    is_unexpired = sa.or_(tokens.c.expires_ns.is_(None), tokens.c.expires_ns > now_ns)
    is_valid = sa.and_(tokens.c.kind.is_(None), tokens.c.revoked_ns.is_(None), is_unexpired)
    query = sa.select(sa.func.count()).select_from(tokens).where(is_valid, tokens.c.principal == principal)
    return connection.scalar(query) or 0


def _is_open_session(now_ns: int) -> sa.ColumnElement[bool]:
    used_ns = sa.func.coalesce(tokens.c.used_ns, tokens.c.created_ns)
    return sa.and_(
        tokens.c.kind == SESSION,
        tokens.c.revoked_ns.is_(None),
        tokens.c.expires_ns > now_ns,
        used_ns > now_ns - int(SESSION_IDLE_S * 1e9),
    )


def end_sessions(connection: sa.Connection, principal: str, *, kept: str = "", now_ns: int) -> tuple[str, ...]:
    """End the open sessions of a principal except one, and return the identifiers of the ended sessions."""
    is_other = sa.and_(_is_open_session(now_ns), tokens.c.principal == principal, tokens.c.id != kept)
    found = tuple(connection.scalars(sa.select(tokens.c.id).where(is_other).order_by(tokens.c.id)))
    connection.execute(sa.update(tokens).where(is_other).values(revoked_ns=now_ns))
    return found


def sessions_of(connection: sa.Connection, principal: str | None = None, *, now_ns: int) -> tuple[SessionView, ...]:
    """Return the open sessions of one principal or of all principals, newest first."""
    query = sa.select(tokens).where(_is_open_session(now_ns)).order_by(tokens.c.id.desc())
    if principal is not None:
        query = query.where(tokens.c.principal == principal)
    return tuple(
        SessionView(
            id=row.id,
            principal=row.principal,
            origin=from_json(row.origin_json, SessionOrigin),
            created_ns=row.created_ns,
            expires_ns=row.expires_ns,
            used_ns=row.used_ns,
        )
        for row in connection.execute(query)
    )


def create_session(
    connection: sa.Connection, principal_name: str, origin: SessionOrigin, *, secret: str, now_ns: int
) -> str:
    """Create a session of an enabled principal, and return the session's identifier."""
    owner = principal(connection, principal_name)
    if owner.disabled:
        raise NotAuthenticated(f"{principal_name} is disabled", hint="ask an administrator to enable the user")
    values = {
        "id": token_id(secret),
        "sha256": sha256(secret),
        "principal": owner.name,
        "label": "",
        "scopes_json": "[]",
        "created_ns": now_ns,
        "expires_ns": now_ns + int(SESSION_S * 1e9),
        "kind": SESSION,
        "origin_json": msgspec.json.encode(origin).decode(),
    }
    theirs = sa.and_(tokens.c.kind == SESSION, tokens.c.principal == owner.name)
    is_old = sa.and_(theirs, tokens.c.expires_ns < now_ns - int(SESSION_KEPT_S * 1e9))
    connection.execute(sa.delete(tokens).where(is_old))
    query = sa.select(tokens.c.id).where(theirs, _is_open_session(now_ns)).order_by(tokens.c.id.desc())
    oldest = tuple(connection.scalars(query.offset(SESSIONS_MAX - 1)))
    connection.execute(sa.update(tokens).where(tokens.c.id.in_(oldest)).values(revoked_ns=now_ns))
    connection.execute(sa.insert(tokens).values(values))
    return str(values["id"])


def is_session(connection: sa.Connection, identifier: str) -> bool:
    """Return True if an identifier belongs to a session and not to an API token."""
    return connection.scalar(sa.select(tokens.c.kind).where(tokens.c.id == identifier)) == SESSION


def revoke_token(connection: sa.Connection, identifier: str, *, now_ns: int) -> TokenView:
    """Revoke a token. An already revoked token keeps the first revocation time."""
    good = sa.and_(tokens.c.id == identifier, tokens.c.revoked_ns.is_(None))
    connection.execute(sa.update(tokens).where(good).values(revoked_ns=now_ns))
    return token(connection, identifier)


def revoke_all(connection: sa.Connection, *, now_ns: int) -> tuple[TokenView, ...]:
    """Revoke every unrevoked token, and return the newly revoked tokens."""
    rows = connection.execute(sa.select(tokens).where(tokens.c.revoked_ns.is_(None)).order_by(tokens.c.id))
    good = tuple(_token_view(row) for row in rows)
    connection.execute(sa.update(tokens).where(tokens.c.revoked_ns.is_(None)).values(revoked_ns=now_ns))
    return good


def note_use(connection: sa.Connection, identifiers: Iterable[str], *, now_ns: int) -> None:
    """Store the last use of tokens at most once per minute, and extend renewable tokens."""
    stale = sa.or_(tokens.c.used_ns.is_(None), tokens.c.used_ns < now_ns - USED_EVERY_NS)
    renewed_below_ns = now_ns + int(RENEWED_BELOW_S * 1e9)
    due = sa.and_(
        tokens.c.renews, tokens.c.revoked_ns.is_(None), tokens.c.expires_ns.between(now_ns + 1, renewed_below_ns)
    )
    for identifier in sorted(identifiers):
        connection.execute(sa.update(tokens).where(tokens.c.id == identifier, stale).values(used_ns=now_ns))
        until = {"expires_ns": _default_end_ns(now_ns)}
        connection.execute(sa.update(tokens).where(tokens.c.id == identifier, due).values(until))


def bound_lifetimes(connection: sa.Connection, *, now_ns: int) -> int:
    """Set an expiry for tokens of older server versions, and return the number of changed tokens."""
    agents = sa.select(principals.c.name).where(principals.c.role == "agent")
    joining = tokens.c.scopes_json.contains(f'"{Resource.JOINING}"')
    renews = sa.and_(tokens.c.principal.in_(agents), sa.not_(joining))
    endless = sa.and_(tokens.c.expires_ns.is_(None), tokens.c.revoked_ns.is_(None))
    values = {"expires_ns": _default_end_ns(now_ns), "renews": renews}
    return connection.execute(sa.update(tokens).where(endless).values(values)).rowcount


def _default_end_ns(now_ns: int) -> int:
    return now_ns + int(TOKEN_EXPIRY_S * 1e9)


def _token_view(row: sa.Row[tuple[object, ...]]) -> TokenView:
    return TokenView(
        id=row.id,
        principal=row.principal,
        label=row.label,
        scopes=from_json(row.scopes_json, tuple[str, ...]),
        created_ns=row.created_ns,
        expires_ns=row.expires_ns,
        revoked_ns=row.revoked_ns,
        used_ns=row.used_ns,
        made_by=row.made_by or "",
    )


# --- authentication ---------------------------------------------------------------------------------------------------


def authenticate(connection: sa.Connection, secret: str, *, now_ns: int, keys: Keys | None = None) -> Caller:
    """Authenticate a token, and return the caller.

    Args:
        connection: connection with at least read access.
        secret: the token in the request; any text is possible.
        now_ns: nanoseconds since 1970.
        keys: keys of the server. Without keys, the server cannot recognize attempt tokens with an expiry.

    Raises:
        NotAuthenticated: the token is unknown, revoked or expired, or its owner is disabled. Only a caller with the
            correct secret receives the exact reason.
    """
    if secret.startswith(ATTEMPT_PREFIX):
        return _attempt(connection, secret, now_ns, keys)
    session = keys.node_session(secret) if keys is not None and secret.startswith(SESSION_PREFIX) else None
    identifier = session.token_id if session is not None else token_id(secret)
    rows: Sequence[Any] = ()
    if identifier:  # Reject a malformed token without a database query.
        rows = connection.execute(_WHOSE, {"token": identifier}).all()
    if not rows or (session is None and not hmac.compare_digest(rows[0].sha256, sha256(secret))):
        raise NotAuthenticated("the server does not know this token", hint=_LOGIN)
    row = rows[0]
    if row.token_kind is not None:  # A browser's session is valid only as a cookie.
        raise NotAuthenticated("the server does not know this token", hint=_LOGIN)
    # Check for a disabled principal before a revoked token, because disabling a principal also revokes the principal's
    # tokens.
    if row.disabled_ns is not None:
        hint = (
            "ask an administrator to enable the principal and create a new token: `sgpu token create --for "
            f"{row.principal}`"
        )
        raise NotAuthenticated(f"{row.principal} is disabled", hint=hint)
    if row.revoked_ns is not None:
        raise NotAuthenticated(f"the token {row.id} was revoked", hint=_LOGIN)
    if row.expires_ns is not None and row.expires_ns <= now_ns:
        raise NotAuthenticated(f"the token {row.id} has expired", hint=_LOGIN)
    if session is not None and session.until_s * 1_000_000_000 <= now_ns:
        raise NotAuthenticated("the session of the node has expired", hint=_SESSION)
    if session is not None and row.node_key not in (None, "", session.key):
        raise NotAuthenticated("the node has another key since this session began", hint=_SESSION)
    return Caller(
        name=row.principal,
        kind=row.kind,
        role=row.role,
        teams=tuple(sorted(one.team for one in rows if one.team is not None)),
        scopes=from_json(row.scopes_json, tuple[str, ...]),
        token_id=row.id,
        key="" if session is None else session.key,
        needs_key=session is None and bool(row.node_key),
    )


def authenticate_session(connection: sa.Connection, secret: str, *, now_ns: int) -> Caller:
    """Authenticate the secret of a browser's session, and return the caller.

    Raises:
        NotAuthenticated: the session is unknown, signed out, expired or unused for `SESSION_IDLE_S`, or its owner is
            disabled.
    """
    identifier = token_id(secret)
    rows = connection.execute(_WHOSE, {"token": identifier}).all() if identifier else ()
    if not rows or not hmac.compare_digest(rows[0].sha256, sha256(secret)) or rows[0].token_kind != SESSION:
        raise NotAuthenticated("you are not signed in", hint=_SIGN_IN)
    row = rows[0]
    if row.disabled_ns is not None:
        raise NotAuthenticated(f"{row.principal} is disabled", hint="ask an administrator to enable the user")
    if row.revoked_ns is not None:
        raise NotAuthenticated("you have signed out, or someone has ended your session", hint=_SIGN_IN)
    idle_ns = now_ns - (row.used_ns or row.created_ns)
    if row.expires_ns <= now_ns or idle_ns > SESSION_IDLE_S * 1e9:
        raise NotAuthenticated("your session has expired", hint=_SIGN_IN)
    return Caller(
        name=row.principal,
        kind=row.kind,
        role=row.role,
        teams=tuple(sorted(one.team for one in rows if one.team is not None)),
        token_id=row.id,
    )


_SIGN_IN = "sign in again"
_SESSION = "the node opens another session with its key"
_WHOSE = (
    sa.select(
        *(column for column in tokens.c if column.name != "kind"),
        tokens.c.kind.label("token_kind"),
        principals.c.kind,
        principals.c.role,
        principals.c.disabled_ns,
        members.c.team,
        node_bindings.c.key.label("node_key"),
    )
    .select_from(
        tokens.join(principals, tokens.c.principal == principals.c.name)
        .outerjoin(members, members.c.principal == principals.c.name)
        .outerjoin(node_bindings, node_bindings.c.token == tokens.c.id)
    )
    .where(tokens.c.id == sa.bindparam("token"))
)
_CREW = (
    sa.select(crews.c.token_sha256, crews.c.reason, nodes.c.name, nodes.c.revoked_ns)
    .select_from(crews.join(nodes, nodes.c.id == crews.c.node_id))
    .where(
        crews.c.run_id == sa.bindparam("of_run"),
        crews.c.fence == sa.bindparam("of_fence"),
        crews.c.crew == sa.bindparam("of_crew"),
    )
)
_LATE = frozenset(reason.value for reason in WITHOUT_REPORT)
_LOGIN = "store a valid token with `sgpu login`. An administrator can create a token with `sgpu token create`"


def _attempt(connection: sa.Connection, secret: str, now_ns: int, keys: Keys | None) -> Caller:
    parsed, until_s = parse_attempt_token(secret), token_until_s(secret)
    row = None
    if parsed is not None:
        run_id, fence, number = parsed
        row = connection.execute(_CREW, {"of_run": run_id, "of_fence": fence, "of_crew": number}).first()
    if row is None:
        raise NotAuthenticated("the server does not know the attempt's token")
    signed = until_s is not None and keys is not None and keys.has_signed(secret)
    if not signed and not hmac.compare_digest(row.token_sha256, sha256(secret)):
        raise NotAuthenticated("the server does not know the attempt's token")
    if row.revoked_ns is not None:
        raise NotAuthenticated(f"the node {row.name!r} of the attempt was revoked")
    until_ns = until_s * 1_000_000_000 if until_s is not None else None
    if until_ns is not None and until_ns <= now_ns:
        raise NotAuthenticated(
            "the attempt's token has expired", hint="the node receives a new attempt token with its next heartbeat"
        )
    return Caller(kind="attempt", attempt=parsed, until_ns=until_ns, late=row.reason in _LATE)


def token_sha256(connection: sa.Connection, identifier: str) -> str:
    """Return the hash of a token, or "" for an unknown token."""
    return connection.scalar(sa.select(tokens.c.sha256).where(tokens.c.id == identifier)) or ""


def is_known(connection: sa.Connection, secret: str) -> bool:
    """Return True if the database contains a token, even a revoked or expired token."""
    known = connection.scalar(sa.select(tokens.c.sha256).where(tokens.c.id == token_id(secret)))
    return known is not None and hmac.compare_digest(known, sha256(secret))


def is_to_be_replaced(connection: sa.Connection, secret: str, *, now_ns: int) -> bool:
    """Return True if the server must replace a token in a file, because the token expires soon."""
    query = sa.select(tokens.c.expires_ns).where(tokens.c.id == token_id(secret), tokens.c.revoked_ns.is_(None))
    expires_ns: int | None = connection.scalar(query)
    return expires_ns is not None and expires_ns < now_ns + int(RENEWED_BELOW_S / 2 * 1e9)


def is_unrevoked(connection: sa.Connection, secret: str) -> bool:
    """Return True if the database contains a token and the token is not revoked."""
    query = sa.select(tokens.c.sha256).where(tokens.c.id == token_id(secret), tokens.c.revoked_ns.is_(None))
    known = connection.scalar(query)
    return known is not None and hmac.compare_digest(known, sha256(secret))


def token_id(secret: str) -> str:
    """Return the identifier in a principal's token, or "" for an invalid token."""
    whole = len(PREFIX) + _ID_CHARACTERS + 1 + _SECRET_CHARACTERS
    if not secret.startswith(PREFIX) or len(secret) != whole:
        return ""
    return secret[len(PREFIX) : len(PREFIX) + _ID_CHARACTERS]
