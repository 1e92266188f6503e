"""Issues and checks tokens of the index proxy.

    build on a node   ─▶ POST /agents/{node}/index-token ─▶ build:<node>:<label>        valid for an hour
    attempt of a run  ─▶ POST /agents/{node}/index-token ─▶ attempt:<run>:<fence>       and while the attempt runs
    user              ─▶ POST /index-token               ─▶ user:<name>                 for at most a day

The server computes tokens with its key and stores none of them. A token gives access to the index proxy only. It stops
to be valid when its holder ends: the attempt has ended, the node was revoked or forgotten, or the user was disabled.
"""

from __future__ import annotations

import re

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import NotAuthenticated, NotFound
from serverless_gpu.server.core.server_key import Keys
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.records import attempts, nodes, principals

BUILD, ATTEMPT, USER = "build", "attempt", "user"
LIFETIME_S = 3_600
LIFETIME_MAX_S = 86_400
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HINT = "ask for a new token: sgpu index token"


class IndexTokens:
    """Issues and checks tokens of the index proxy."""

    def __init__(self, *, clock: Clock, keys: Keys, database: Transactions) -> None:
        self._clock = clock
        self._keys = keys
        self._database = database

    def issue(self, kind: str, name: str, *, lifetime_s: int = LIFETIME_S) -> tuple[str, int]:
        """Return a new token, and its end in nanoseconds since 1970."""
        until_s = self._clock.wall_ns() // 1_000_000_000 + lifetime_s
        return self._keys.index_token(f"{kind}:{name}", until_s=until_s), until_s * 1_000_000_000

    def check(self, token: str) -> str:
        """Return the holder of a token, such as "user:ada". Raises NotAuthenticated. Reads the database."""
        found = self._keys.index_holder(token)
        if found is None:
            raise NotAuthenticated("the server did not issue this token of the index proxy", hint=_HINT)
        holder, until_s = found
        left_s = until_s - self._clock.wall_ns() / 1e9
        if not 0 < left_s <= LIFETIME_MAX_S:
            raise NotAuthenticated(f"the token of {holder} for the index proxy has expired", hint=_HINT)
        problem = self._database.read(lambda connection: _ended(connection, holder))
        if problem:
            raise NotAuthenticated(f"the token of {holder} for the index proxy is no longer valid: {problem}")
        return holder


def _ended(connection: sa.Connection, holder: str) -> str:
    """Return why a holder has ended, or ""."""
    kind, _, name = holder.partition(":")
    if kind == USER:
        try:
            return "the user is disabled" if principals.principal(connection, name).disabled else ""
        except NotFound:
            return "the user does not exist"
    first, _, second = name.partition(":")
    if kind == BUILD:
        node = nodes.get(connection, first)
        gone = node is None or node.forgotten_ns is not None or node.revoked_ns is not None
        return "the node does not belong to the server any more" if gone else ""
    attempt = attempts.find(connection, first, int(second)) if second.isdigit() else None
    return "the attempt has ended" if attempt is None or attempt.ended_ns is not None else ""
