"""Routes of `wire/access.py`: who did what."""

from __future__ import annotations

from typing import Annotated

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Query, Routes, reading
from serverless_gpu.server.records import audit
from serverless_gpu.wire.access import AuditPage

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
