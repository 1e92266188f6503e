"""Remembers the longest that earlier runs of an owner and a name took: budgets hold that for the next one.

A value is read again after `KEPT_S`, and all are forgotten when there are too many. May be called from any thread that
holds the lock of `Spending`.
"""

from __future__ import annotations

import sqlalchemy as sa

from serverless_gpu.server.records import duration_history

KEPT_S = 60.0
KEPT_MAX = 10_000


class LearnedDurations:
    """Remembers the longest durations by owner and name."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[float | None, int]] = {}

    def longest_s(self, connection: sa.Connection, owner: str, name: str, now_ns: int) -> float | None:
        """Return the longest that the last runs had their devices; None where that is not known.

        Args:
            connection: reading is enough.
            owner: of the runs.
            name: of the runs.
            now_ns: nanoseconds since 1970.
        """
        found = self._known.get((owner, name))
        if found is None or abs(now_ns - found[1]) > KEPT_S * 1e9:
            if len(self._known) >= KEPT_MAX:
                self._known.clear()
            found = self._known[owner, name] = duration_history.longest_s(connection, owner, name), now_ns
        return found[0]
