"""Who is there before anybody was made: an administrator, and the node that the server is on.

    server/token         the administrator's, for the person who started the server
    server/node.token    of a service with the role `agent`, for this machine as a node
    server/join.token    of the same service, for machines that join it by Ray: good for that alone

Each start looks whether the files hold tokens that the database knows. One that it does not know (the first start, a
lost file, another database, a crash between file and database) is replaced: the file first, then the row, so that a
file never misses the token it should have, and what the same file held before is revoked: deleting a file and starting
again is how its token is changed. A token that is known stays, also when it was revoked: what somebody took
away does not come back by itself.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import msgspec
import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import machine
from serverless_gpu.model.access import Resource
from serverless_gpu.node.private_files import write_private
from serverless_gpu.server import audit, identity
from serverless_gpu.server.audit import SERVER, Action
from serverless_gpu.server.identity import NewToken
from serverless_gpu.server.keys import sha256
from serverless_gpu.server.services import Transactions
from serverless_gpu.wire.principals import PrincipalRequest

NODE = "node"
"""Name of the service whose token this machine's agent has."""
_ADMIN = "admin"


class FirstTokens(msgspec.Struct, frozen=True, kw_only=True):
    """What the files hold.

    Attributes:
        principal: the administrator's name.
        token: theirs.
        node_token: of this machine's agent.
    """

    principal: str
    token: str
    node_token: str


def first_tokens(database: Transactions, directory: Path, *, login: str, now_ns: int) -> FirstTokens:
    """Return the tokens of the server's files; makes what is missing.

    Args:
        database: migrated.
        directory: the server's.
        login: what the operating system calls the person who starts the server; the administrator gets this name.
        now_ns: nanoseconds since 1970.
    """
    name = principal_name(login)
    token = _held(database, directory / "token", PrincipalRequest(name=name, role="admin"), now_ns=now_ns)
    service = PrincipalRequest(name=NODE, kind="service", role="agent")
    node_token = _held(database, directory / "node.token", service, now_ns=now_ns)
    owner = database.read(lambda connection: identity.token(connection, identity.token_id(token))).principal
    return FirstTokens(principal=owner, token=token, node_token=node_token)


def join_token(database: Transactions, directory: Path, *, now_ns: int) -> str:
    """Return the token with which other machines join; makes it when it is missing, as `first_tokens`."""
    service = PrincipalRequest(name=NODE, kind="service", role="agent")
    return _held(database, directory / "join.token", service, now_ns=now_ns, scopes=(Resource.JOINING,))


def principal_name(login: str) -> str:
    """Return the name of a principal that comes nearest to a login name."""
    name = re.sub(r"[^a-z0-9._@-]", "-", login.lower()).lstrip("._@-")[:64]
    return name if name and name not in (*identity.RESERVED, NODE) else _ADMIN


def _held(
    database: Transactions, path: Path, wanted: PrincipalRequest, *, now_ns: int, scopes: tuple[str, ...] = ()
) -> str:
    with contextlib.suppress(FileNotFoundError):
        secret = path.read_text(encoding="ascii", errors="replace").strip()
        if database.read(lambda connection: identity.is_known(connection, secret)):
            return secret
    secret = identity.new_secret()
    write_private(path, f"{secret}\n".encode())
    faults.reach("after_token_file_before_row")
    new = NewToken(principal=wanted.name, label=_label(path), scopes=scopes)
    database.write(lambda connection: _grant(connection, wanted, new, secret=secret, now_ns=now_ns))
    return secret


def _grant(connection: sa.Connection, wanted: PrincipalRequest, new: NewToken, *, secret: str, now_ns: int) -> None:
    there = {one.name: one for one in identity.all_principals(connection)}
    if wanted.name not in there:
        identity.create_principal(connection, wanted, now_ns=now_ns)
        detail: dict[str, object] = {"kind": wanted.kind, "role": wanted.role}
        audit.record(
            connection, who=SERVER, action=Action.USER_CREATE, subject=wanted.name, now_ns=now_ns, detail=detail
        )
    for lost in identity.tokens_of(connection, wanted.name):
        if lost.label == new.label and lost.revoked_ns is None:
            identity.revoke_token(connection, lost.id, now_ns=now_ns)
            audit.record(connection, who=SERVER, action=Action.TOKEN_REVOKE, subject=lost.id, now_ns=now_ns)
    made = identity.create_token(connection, new, secret=secret, now_ns=now_ns)
    audit.record(connection, who=SERVER, action=Action.TOKEN_CREATE, subject=made.token.id, now_ns=now_ns)


def _label(path: Path) -> str:
    """Return what a file's token is called: another machine or home at the same database has tokens of its own."""
    place = sha256(f"{machine()}:{path.absolute()}")[:12]
    return f"made by the server: {path.name} ({place})"
