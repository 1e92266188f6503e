"""Repository of secrets: names, versions, sealed values, and the versions that attempts use.

    sgpu secret set ─▶ the next version, sealed for (owner, name, version)   older versions are deleted after use
    submit          ─▶ each name must exist                                  else SecretMissing
    placement       ─▶ the newest version of each, with the attempt          else FAILED/secret_missing, no order
    order           ─▶ the values of these versions, to the attempt's node

A run can use the secrets of its owner. With `team=`, a run can also use the team's secrets while the run's owner is a
member of the team. If owner and team have a secret of the same name, the owner's secret takes precedence.

Failure cases:

- A user rotates a secret after the placement. The placed attempt still uses the old version. The server deletes the old
  version after the attempt has ended.

- A user deletes a secret after the placement. The server immediately deletes all values of the secret. The node refuses
  an order without the secret's value. The next placement of the run ends the run. An attempt that has already received
  the secret's value continues.

- The key file is lost. The server does not start without the key file. With `--key-lost`, the server deletes all secret
  values that it cannot decrypt.

- A stored secret value is damaged. The server treats a damaged value as missing, and does not place runs that need the
  value.

Logs, audit entries and answers to clients contain no secret values. A copy of the database without the key file reveals
no secret values.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from serverless_gpu.errors import NotFound, SecretMissing, ServerProblem
from serverless_gpu.model.secrets import Pinned
from serverless_gpu.server.core.server_key import Sealer
from serverless_gpu.server.db.tables import attempts as attempts_table
from serverless_gpu.server.db.tables import members, orders, runs, secrets
from serverless_gpu.server.records import attempts
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.wire.access import SecretValue, SecretView

_decode_pins = msgspec.json.Decoder(tuple[Pinned, ...]).decode


class ChangedBy(NamedTuple):
    """Author and time of a change of a secret, in nanoseconds since 1970."""

    name: str
    now_ns: int


class SecretOwner(NamedTuple):
    """Owner of a secret, with kind "user" (any principal) or "team"."""

    kind: str
    owner: str


def put(
    connection: sa.Connection, sealer: Sealer, whose: SecretOwner, name: str, value: bytes, by: ChangedBy
) -> tuple[SecretView, bool]:
    """Store the next version of a secret, and return the version with True if the value is new.

    Args:
        connection: connection of the transaction.
        sealer: encrypts the value.
        whose: the owner of the secret.
        name: a valid name.
        value: the value. An unchanged value creates no version, so that a client can repeat the request.
        by: the author of the change.
    """
    last = _last(connection, whose, name)
    if last is not None and last.sealed is not None and sealer.is_mine(last.sealed):
        known = sealer.unseal(last.sealed, about=_about(whose, name, last.version))
        if hmac.compare_digest(known, value):
            return _view(last), False
    version = 1 if last is None else last.version + 1
    row = {
        "kind": whose.kind,
        "owner": whose.owner,
        "name": name,
        "version": version,
        "sealed": sealer.seal(value, about=_about(whose, name, version)),
        "created_ns": by.now_ns,
        "by": by.name,
        "used_ns": None if last is None else last.used_ns,
    }
    connection.execute(secrets.insert(), row)
    tidy(connection, whose, name)
    written = _last(connection, whose, name)
    assert written is not None
    return _view(written), True


def delete(connection: sa.Connection, whose: SecretOwner, name: str, by: ChangedBy) -> SecretView:
    """Delete every value of a secret.

    Keep the version counter, so that each version number identifies one value.
    """
    last = _last(connection, whose, name)
    if last is None or last.sealed is None:
        whose_else = f"{whose.owner} has no secret" if whose.kind == "user" else f"team {whose.owner} has no secret"
        hint = "you can delete your own secrets and those of your teams (--team NAME). List them: sgpu secret list"
        raise NotFound(f"{whose_else} {name[:64]!r}", hint=hint)
    connection.execute(secrets.update().where(_is(whose, name)).values(sealed=None))
    gone = sa.and_(_is(whose, name), secrets.c.version == last.version)
    connection.execute(secrets.update().where(gone).values(version=last.version + 1, created_ns=by.now_ns, by=by.name))
    tidy(connection, whose, name)
    return _view(last)


def listed(connection: sa.Connection, name: str, teams: Sequence[str], *, everybodys: bool) -> list[SecretView]:
    """Return the newest version of each secret that has a value."""
    key = (secrets.c.kind, secrets.c.owner, secrets.c.name)
    newest = sa.select(*key, sa.func.max(secrets.c.version).label("version")).group_by(*key).subquery()
    same = sa.and_(*(secrets.c[name] == newest.c[name] for name in ("kind", "owner", "name", "version")))
    query = sa.select(secrets).join(newest, same).where(secrets.c.sealed.is_not(None))
    if not everybodys:
        own = sa.and_(secrets.c.kind == "user", secrets.c.owner == name)
        query = query.where(sa.or_(own, sa.and_(secrets.c.kind == "team", secrets.c.owner.in_(list(teams)))))
    query = query.order_by(secrets.c.name, secrets.c.kind, secrets.c.owner)
    return [_view(row) for row in connection.execute(query)]


def pins(connection: sa.Connection, sealer: Sealer, owner: str, team: str, names: Sequence[str]) -> tuple[Pinned, ...]:
    """Return the secret versions for a new attempt."""
    mine = [SecretOwner("user", owner)]
    if (
        team
        and connection.execute(
            sa.select(members.c.team).where(members.c.team == team, members.c.principal == owner)
        ).first()
    ):
        mine.append(SecretOwner("team", team))
    found: list[Pinned] = []
    for name in names:
        last = next((row for whose in mine if (row := _last(connection, whose, name)) and row.sealed), None)
        if last is None:
            whose = f"{owner} has none" + (f", and team {team} has none" if len(mine) > 1 else "")
            raise SecretMissing(
                f"there is no secret {name[:64]!r}: {whose}",
                hint=f"create it with `sgpu secret set {name[:64]}`. Runs with team= can also use secrets of that team",
            )
        _require_open(sealer, SecretOwner(last.kind, last.owner), name, last)
        found.append(Pinned(name=name, version=last.version, team=last.owner if last.kind == "team" else ""))
    return tuple(found)


def values(
    connection: sa.Connection, sealer: Sealer, run: StoredRun, pinned: Sequence[Pinned], variables: Mapping[str, str]
) -> tuple[SecretValue, ...]:
    """Return the secret values that an attempt's node receives."""
    found: list[SecretValue] = []
    for one in pinned:
        whose = SecretOwner("team", one.team) if one.team else SecretOwner("user", run.owner)
        row = connection.execute(
            sa.select(secrets.c.sealed).where(_is(whose, one.name), secrets.c.version == one.version)
        ).first()
        sealed = None if row is None else row.sealed
        value = None if sealed is None else sealer.unseal(sealed, about=_about(whose, one.name, one.version))
        variable = variables.get(one.name, "")
        found.append(SecretValue(name=one.name, text=one.text, value=value, variable=variable))
    return tuple(found)


