"""Replaces the server's key and tokens after a possible leak.

    mark ─▶ key.next ─▶ sealed rows, under the new key ─▶ key.next becomes key ─▶ hashes of attempts' tokens
         ─▶ all tokens of principals are revoked ─▶ files of first tokens ─▶ Ray's token ─▶ no mark

An operator must stop the server before a rotation. The marker file `rotation.json` contains the digest of the old key.
While `rotation.json` exists, the server does not start. The next `rotate` call continues a killed rotation, because
every rotation step is repeatable.

A rotation cannot change the values of secrets, which come from other services. The rotation reseals the contexts of
unended runs only, because the server never opens the context of an ended run.

Failure cases:

* If the server or its Ray is still running, the rotation changes nothing and reports an error.

* If a rotation cannot decrypt a sealed row, the row stays unchanged. The next server start reports the row.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec
import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import Clock, machine
from serverless_gpu.engines.ray import ray_keeper
from serverless_gpu.engines.ray.ray_machine import TOKEN as RAY_TOKEN
from serverless_gpu.errors import ServerProblem
from serverless_gpu.json_codec import from_json
from serverless_gpu.node.base.private_files import write_private
from serverless_gpu.server.core.server_key import KEY_BYTES, Keys, Sealer, read_keys
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.http.listener import lock_server
from serverless_gpu.server.identity import bootstrap
from serverless_gpu.server.records import audit, crews, nodes, principals, runs, stored_secrets
from serverless_gpu.server.records.audit import SERVER, Action
from serverless_gpu.wire.access import SecretView

MARK, NEXT_KEY = "rotation.json", "key.next"
_AT_ONCE = 200
_TOKEN_FILES = ("token", "node.token", "join.token")


class RotationMark(msgspec.Struct, frozen=True, kw_only=True):
    """State of a rotation in progress, stored in the marker file `rotation.json`."""

    old_key: str  # Digest of the replaced key.
    # True after the rotation has revoked every token from before the rotation.
    are_revoked: bool = False


class Rotated(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a rotation, with the tokens and secrets that operators must still replace."""

    contexts: int  # Number of unended runs with resealed variables.
    revoked: tuple[tuple[str, int], ...]  # Principals that need new tokens, with the number of revoked tokens.
    nodes: tuple[str, ...]  # Names of other machines that must join the pool again.
    secrets: tuple[SecretView, ...]  # Secrets that operators must replace at the issuing service.
    is_ray_given: bool  # True if Ray's token belongs to a cluster that this server did not start.


def refuse_unfinished(directory: Path) -> None:
    """Refuse to start a server with an unfinished rotation."""
    if (directory / MARK).exists():
        raise ServerProblem(
            "a rotation of this server's key and tokens was interrupted", hint="finish the rotation: sgpu server rotate"
        )


def rotate(settings: Settings, *, clock: Clock, login: str) -> Rotated:
    """Replace the key and tokens of a stopped server, or finish an interrupted rotation."""
    directory = settings.directory
    if not (directory / "key").exists():
        raise ServerProblem(f"{settings.home} has no server", hint="set SERVERLESS_GPU_HOME to the home of the server")
    with lock_server(directory), contextlib.closing(Database(settings.database, clock=clock)) as database:
        if ray_keeper.running(directory / "ray") is not None:
            raise ServerProblem(
                "this server's Ray is still running with the old token", hint="stop Ray with `sgpu stop`"
            )
        database.acquire()
        database.migrate()
        mark = _begun(directory)
        contexts = _replace_key(database, directory, mark, now=clock.wall_ns)
        _replace_attempt_tokens(database, read_keys(directory), now=clock.wall_ns)
        if not mark.are_revoked:
            _revoke_all(database, now_ns=clock.wall_ns())
            write_private(directory / MARK, msgspec.json.encode(msgspec.structs.replace(mark, are_revoked=True)))
            faults.reach("between_rotation_steps")
        _replace_files(database, settings, login=login, now_ns=clock.wall_ns())
        rotated = database.read(lambda connection: _told(connection, settings, contexts))
        _audit(database, "done", clock.wall_ns())
        (directory / MARK).unlink()
    return rotated


def _begun(directory: Path) -> RotationMark:
    with contextlib.suppress(FileNotFoundError):
        return from_json((directory / MARK).read_bytes(), RotationMark)
    mark = RotationMark(old_key=_digest((directory / "key").read_bytes()))
    write_private(directory / MARK, msgspec.json.encode(mark))
    faults.reach("between_rotation_steps")
    return mark


