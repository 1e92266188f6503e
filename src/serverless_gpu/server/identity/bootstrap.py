"""Creates the first administrator and the node service with their token files.

    server/token         the administrator's token, for the user who started the server
    server/node.token    a token of a service with the role `agent`, for this machine as a node; if the server has no
                         node of its own, for the first agent that registers with it
    server/join.token    a token of the same service, with which one machine may join within a day; a start replaces it
                         when it is used up or has expired

At each start, the server checks that the database contains the tokens of the token files. The server replaces a token
that the database does not contain, for example after the loss of a token file. The server first writes the token file,
then creates the database row and revokes the file's earlier token. To change a token, an operator can therefore delete
the token file and restart the server. The server never replaces a revoked token.

The administrator's token and the node's token expire after 90 days. Each use extends the validity of the node's token.
The server replaces the administrator's token in its last 30 days. Waiting clients can still use the old administrator
token, because it stays valid until its expiry.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import Clock, machine
from serverless_gpu.errors import NotFound
from serverless_gpu.model.access_control import NodeIdentity, Resource
from serverless_gpu.node.base.private_files import write_private
from serverless_gpu.server.core.server_key import sha256
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.records import audit, nodes, principals
from serverless_gpu.server.records.audit import SERVER, Action
from serverless_gpu.server.records.nodes import Invitation
from serverless_gpu.server.records.principals import NewToken
from serverless_gpu.wire.access import PrincipalRequest
from serverless_gpu.wire.nodes import INVITED_S

NODE = "node"
"""Name of the service that owns the token of this machine's agent."""
EVERY_S = 12 * 3600.0
_ADMIN = "admin"
_SERVICE = PrincipalRequest(name=NODE, kind="service", role="agent")
_ANY = NodeIdentity(name="", machine="")


class FirstTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the token files."""

    principal: str  # Name of the administrator.
    token: str  # Token of the administrator.
    node_token: str  # Token of this machine's agent.


def first_tokens(
    database: Transactions, directory: Path, *, login: str, now_ns: int, node: NodeIdentity | None = None
) -> FirstTokens:
    """Return the tokens in the server's token files, and create missing tokens."""
    database.write(lambda connection: principals.bound_lifetimes(connection, now_ns=now_ns))
    token = _admin_token(database, directory, login=login, now_ns=now_ns)
    node_token = _held(database, directory / "node.token", _SERVICE, now_ns=now_ns)
    token_id = principals.token_id(node_token)
    database.write(lambda connection: _bind(connection, token_id, node, now_ns=now_ns))
    owner = database.read(lambda connection: principals.token(connection, principals.token_id(token))).principal
    return FirstTokens(principal=owner, token=token, node_token=node_token)