def mark_used(
    connection: sa.Connection, node_id: str, *, seqs: Sequence[int] = (), runs_of: Sequence[str] = (), at_ns: int
) -> None:
    """Record the use of secrets in start orders that a node confirms, by number or by reporting the runs."""
    which = sa.or_(orders.c.seq.in_(seqs), orders.c.run_id.in_(runs_of))
    about = sa.and_(orders.c.run_id == attempts_table.c.run_id, orders.c.fence == attempts_table.c.fence)
    query = (
        sa.select(runs.c.owner, attempts_table.c.secrets_json)
        .select_from(orders.join(attempts_table, about).join(runs, runs.c.id == orders.c.run_id))
        .where(orders.c.node_id == node_id, which, orders.c.taken_ns.is_(None))
        .where(orders.c.kind == "start", attempts_table.c.secrets_json != "[]")
    )
    for owner, text in connection.execute(query).all():
        for one in _decode_pins(text):
            whose = SecretOwner("team", one.team) if one.team else SecretOwner("user", owner)
            connection.execute(secrets.update().where(_is(whose, one.name)).values(used_ns=at_ns))


def newest(connection: sa.Connection, sealer: Sealer, whose: SecretOwner, name: str) -> bytes:
    """Return the value of a secret's newest version.

    Raises:
        SecretMissing: the secret does not exist, or the server cannot decrypt its value.
    """
    last = _last(connection, whose, name)
    if last is None or last.sealed is None:
        of = f" --team {whose.owner}" if whose.kind == "team" else ""
        raise SecretMissing(
            f"{whose.kind} {whose.owner} has no secret {name[:64]!r}",
            hint=f"create it with `sgpu secret set {name[:64]}{of}`",
        )
    _require_open(sealer, whose, name, last)
    return sealer.unseal(last.sealed, about=_about(whose, name, last.version))


def sealed_by_another(connection: sa.Connection, sealer: Sealer) -> list[tuple[SecretOwner, str, int]]:
    """Return the secret versions that the current key cannot decrypt."""
    query = sa.select(secrets.c.kind, secrets.c.owner, secrets.c.name, secrets.c.version, secrets.c.sealed)
    rows = connection.execute(query.where(secrets.c.sealed.is_not(None)).order_by(secrets.c.name, secrets.c.version))
    return [(SecretOwner(row.kind, row.owner), row.name, row.version) for row in rows if not sealer.is_mine(row.sealed)]


