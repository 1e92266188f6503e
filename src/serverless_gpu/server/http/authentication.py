"""Whose request it is, and how far it may reach: what the gate asks the rest of the server."""

from __future__ import annotations

import logging
import threading

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import ServerProblem
from serverless_gpu.model.access import roles
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.server_key import Keys
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Need
from serverless_gpu.server.records import principals

_log = logging.getLogger(__name__)
_NOTED_MAX = 10_000


class Admission:
    """Answers the gate's two questions.

    Args:
        database: has principals and tokens.
        clock: says what has expired.
        keys: of the server; without them, attempts' tokens that end are not known.
    """

    def __init__(self, database: Transactions, *, clock: Clock, keys: Keys | None = None) -> None:
        self._database = database
        self._keys = keys
        self._clock = clock
        self._lock = threading.Lock()
        self._noted: dict[str, int] = {}

    def authenticate(self, secret: str) -> Caller:
        """Return whose token it is; called in a thread.

        Raises:
            NotAuthenticated: nobody's, or not any more.
        """
        now_ns = self._clock.wall_ns()
        who = self._database.read(
            lambda connection: principals.authenticate(connection, secret, now_ns=now_ns, keys=self._keys)
        )
        if who.token_id and self._is_due(who.token_id):
            self._note(who.token_id, now_ns)
        return who

    def reach(self, who: Caller, need: Need) -> str:
        """Return how far a caller may reach: "none", "own", "team" or "all"."""
        return roles.reach(who.role, need.noun, write=need.write, scopes=who.scopes).value

    def _is_due(self, token_id: str) -> bool:
        now_ns = self._clock.boottime_ns()
        with self._lock:
            noted_ns = self._noted.get(token_id)
            if noted_ns is not None and now_ns - noted_ns < principals.USED_EVERY_NS:
                return False
            if len(self._noted) >= _NOTED_MAX:
                self._noted.clear()
            self._noted[token_id] = now_ns
            return True

    def _note(self, token_id: str, now_ns: int) -> None:
        try:
            self._database.write(lambda connection: principals.note_use(connection, [token_id], now_ns=now_ns))
        except ServerProblem as error:
            # Somebody who only looks must be able to also when the disk is full.
            _log.warning("the use of token %s was not written down: %s", token_id, error.message)
