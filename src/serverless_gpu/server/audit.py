"""The audit: the loop that chains its entries, the check of the chain, and the route that lists entries.

`records/audit.py` writes an entry in the transaction of the change that it is about. `AuditChainWriter` gives it a
number and a digest (`model/audit_chain.py`) a second later; `ChainCheck` follows the chain page by page.

    a request's transaction ── row of the audit ─▶ database ── each second ─▶ rows without a place ─▶ number, digest
    from entry 1 ─▶ page ─▶ page ─▶ … ─▶ the end, and on with what is new ─▶ `begin_again` ─▶ from entry 1
                                          └ remembered: the last entry, and its digest

PostgreSQL gives a row its number before it commits, so rows become visible out of order. The writer looks back by some
thousand rows every ten seconds, and over all rows at its start. In between it reads the newest number by key.

The check compares its memory with the next round: a whole chain with another digest was rewritten, a shorter one was
cut off. A server that has just started remembers nothing, which is why operators keep copies (`sgpu audit export`).

Failure cases:
- The writer is killed: the next server goes on where the chain ends. Entries are durable before they are chained.
- An entry is wrong or missing: the check reports it and goes on behind it, so that it hides no other.
- The database is away: the writer tries again; the check raises and keeps its place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.model.audit_chain import ChainedEntry, ChainHead, follow
from serverless_gpu.server.db import leader_lock
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Query, Routes, reading
from serverless_gpu.server.records import audit
from serverless_gpu.server.records.audit import AuditFilter
from serverless_gpu.wire.access import AuditPage

EVERY_S = 1.0
BACK_S = 10.0
AT_ONCE = 500
"""Rows of one transaction; the next one follows at once."""
PAGE_LINKS = 1_000
Broken = tuple[int, str]
"""The number of an entry, and what is wrong there."""
Read = Callable[[Callable[[sa.Connection], Any]], Any]
"""`Database.read`."""


class AuditChainWriter:
    """Chains entries of the audit a second after they were written."""

    def __init__(self, *, database: Transactions) -> None:
        self._database = database
        self._after_seq = 0
        self._newest = -1
        self._back_ns = 0

    def tick(self, now_ns: int) -> int | None:
        """Chain pending entries; return when to look again."""
        if not self._database.read(lambda connection: self._is_pending(connection, now_ns)):
            return now_ns + round(EVERY_S * 1e9)

        def work(connection: sa.Connection) -> None:
            audit.chain(connection, after_seq=self._after_seq, limit=AT_ONCE)
            faults.reach("in_audit_chain")

        self._database.write(work)
        return now_ns

    def _is_pending(self, connection: sa.Connection, now_ns: int) -> bool:
        newest = leader_lock.newest_audit_seq(connection)
        if newest == self._newest and now_ns < self._back_ns:
            return False
        if audit.is_pending(connection, after_seq=self._after_seq):
            return True
        self._newest, self._back_ns = newest, now_ns + round(BACK_S * 1e9)
        self._after_seq = audit.chained_seq(connection)
        return False


class ChainCheck:
    """Verifies the chain of the audit, page by page."""

    def __init__(self) -> None:
        self._at = self._last = ChainHead()
        self.done = False  # whether the last entry was reached

    def begin_again(self) -> None:
        """Start again at the first entry."""
        self._at, self.done = ChainHead(), False

    def look(self, read: Read, *, limit: int = PAGE_LINKS) -> list[Broken]:
        """Verify the next page; return its breaks."""
        try:
            page: list[ChainedEntry] = read(
                partial(audit.links, wanted=AuditFilter(after=self._at.number, limit=limit))
            )
        except msgspec.MsgspecError as error:
            self.done = True
            return [(self._at.number + 1, f"it, or one of the {limit - 1} behind it, cannot be read: {error}")]
        wrong = self._followed(page)
        self.done = len(page) < limit
        if self.done and self._at.number < self._last.number:
            wrong.append(
                (self._last.number, f"the audit went as far as this, and now ends with entry {self._at.number}")
            )
            self._last = self._at
        return wrong

    def _followed(self, page: list[ChainedEntry]) -> list[Broken]:
        wrong: list[Broken] = []
        while page:
            head, problem = follow(page, after=self._at)
            whole = head.number - self._at.number
            for link in page[:whole]:
                if link.number == self._last.number and link.sha256 != self._last.sha256:
                    wrong.append((link.number, "it is another one than before, or one before it is"))
                if link.number >= self._last.number:
                    self._last = ChainHead(link.number, link.sha256)
            self._at, page = head, page[whole:]
            if problem:
                wrong.append((page[0].number, problem))
                self._at, page = ChainHead(page[0].number, page[0].sha256), page[1:]
        return wrong


routes = Routes("audit")
PAGE_MAX = 1000
Name = Annotated[str, msgspec.Meta(max_length=256)]


class AuditQuery(Query, frozen=True, kw_only=True):
    """From where on, how many, and which; `newest`: the last ones that there are."""

    after: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = 500
    newest: bool = False
    principal: Name = ""
    action: Name = ""
    subject: Name = ""


@routes.get("/audit", needs=reading("audit"))
def page(call: Call, clock: Clock, database: Transactions, query: AuditQuery) -> AuditPage:
    """Return entries of the audit in their order."""
    wanted = audit.AuditFilter(**msgspec.structs.asdict(query))
    now_ns = clock.wall_ns()

    def work(connection: sa.Connection) -> AuditPage:
        count, since_ns = audit.pending(connection, after_seq=audit.chained_seq(connection))
        return AuditPage(
            entries=tuple(audit.links(connection, wanted)),
            last=audit.head(connection).number,
            pending=count,
            pending_since_ns=since_ns,
            now_ns=now_ns,
        )

    return database.read(work)
