"""Drains the server for maintenance, so that no new runs start.

    drain  ─▶ a row  ─▶ the scheduler places nothing; waiting runs show the operator, the time and the note
    resume ─▶ no row ─▶ the scheduler wakes at once

During a drain, running runs continue. A drain continues after a server restart, because the database stores the drain.
A drained server still accepts new runs but does not start them. `node_service.py` drains single nodes.
"""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock, format_clock
from serverless_gpu.errors import InvalidValue
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import SCHEDULER, Hub
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.db.tables import drains
from serverless_gpu.server.http.routing import Call, Routes, reading, writing
from serverless_gpu.server.records import audit, runs
from serverless_gpu.server.records.audit import Action
from serverless_gpu.wire.base import LABEL_CHARACTERS_MAX
from serverless_gpu.wire.server_status import DrainRequest, DrainView

_NAME = "server"


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """A drain of the server, with operator, start time (nanoseconds since 1970) and note."""

    principal: str
    since_ns: int
    note: str

    @property
    def sentence(self) -> str:
        """Return the message that the server shows for waiting runs during the drain."""
        why = f" ({self.note})" if self.note else ""
        return f"the server starts no new runs: {self.principal} drains it since {format_clock(self.since_ns)}{why}"


def find(connection: sa.Connection) -> Drain | None:
    """Return the server's drain, or None if no operator has drained the server."""
    row = connection.execute(sa.select(drains).where(drains.c.name == _NAME)).one_or_none()
    return None if row is None else Drain(principal=row.principal, since_ns=row.since_ns, note=row.note)


class DrainService:
    """Starts and ends the drain of the server."""

    def __init__(self, *, clock: Clock, database: Transactions, hub: Hub) -> None:
        self._clock = clock
        self._database = database
        self._hub = hub

    def view(self) -> DrainView:
        """Return the server's drain, with the numbers of active and waiting runs."""

        there, (going, waiting) = self._database.read(
            lambda connection: (find(connection), runs.count_unended(connection))
        )
        if there is None:
            return DrainView(on=False, going=going, waiting=waiting)
        return DrainView(
            on=True, by=there.principal, since_ns=there.since_ns, note=there.note, going=going, waiting=waiting
        )

    def put(self, who: Caller, asked: DrainRequest) -> DrainView:
        """Start or end the drain of the server. Repeated drain requests change nothing."""
        if len(asked.note) > LABEL_CHARACTERS_MAX or not (asked.note.isprintable() or not asked.note):
            raise InvalidValue(f"a note may have at most {LABEL_CHARACTERS_MAX} printable characters")
        at_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> None:
            if (find(connection) is not None) is asked.on:
                return
            if asked.on:
                connection.execute(
                    sa.insert(drains).values(name=_NAME, principal=who.name, since_ns=at_ns, note=asked.note)
                )
            else:
                connection.execute(sa.delete(drains).where(drains.c.name == _NAME))
            action = Action.SERVER_DRAIN if asked.on else Action.SERVER_RESUME
            audit.record(connection, who=who, action=action, subject=_NAME, now_ns=at_ns, detail={"note": asked.note})

        self._database.write(work)
        self._hub.touch(SCHEDULER)
        return self.view()


routes = Routes("drain")


@routes.get("/drain", needs=reading("nodes"))
def show_drain(call: Call, drain: DrainService) -> DrainView:
    """Return the server's drain, with the numbers of active and waiting runs."""
    return drain.view()


@routes.put("/drain", needs=writing("nodes"))
def put_drain(call: Call, drain: DrainService, body: DrainRequest) -> DrainView:
    """Start or end the drain of the server."""
    return drain.put(call.who, body)
