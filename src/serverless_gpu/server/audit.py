"""Chains and verifies the entries of the audit, and serves the route that lists entries.

`records/audit.py` writes an entry in the transaction of the change that the entry describes. About a second after the
insertion, `AuditChainWriter` assigns a number and a digest to the entry (`model/audit_chain.py`). `ChainCheck` verifies
the chain page by page.

    a request's transaction ── audit row ─▶ database ── each second ─▶ rows without a number ─▶ number, digest
    from entry 1 ─▶ page ─▶ page ─▶ … ─▶ last entry, then new entries ─▶ `begin_again` ─▶ from entry 1
                                          └ remembered: the last entry and its digest

Rows become visible out of order, because PostgreSQL assigns a row's number before the commit. Every ten seconds the
chain writer searches a few thousand earlier rows for entries without a number. A newly started writer searches all
rows. Between two searches, the chain writer reads only the newest row number by its key.

In each round, `ChainCheck` compares the chain with the previous round. If a valid chain has a different digest, a
process has rewritten the chain. If the chain is shorter than in the previous round, a process has removed its last
entries. A server that has just started remembers no previous round. Operators therefore keep copies of the audit
(`sgpu audit export`).

Failure cases:
* If the writer is killed, the next server continues at the end of the chain. Entries are durable before the writer adds
  them to the chain.
* If an entry is wrong or missing, the check reports the entry and continues with the next entry.
* If the database does not answer, the writer tries again. `ChainCheck` raises an exception and keeps its position.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.audit_chain import ChainedEntry, ChainHead, follow
from serverless_gpu.server.db import leader_lock
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Query, Routes, reading
from serverless_gpu.server.records import audit
from serverless_gpu.server.records.audit import AuditFilter
from serverless_gpu.wire.access import AuditPage, AuditVerification

EVERY_S = 1.0
BACK_S = 10.0
AT_ONCE = 500
"""Maximum number of rows in one transaction. The next transaction follows immediately."""
PAGE_LINKS = 1_000
VERIFY_S = 2.0
"""Maximum duration of a verification that a client requests. The client continues after the last verified entry."""
Broken = tuple[int, str]
"""Number of an audit entry, and a description of its problem."""
Read = Callable[[Callable[[sa.Connection], Any]], Any]
"""The signature of `Database.read`."""


class AuditChainWriter:
    """Adds audit entries to the hash chain within about a second after their insertion."""

    def __init__(self, *, database: Transactions) -> None:
        self._database = database
        self._after_seq = 0
        self._newest = -1
        self._back_ns = 0

    def tick(self, now_ns: int) -> int | None:
        """Add pending entries to the chain, and return the time of the next tick."""
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
    """Verifies the audit chain, page by page."""

    def __init__(self) -> None:
        self._at = self._last = ChainHead()
        self.done = False  # True once the check has reached the last entry

    def begin_again(self) -> None:
        """Restart the check at the first entry."""
        self._at, self.done = ChainHead(), False

    def look(self, read: Read, *, limit: int = PAGE_LINKS) -> list[Broken]:
        """Verify the next page of the chain, and return the problems found."""
        try:
            page: list[ChainedEntry] = read(
                partial(audit.links, wanted=AuditFilter(after=self._at.number, limit=limit))
            )
        except msgspec.MsgspecError as error:
            self.done = True
            return [(self._at.number + 1, f"this entry or one of the next {limit - 1} entries cannot be read: {error}")]
        wrong = self._followed(page)
        self.done = len(page) < limit
        if self.done and self._at.number < self._last.number:
            wrong.append(
                (self._last.number, f"the audit once reached this entry, but now ends with entry {self._at.number}")
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
                    wrong.append((link.number, "this entry or an earlier entry has changed since the last check"))
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
    """Filter and page of a request for audit entries. With `newest`, the page contains the last entries."""

    after: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = 500
    newest: bool = False
    principal: Name = ""
    action: Name = ""
    subject: Name = ""
    before: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] | None = None
    from_ns: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    to_ns: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None


class VerificationQuery(Query, frozen=True, kw_only=True):
    """Last entry that the caller has already verified, with its digest."""

    after: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0
    sha256: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")] = ""


@routes.get("/audit", needs=reading("audit"))
def page(call: Call, clock: Clock, database: Transactions, query: AuditQuery) -> AuditPage:
    """Return audit entries in the order of the chain."""
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


@routes.get("/audit/verification", needs=reading("audit"))
def verify(call: Call, clock: Clock, database: Transactions, query: VerificationQuery) -> AuditVerification:
    """Verify the audit chain from the beginning or after an entry, for at most two seconds."""
    if bool(query.after) != bool(query.sha256):
        raise InvalidValue("after= needs the entry's digest", hint="send both after= and sha256=, or neither")
    began_ns = clock.boottime_ns()
    head = ChainHead(query.after, query.sha256) if query.after else ChainHead()
    problem, entries, is_done = "", 0, False
    while not problem and not is_done and clock.boottime_ns() - began_ns < VERIFY_S * 1e9:
        wanted = AuditFilter(after=head.number, limit=PAGE_LINKS)
        links = database.read(partial(audit.links, wanted=wanted))
        before = head.number
        head, problem = follow(links, after=head)
        entries += head.number - before
        is_done = len(links) < PAGE_LINKS
    return AuditVerification(
        number=head.number,
        sha256=head.sha256,
        last=database.read(audit.head).number,
        problem=problem,
        entries=entries,
        took_ms=(clock.boottime_ns() - began_ns) // 1_000_000,
        at_ns=clock.wall_ns(),
    )
