"""Tokens of attempts: how long one is good, and who gets the next one.

    order ─▶ token ─▶ report, report, report … ─▶ answered with the next one once a quarter of its time is over
                          └─ refused (cut off for longer, or a clock was set) ─▶ the node's heartbeat names the attempt
                                                                                 and brings the next one

It is good for as long as the lease it comes with, and for as long beyond that as the server waits before it believes
that an attempt is over. So a token that was copied out of a run's directory is worth little soon, and one that was used
a moment ago is never refused. Its end is judged by the server's wall clock alone; a clock that jumps costs a renewal,
never a run. Which attempts a node gets tokens for does not depend on whether they were given up: what it did and used
is still to be told (`reports.py` takes nothing else of those).
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
"""What a node says that it takes."""
RENEWED_MAX = 1_000
"""Attempts whose tokens one heartbeat may ask for; the others come with the next one."""
_RENEWED_AFTER = 0.25


class AttemptTokens:
    """Issues and renews the tokens of attempts."""

    def __init__(self, *, settings: Settings, clock: Clock, keys: Keys) -> None:
        self._settings = settings
        self._clock = clock
        self._keys = keys

    def good_s(self) -> float:
        """Return how long a token is good from now on, in seconds."""
        return self._settings.partition_grace_s + self._settings.partition_margin_s

    def token(self, crew: CrewId) -> str:
        """Return a token for a crew that is good from now on."""
        until_ns = self._clock.wall_ns() + round(self.good_s() * 1e9)
        return self._keys.attempt_token(*crew, until_s=-(-until_ns // 1_000_000_000))

    def first(self, crew: CrewId, *, takes: tuple[str, ...]) -> str:
        """Return the token that goes with an order."""
        return self.token(crew) if RENEWAL in takes else self._keys.attempt_token(*crew)

    def next(self, who: Caller) -> str:
        """Return the token that a report is answered with, or "" while the one it came with is good for long enough."""
        if who.attempt is None or who.until_ns is None:
            return ""
        left_s = (who.until_ns - self._clock.wall_ns()) / 1e9
        is_fresh = (1 - _RENEWED_AFTER) * self.good_s() < left_s <= self.good_s() + 1  # it ends at a whole second
        return "" if is_fresh else self.token(who.attempt)

    def wanted(self, connection: sa.Connection, node_id: str, gangs: tuple[str, ...]) -> dict[str, str]:
        """Return tokens for what a node has of some gangs."""
        if len(gangs) > RENEWED_MAX:
            raise InvalidValue(f"a heartbeat asks for {RENEWED_MAX} tokens at most, not {len(gangs)}")
        found: dict[str, str] = {}
        for gang in gangs:
            run_id, _, fence = gang.rpartition(":")
            if not (fence.isascii() and fence.isdigit() and len(fence) <= 9):
                continue
            crew = crews.on_node(connection, run_id, int(fence), node_id)
            if crew is not None:
                found[gang] = self.token(crew.id)
        return found