def _replace_key(database: Database, directory: Path, mark: RotationMark, *, now: Callable[[], int]) -> int:
    """Seal all data with a new key, install the new key, and return the number of resealed runs."""
    if _digest((directory / "key").read_bytes()) != mark.old_key:
        return 0  # An interrupted rotation has already replaced the key.
    write_private(directory / NEXT_KEY, secrets.token_bytes(KEY_BYTES), replace=False)
    faults.reach("between_rotation_steps")
    old, new = (Sealer(Keys((directory / name).read_bytes()).sealing) for name in ("key", NEXT_KEY))
    names = database.write(lambda connection: stored_secrets.reseal(connection, old, new))
    _audit(database, "secrets", now(), sealed_again=names)
    faults.reach("between_rotation_steps")
    count, last = 0, ""
    while True:
        last, some = database.write(functools.partial(runs.reseal, old=old, new=new, after=last, at_most=_AT_ONCE))
        count += some
        faults.reach("between_rotation_steps")
        if not last:
            break
    _audit(database, "key", now(), contexts=count)
    (directory / NEXT_KEY).replace(directory / "key")
    _sync(directory)
    faults.reach("between_rotation_steps")
    return count


def _replace_attempt_tokens(database: Database, keys: Keys, *, now: Callable[[], int]) -> None:
    """Replace the hashes of attempt tokens, because attempt tokens derive from the server's key."""
    last: tuple[str, int, int] | None = ("", 0, 0)
    while last is not None:
        last = database.write(functools.partial(crews.retoken, keys=keys, after=last, at_most=_AT_ONCE))
        faults.reach("between_rotation_steps")
    _audit(database, "attempts", now())


def _revoke_all(database: Database, *, now_ns: int) -> None:
    def work(connection: sa.Connection) -> None:
        revoked = principals.revoke_all(connection, now_ns=now_ns)
        for each in revoked:
            detail = {"principal": each.principal, "rotation": True}
            audit.record(
                connection, who=SERVER, action=Action.TOKEN_REVOKE, subject=each.id, now_ns=now_ns, detail=detail
            )
        _record(connection, "tokens", now_ns, revoked=len(revoked))

    database.write(work)
    faults.reach("between_rotation_steps")


def _replace_files(database: Database, settings: Settings, *, login: str, now_ns: int) -> None:
    """Write new tokens for the administrator, this machine and joining machines.

    Delete the Ray cluster's token.
    """
    directory = settings.directory
    for name in _TOKEN_FILES:
        with contextlib.suppress(FileNotFoundError):
            secret = (directory / name).read_text(encoding="ascii", errors="replace").strip()
            if not database.read(functools.partial(principals.is_unrevoked, secret=secret)):
                (directory / name).unlink()
    faults.reach("between_rotation_steps")
    bootstrap.first_tokens(database, directory, login=login, now_ns=now_ns)
    if settings.ray is not None:
        bootstrap.join_token(database, directory, now_ns=now_ns)
        if not settings.ray.address:
            (directory / "ray" / RAY_TOKEN).unlink(missing_ok=True)
    _audit(database, "files", now_ns)
    faults.reach("between_rotation_steps")


def _told(connection: sa.Connection, settings: Settings, contexts: int) -> Rotated:
    every = principals.all_principals(connection)
    without = {one.name: 0 for one in every if not one.disabled and one.name != bootstrap.NODE}
    good = set()
    for token in principals.tokens_of(connection):
        if token.revoked_ns is None:
            good.add(token.principal)
        elif token.principal in without:
            without[token.principal] += 1
    return Rotated(
        contexts=contexts,
        revoked=tuple((name, count) for name, count in without.items() if name not in good),
        nodes=tuple(node.name for node in nodes.every(connection) if node.machine != machine()),
        secrets=tuple(stored_secrets.listed(connection, "", (), everybodys=True)),
        is_ray_given=settings.ray is not None and bool(settings.ray.address),
    )


def _audit(database: Database, step: str, now_ns: int, **detail: object) -> None:
    database.write(lambda connection: _record(connection, step, now_ns, **detail))


def _record(connection: sa.Connection, step: str, now_ns: int, **detail: object) -> None:
    said = {"step": step, **detail}
    audit.record(connection, who=SERVER, action=Action.SERVER_ROTATE, subject="server", now_ns=now_ns, detail=said)


def _digest(key: bytes) -> str:
    return hashlib.sha256(b"serverless-gpu rotation" + key).hexdigest()


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
