"""Opens and renews this node's session with its server.

    renew ─▶ challenge ─▶ signature ─▶ session token ─▶ every request of the node, except this exchange
      └─ refused: the keys of an unfinished rotation, if any
    rotate ─▶ new keys on disk ─▶ signed by both keys ─▶ session token of the new keys

The node renews its session after a quarter of its lifetime. A process that has just received the session's token can
therefore use the token for most of its lifetime. The token of the session is never on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import NotAllowed
from serverless_gpu.model.node_keys import NodeKeys, rotation_text, session_text
from serverless_gpu.node.uplink.node_key_file import NodeKeyFile, PrivateKeys
from serverless_gpu.wire.agents import KeyRequest, SessionAnswer, SessionChallenge, SessionRequest
from serverless_gpu.wire.connection import Connection

_RENEWED_AFTER = 0.25


def open_session(connection: Connection, token: str, keys: NodeKeyFile) -> SessionAnswer:
    """Open a session with the node's own token. Raise NotAllowed if the server knows other keys.

    `connection` uses the node's own token.
    """
    try:
        return _opened(connection, token, keys.current)
    except NotAllowed:
        again = keys.next()
        if again is None:
            raise
        answer = _opened(connection, token, again)
        keys.promote(again)
        return answer


def _opened(connection: Connection, token: str, keys: PrivateKeys) -> SessionAnswer:
    challenge = connection.ask("POST", "/agents/challenge", answer=SessionChallenge).challenge
    signature = keys.sign(session_text(challenge, _digest(token), keys.public))
    request = SessionRequest(challenge=challenge, keys=keys.public, signature=signature)
    return connection.ask("POST", "/agents/session", request, answer=SessionAnswer)


class NodeSession:
    """The node's session. One thread renews the session, and any thread may read its token.

    `connect` returns a connection with the node's own token. `own_token` returns this token.
    """

    def __init__(
        self, keys: NodeKeyFile, clock: Clock, *, connect: Callable[[], Connection], own_token: Callable[[], str]
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._connect = connect
        self._own_token = own_token
        self._token = self._of = ""
        self._due_ns = 0

    def token(self) -> str:
        """Return the token of the session, or "" before the first session."""
        return self._token

    @property
    def keys(self) -> NodeKeys:
        """Return the public keys of the session."""
        return self._keys.current.public

    def renew(self) -> None:
        """Open a session if the node has none, or if a renewal is due. Raise the errors of a request."""
        own = self._own_token()
        if self._token and self._of == own and self._clock.boottime_ns() < self._due_ns:
            return
        with contextlib.closing(self._connect()) as connection:
            self._take(open_session(connection, own, self._keys), own)

    def drop(self) -> None:
        """Forget a session that the server has refused."""
        self._token = ""

    def rotate(self, connection: Connection) -> None:
        """Replace the node's keys. `connection` uses the session's token."""
        own, old, new = self._own_token(), self._keys.current, self._keys.make_next()
        text = rotation_text(old.public.fingerprint, _digest(own), new.public)
        request = KeyRequest(keys=new.public, old=old.sign(text), new=new.sign(text))
        answer = connection.ask("POST", "/agents/key", request, answer=SessionAnswer)
        self._keys.promote(new)
        self._take(answer, own)

    def open(self, sealed: bytes, *, about: bytes) -> bytes | None:
        """Return the content of data that the server sealed to this node, or None."""
        return self._keys.open(sealed, about=about)

    def _take(self, answer: SessionAnswer, own: str) -> None:
        self._token, self._of = answer.token, own
        self._due_ns = self._clock.boottime_ns() + round(_RENEWED_AFTER * answer.lifetime_s * 1e9)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
