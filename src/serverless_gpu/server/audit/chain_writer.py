"""Chains rows of the audit (`model/access/audit_chain.py`) one second after they were written.

    a request's transaction ── row of the audit ─▶ database ── each second ─▶ rows without a place ─▶ number, digest

Rows that become visible out of order (PostgreSQL gives a row its number before it is committed) find their place
later: every ten seconds the loop looks back by some thousand rows, and over everything when the server starts. In
between it asks for the last row's number alone: of a server where nothing happens, that is one read by key a second.

Failure cases: killed anywhere (the next server goes on where the chain ends); the database is away (tried again; the
audit itself is written in the transactions that it tells of, so nothing is missing).
"""

from __future__ import annotations

import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.server.db import generations
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.records import audit

EVERY_S = 1.0
BACK_S = 10.0
AT_ONCE = 500
"""Rows of one transaction; the next one follows at once."""


class Chainer:
    """Chains what was written down."""

    def __init__(self, *, database: Transactions) -> None:
        self._database = database
        self._after_seq = 0
        self._newest = -1
        self._back_ns = 0

    def tick(self, now_ns: int) -> int | None:
        """Chain what is not chained yet; return when to look again.

        Args:
            now_ns: boottime, nanoseconds.
        """
        if not self._database.read(lambda connection: self._is_pending(connection, now_ns)):
            return now_ns + round(EVERY_S * 1e9)
        after_seq = self._after_seq
        self._database.write(lambda connection: _chain(connection, after_seq))
        return now_ns

    def _is_pending(self, connection: sa.Connection, now_ns: int) -> bool:
        newest = generations.newest_audit_seq(connection)
        if newest == self._newest and now_ns < self._back_ns:
            return False
        if audit.is_pending(connection, after_seq=self._after_seq):
            return True
        self._newest, self._back_ns = newest, now_ns + round(BACK_S * 1e9)
        self._after_seq = audit.chained_seq(connection)
        return False


def _chain(connection: sa.Connection, after_seq: int) -> None:
    audit.chain(connection, after_seq=after_seq, limit=AT_ONCE)
    faults.reach("in_audit_chain")
