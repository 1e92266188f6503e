"""Issues and renews attempt tokens.

    order ─▶ token ─▶ report, report, report … ─▶ after a quarter of its lifetime, the answer contains the next token
                          └─ refused (long partition, or clock change) ─▶ the node's heartbeat names the attempt, and
                                                                       its answer contains the next token

An attempt token is valid for the partition grace plus a margin. A stolen attempt token therefore expires soon. The
server never revokes an attempt token before its expiry. Only the server's wall clock decides when an attempt token
expires. A clock jump causes a token renewal but never ends a run. The server also issues tokens for abandoned attempts,
whose nodes can still report output and facts.
"""

from __future__ import annotations

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.server_key import Keys
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.records import crews
from serverless_gpu.server.records.crews import CrewId

RENEWAL = "renewal"
"""Capability of nodes that can renew attempt tokens."""
RENEWED_MAX = 1_000
"""Maximum number of attempt tokens that one heartbeat may request."""
_RENEWED_AFTER = 0.25


class AttemptTokens:
    """Issues and renews attempt tokens."""

    def __init__(self, *, settings: Settings, clock: Clock, keys: Keys) -> None:
        self._settings = settings
        self._clock = clock
        self._keys = keys

    def good_s(self) -> float:
        """Return a new attempt token's lifetime in seconds."""
        return self._settings.partition_grace_s + self._settings.partition_margin_s

    def token(self, crew: CrewId) -> str:
        """Return a new attempt token for one node of an attempt."""
        until_ns = self._clock.wall_ns() + round(self.good_s() * 1e9)
        return self._keys.attempt_token(*crew, until_s=-(-until_ns // 1_000_000_000))

    def first(self, crew: CrewId, *, takes: tuple[str, ...]) -> str:
        """Return the attempt token for a start order."""
        return self.token(crew) if RENEWAL in takes else self._keys.attempt_token(*crew)

    def next(self, who: Caller) -> str:
        """Return the next attempt token for a report's answer, or "" if the current token is still fresh."""
        if who.attempt is None or who.until_ns is None:
            return ""
        left_s = (who.until_ns - self._clock.wall_ns()) / 1e9
        # Attempt tokens expire at whole seconds of the wall clock.
        is_fresh = (1 - _RENEWED_AFTER) * self.good_s() < left_s <= self.good_s() + 1
        return "" if is_fresh else self.token(who.attempt)

    def wanted(self, connection: sa.Connection, node_id: str, gangs: tuple[str, ...]) -> dict[str, str]:
        """Return new attempt tokens for the given gangs on one node."""
        if len(gangs) > RENEWED_MAX:
            raise InvalidValue(f"a heartbeat may request at most {RENEWED_MAX} attempt tokens, not {len(gangs)}")
        found: dict[str, str] = {}
        for gang in gangs:
            run_id, _, fence = gang.rpartition(":")
            if not (fence.isascii() and fence.isdigit() and len(fence) <= 9):
                continue
            crew = crews.on_node(connection, run_id, int(fence), node_id)
            if crew is not None:
                found[gang] = self.token(crew.id)
        return found
