"""Opens the sessions of nodes that prove their keys, and replaces the keys of nodes.

    node's own token ─▶ challenge ─▶ signed by the node's key ─▶ token of a session       (`Challenges`)
                                        ├─ key not bound yet: the hello message of the session binds it
                                        ├─ key bound to the token: as before
                                        └─ another key: refused, and in the audit
    heartbeat's answer `rotate` ─▶ new keys, signed by the old and the new key ─▶ token of a session

Failure cases:

- A stolen token without the key opens no session. The auth middleware refuses each other request with the token alone.

- A recorded request for a session is refused, because each challenge is valid once.

- The server restarts between challenge and request. The next server process refuses the challenge, and the node asks
  again.

- The answer to a rotation is lost. The old key opens no further session, and the node continues with the new key.

- A stolen session token is valid for at most `LIFETIME_S`. A rotation or a revocation ends the session at once. The
  token of a session cannot replace the key.
"""

from __future__ import annotations

import hmac
import os
import threading
from collections import deque

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, NotAllowed, NotAuthenticated
from serverless_gpu.model.access_control import OWN_KEY
from serverless_gpu.model.node_keys import NodeKeys, rotation_text, session_text
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.server_key import Keys, NodeSession, encode
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle.liveness import Presence
from serverless_gpu.server.records import audit, nodes, principals
from serverless_gpu.server.records.audit import Action
from serverless_gpu.wire import node_crypto
from serverless_gpu.wire.agents import KeyRequest, SessionAnswer, SessionChallenge, SessionRequest

CHALLENGE_S = 60
LIFETIME_S = 7_200.0
"""Lifetime of a session. The node passes the session's token to the restore of environments, which takes minutes."""
_USED_MAX = 100_000
_NONCE_BYTES = 12
_MAC_BYTES = 16


class Challenges:
    """Issues challenges, each valid once for one token in this server process.

    A challenge contains its expiry and a keyed hash. The server stores only used challenges, so that a caller cannot
    displace the challenges of other callers.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._key = os.urandom(32)
        self._lock = threading.Lock()
        self._used: set[str] = set()
        self._order: deque[tuple[int, str]] = deque()

    def issue(self, token_id: str) -> str:
        """Return a new challenge for the owner of a token."""
        text = f"{self._now_s() + CHALLENGE_S}.{encode(os.urandom(_NONCE_BYTES))}"
        return f"{text}.{self._mac(token_id, text)}"

    def use(self, token_id: str, challenge: str) -> bool:
        """Return True for the first use of a valid challenge of a token."""
        text, _, mac = challenge.rpartition(".")
        if not challenge.isascii() or not hmac.compare_digest(mac, self._mac(token_id, text)):
            return False
        now_s, until_s = self._now_s(), int(text.partition(".")[0])
        with self._lock:
            while self._order and (self._order[0][0] < now_s or len(self._order) >= _USED_MAX):
                self._used.discard(self._order.popleft()[1])
            if until_s < now_s or challenge in self._used:
                return False
            self._used.add(challenge)
            self._order.append((until_s, challenge))
            return True

    def _now_s(self) -> int:
        return self._clock.boottime_ns() // 1_000_000_000

    def _mac(self, token_id: str, text: str) -> str:
        return encode(hmac.digest(self._key, f"{token_id}:{text}".encode(), "sha256")[:_MAC_BYTES])


class NodeSessions:
    """Opens sessions, and replaces keys."""

    def __init__(self, *, clock: Clock, database: Transactions, keys: Keys, presence: Presence) -> None:
        self._clock = clock
        self._database = database
        self._keys = keys
        self._presence = presence
        self._challenges = Challenges(clock)

    def challenge(self, who: Caller) -> SessionChallenge:
        """Return a text that the node must sign."""
        return SessionChallenge(challenge=self._challenges.issue(who.token_id))

    def open(self, who: Caller, said: SessionRequest) -> SessionAnswer:
        """Return the token of a session for a node that proves its key."""
        token_sha256, bound = self._database.read(
            lambda connection: (principals.token_sha256(connection, who.token_id), nodes.find(connection, who.token_id))
        )
        key = said.keys.fingerprint
        if not node_crypto.verifies(said.keys, session_text(said.challenge, token_sha256, said.keys), said.signature):
            raise NotAllowed("the signature of the node is not valid")
        if bound is not None and bound.node.key not in ("", key):
            error = NotAllowed(
                f"the token of {bound.node.name!r} belongs to a node with another key, not {key}", hint=OWN_KEY
            )
            self._note_refusal(who, bound.node.name, key, error)
            raise error
        if not self._challenges.use(who.token_id, said.challenge):
            raise NotAllowed("the server's challenge has expired, or was used before", hint="request another challenge")
        node_crypto.check_sealing(said.keys)
        return self._answer(who, key)

    def replace_key(self, who: Caller, said: KeyRequest) -> SessionAnswer:
        """Bind new keys to a node, if an administrator has requested this."""
        at_ns, key = self._clock.wall_ns(), said.keys.fingerprint
        node_crypto.check_sealing(said.keys)

        def work(connection: sa.Connection) -> None:
            bound, old = _bound_keys(connection, who)
            if bound.rotate_ns is None:
                raise NotAllowed(
                    f"no administrator has requested another key of {bound.node.name!r}",
                    hint=f"sgpu node rotate {bound.node.name}",
                )
            text = rotation_text(who.key, principals.token_sha256(connection, who.token_id), said.keys)
            if not node_crypto.verifies(old, text, said.old) or not node_crypto.verifies(said.keys, text, said.new):
                raise NotAllowed("the signatures of the node are not valid")
            node = nodes.named(connection, bound.node.name)
            if node is not None and node.token_id == who.token_id:
                nodes.replace_keys(connection, node, said.keys)
            nodes.rebind(connection, bound, msgspec.structs.replace(bound.node, key=key), at_ns=at_ns)
            detail: dict[str, object] = {"old": who.key, "key": key, "token": who.token_id}
            name = bound.node.name[:64]
            audit.record(connection, who=who, action=Action.NODE_KEY, subject=name, now_ns=at_ns, detail=detail)

        self._database.write(work)
        return self._answer(who, key)

    def _answer(self, who: Caller, key: str) -> SessionAnswer:
        until_s = round(self._clock.wall_ns() / 1e9 + LIFETIME_S)
        return SessionAnswer(
            token=self._keys.session_token(NodeSession(who.token_id, key, until_s)), lifetime_s=LIFETIME_S
        )

    def _note_refusal(self, who: Caller, name: str, key: str, error: NotAllowed) -> None:
        if not self._presence.is_new_refusal((who.token_id, name, key)):
            return
        at_ns = self._clock.wall_ns()
        detail: dict[str, object] = {"name": name[:64], "key": key, "why": error.message[:200]}
        self._database.write(
            lambda connection: audit.record(
                connection, who=who, action=Action.NODE_REFUSE, subject=who.token_id, now_ns=at_ns, detail=detail
            )
        )


def _bound_keys(connection: sa.Connection, who: Caller) -> tuple[nodes.StoredBinding, NodeKeys]:
    """Return the binding and public keys of a session's node."""
    bound = nodes.find(connection, who.token_id)
    if not who.key:
        raise InvalidValue("only a node in a session can replace its key", hint="open a session: POST /agents/session")
    node = None if bound is None else nodes.named(connection, bound.node.name)
    keys = None if node is None else node.hello.keys
    if bound is None or keys is None or not bound.node.key == keys.fingerprint == who.key:
        raise NotAuthenticated("the node has another key since this session began, or has sent no hello")
    return bound, keys