def take_away_sealed_by_another(connection: sa.Connection, sealer: Sealer) -> list[str]:
    """Delete every secret value of another key. The owners must set their deleted secrets again.

    Returns:
        Distinct names of the affected secrets.
    """
    lost = sealed_by_another(connection, sealer)
    for whose, name, version in lost:
        one = sa.and_(_is(whose, name), secrets.c.version == version)
        connection.execute(secrets.update().where(one).values(sealed=None))
    return sorted({name for _whose, name, _version in lost})


def reseal(connection: sa.Connection, old: Sealer, new: Sealer) -> int:
    """Encrypt all secret values with the new key, and return the number of values."""
    count = 0
    for whose, name, version in sealed_by_another(connection, new):
        one = sa.and_(_is(whose, name), secrets.c.version == version)
        sealed = connection.execute(sa.select(secrets.c.sealed).where(one)).scalar_one()
        if old.is_mine(sealed):
            about = _about(whose, name, version)
            again = new.seal(old.unseal(sealed, about=about), about=about)
            connection.execute(secrets.update().where(one).values(sealed=again))
            count += 1
    return count


def tidy(connection: sa.Connection, whose: SecretOwner, name: str) -> None:
    """Remove old versions of a secret that no attempt uses."""
    last = _last(connection, whose, name)
    kept = {last.version} if last is not None else set()
    for kind, owner, pinned, version in _in_use(connection):
        if (kind, owner, pinned) == (*whose, name):
            kept.add(version)
    connection.execute(secrets.delete().where(_is(whose, name), secrets.c.version.not_in(kept)))


def replaced(connection: sa.Connection) -> list[tuple[SecretOwner, str]]:
    """Return the secrets with stored older versions."""
    query = sa.select(secrets.c.kind, secrets.c.owner, secrets.c.name).group_by(
        secrets.c.kind, secrets.c.owner, secrets.c.name
    )
    rows = connection.execute(query.having(sa.func.count() > 1))
    return [(SecretOwner(row.kind, row.owner), row.name) for row in rows]


def _in_use(connection: sa.Connection) -> list[tuple[str, str, str, int]]:
    """Return secrets in use by unfinished attempts, as owner kind, owner name, secret name and version."""
    query = (
        sa.select(runs.c.owner, attempts_table.c.run_id, attempts_table.c.fence)
        .select_from(attempts_table.join(runs, runs.c.id == attempts_table.c.run_id))
        .where(attempts_table.c.ended_ns.is_(None), attempts_table.c.secrets_json != "[]")
    )
    found: list[tuple[str, str, str, int]] = []
    for row in connection.execute(query).all():
        attempt = attempts.find(connection, row.run_id, row.fence)
        for one in attempt.secrets if attempt is not None else ():
            kind, owner = ("team", one.team) if one.team else ("user", row.owner)
            found.append((kind, owner, one.name, one.version))
    return found


def _last(connection: sa.Connection, whose: SecretOwner, name: str) -> sa.Row[Any] | None:
    query = sa.select(secrets).where(_is(whose, name)).order_by(secrets.c.version.desc()).limit(1)
    return connection.execute(query).first()


def _is(whose: SecretOwner, name: str) -> sa.ColumnElement[bool]:
    return sa.and_(secrets.c.kind == whose.kind, secrets.c.owner == whose.owner, secrets.c.name == name)


def _require_open(sealer: Sealer, whose: SecretOwner, name: str, row: sa.Row[Any]) -> None:
    """Raise SecretMissing if the server cannot decrypt a secret's value."""
    try:
        sealer.unseal(row.sealed, about=_about(whose, name, row.version))
    except ServerProblem as error:
        of = f" --team {whose.owner}" if whose.kind == "team" else ""
        raise SecretMissing(
            f"the server cannot decrypt the secret {name[:64]!r}: {error.message}",
            hint=f"set the secret again: sgpu secret set {name[:64]}{of}",
        ) from None


def _about(whose: SecretOwner, name: str, version: int) -> str:
    """Return the identity that binds an encrypted value to its database row."""
    return f"secret:{whose.kind}:{whose.owner}:{name}:{version}"


def _view(row: sa.Row[Any]) -> SecretView:
    is_teams = row.kind == "team"
    return SecretView(
        name=row.name,
        version=row.version,
        owner="" if is_teams else row.owner,
        team=row.owner if is_teams else "",
        created_ns=row.created_ns,
        by=row.by,
        used_ns=row.used_ns,
    )
