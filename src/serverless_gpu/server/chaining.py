"""The loop that puts rows of the audit into their chain (`model/audit_chain.py`), a second after they were written.

    a request's transaction ── row of the audit ─▶ database ── each second ─▶ rows without a place ─▶ number, digest

Rows that become visible out of order (PostgreSQL gives a row its number before it is committed) find their place
later: the loop looks back by some thousand rows, and over everything when the server starts.

Failure cases: killed anywhere (the next server goes on where the chain ends); the database is away (tried again; the
audit itself is written in the transactions that it tells of, so nothing is missing).
"""

from __future__ import annotations

from serverless_gpu.server import audit
from serverless_gpu.server.services import Services

EVERY_S = 1.0
AT_ONCE = 500
"""Rows of one transaction; the next one follows at once."""


class Chainer:
    """Chains what was written down.

    Args:
        services: the server's.
    """

    def __init__(self, services: Services) -> None:
        self._database = services.database
        self._after_seq = 0

    def tick(self, now_ns: int) -> int | None:
        """Chain what is not chained yet; return when to look again.

        Args:
            now_ns: boottime, nanoseconds.
        """
        after_seq = self._after_seq
        if not self._database.read(lambda connection: audit.pending(connection, after_seq=after_seq))[0]:
            self._after_seq = self._database.read(audit.chained_seq)
            return now_ns + round(EVERY_S * 1e9)
        self._database.write(lambda connection: audit.chain(connection, after_seq=after_seq, limit=AT_ONCE))
        return now_ns