class FileTokens:
    """Replaces the administrator's token before its expiry. `FileTokens` is not thread-safe."""

    def __init__(
        self, *, settings: Settings, clock: Clock, database: Transactions, login: str, renewed: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._login, self._renewed = login, renewed
        self._known = self._look()

    def tick(self, now_ns: int) -> int:
        """Replace an expiring administrator's token, and return the next check's due time."""
        found = self._look()
        if found != self._known:
            self._known = found
            self._renewed()
        return now_ns + round(EVERY_S * 1e9)

    def _look(self) -> str:
        now_ns = self._clock.wall_ns()
        return _admin_token(self._database, self._settings.directory, login=self._login, now_ns=now_ns)


def _admin_token(database: Transactions, directory: Path, *, login: str, now_ns: int) -> str:
    wanted = PrincipalRequest(name=principal_name(login), role="admin")
    return _held(database, directory / "token", wanted, now_ns=now_ns)


def join_token(database: Transactions, directory: Path, *, now_ns: int) -> str:
    """Return the join token, and replace a missing, used or expired join token."""
    path = directory / "join.token"
    with contextlib.suppress(FileNotFoundError):
        secret = path.read_text(encoding="ascii", errors="replace").strip()
        if database.read(lambda connection: _is_spent(connection, principals.token_id(secret), now_ns=now_ns)):
            path.unlink()
    expires_ns = now_ns + int(INVITED_S * 1e9)
    secret = _held(database, path, _SERVICE, now_ns=now_ns, scopes=(Resource.JOINING,), expires_ns=expires_ns)
    token_id = principals.token_id(secret)

    def work(connection: sa.Connection) -> None:
        if nodes.invitation(connection, token_id) is None:
            nodes.invite(connection, Invitation(token=token_id, node="", uses_left=1))

    database.write(work)
    return secret


def ensure_node_service(connection: sa.Connection, *, now_ns: int) -> None:
    """Create the service that owns the nodes' tokens if the service is missing."""
    if all(one.name != NODE for one in principals.all_principals(connection)):
        _make_principal(connection, _SERVICE, now_ns=now_ns)


def principal_name(login: str) -> str:
    """Return the valid principal name closest to a login name."""
    name = re.sub(r"[^a-z0-9._@-]", "-", login.lower()).lstrip("._@-")[:64]
    return name if name and name not in (*principals.RESERVED, NODE) else _ADMIN


def _held(
    database: Transactions,
    path: Path,
    wanted: PrincipalRequest,
    *,
    now_ns: int,
    scopes: tuple[str, ...] = (),
    expires_ns: int | None = None,
) -> str:
    before = ""
    with contextlib.suppress(FileNotFoundError):
        secret = path.read_text(encoding="ascii", errors="replace").strip()
        if database.read(lambda connection: principals.is_known(connection, secret)):
            ends = functools.partial(principals.is_to_be_replaced, secret=secret, now_ns=now_ns)
            if expires_ns is not None or not database.read(ends):
                return secret
            before = principals.token_id(secret)
    secret = principals.new_secret()
    write_private(path, f"{secret}\n".encode())
    faults.reach("after_token_file_before_row")
    # Other machines with the same database have different tokens.
    label = f"made by the server: {path.name} ({sha256(f'{machine()}:{path.absolute()}')[:12]})"
    new = NewToken(principal=wanted.name, label=label, scopes=scopes, expires_ns=expires_ns, made_by=SERVER.name)
    database.write(lambda connection: _grant(connection, wanted, new, secret=secret, kept=before, now_ns=now_ns))
    return secret


def _grant(
    connection: sa.Connection, wanted: PrincipalRequest, new: NewToken, *, secret: str, kept: str, now_ns: int
) -> None:
    there = {one.name: one for one in principals.all_principals(connection)}
    if wanted.name not in there:
        _make_principal(connection, wanted, now_ns=now_ns)
    for lost in principals.tokens_of(connection, wanted.name):
        if lost.label == new.label and lost.revoked_ns is None and lost.id != kept:
            principals.revoke_token(connection, lost.id, now_ns=now_ns)
            audit.record(connection, who=SERVER, action=Action.TOKEN_REVOKE, subject=lost.id, now_ns=now_ns)
    made = principals.create_token(connection, new, secret=secret, now_ns=now_ns)
    audit.record(connection, who=SERVER, action=Action.TOKEN_CREATE, subject=made.token.id, now_ns=now_ns)


def _make_principal(connection: sa.Connection, wanted: PrincipalRequest, *, now_ns: int) -> None:
    principals.create_principal(connection, wanted, now_ns=now_ns)
    detail: dict[str, object] = {"kind": wanted.kind, "role": wanted.role}
    audit.record(connection, who=SERVER, action=Action.USER_CREATE, subject=wanted.name, now_ns=now_ns, detail=detail)


def _bind(connection: sa.Connection, token_id: str, node: NodeIdentity | None, *, now_ns: int) -> None:
    """Bind the node's token to the given node, or to the first node that registers.

    The home keeps its key. Another home, for example of a restored server, binds its own key.
    """
    found = nodes.find(connection, token_id)
    if node is not None and found is not None and found.node.instance == node.instance:
        node = msgspec.structs.replace(node, key=found.node.key)
    if node is None and found is None:
        nodes.bind(connection, token_id, _ANY, by=SERVER.name, at_ns=now_ns)
    elif node is not None and (found is None or found.node != node):
        nodes.bind(connection, token_id, node, by=SERVER.name, at_ns=now_ns)
        detail: dict[str, object] = {"name": node.name, "machine": node.machine[:16], "token": token_id}
        audit.record(
            connection, who=SERVER, action=Action.NODE_BIND, subject=node.name[:64], now_ns=now_ns, detail=detail
        )


def _is_spent(connection: sa.Connection, token_id: str, *, now_ns: int) -> bool:
    """Return True if a join token is used up or expired."""
    with contextlib.suppress(NotFound):
        token = principals.token(connection, token_id)
        invitation = nodes.invitation(connection, token_id)
        expired = token.expires_ns is not None and token.expires_ns <= now_ns
        return token.revoked_ns is None and (invitation is None or not invitation.uses_left or expired)
    return False
