"""Append-only repository of the events of runs. Each run numbers its events from 1."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.lifecycle.attempt import TERMINAL, Reason, State
from serverless_gpu.server.db.tables import events


class StoredEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Stored event of a run, usually a change of the run's state.

    Attributes:
        fence: fence of the attempt to which the event belongs.
        reason: the reason for the end of the run, or of an attempt after which the run waits again.
        node: the node's name, or "".
    """

    run_id: str
    seq: int
    fence: int
    at_ns: int
    state: State
    reason: Reason | None = None
    sentence: str = ""
    node: str = ""


def is_remark(before: StoredEvent, event: StoredEvent) -> bool:
    """Return True if an event adds information about a running attempt without a state change."""
    is_same = (event.state, event.fence, event.reason) == (before.state, before.fence, None)
    return is_same and event.state is not State.QUEUED and event.state not in TERMINAL and bool(event.sentence)


_COLUMNS = [events.c[name] for name in StoredEvent.__struct_fields__]
_INSERT = events.insert()
_AFTER = (
    sa.select(*_COLUMNS)
    .where(events.c.run_id == sa.bindparam("run_id"), events.c.seq > sa.bindparam("seq"))
    .order_by(events.c.seq)
    .limit(sa.bindparam("most"))
)


def add(connection: sa.Connection, new: Sequence[StoredEvent]) -> None:
    """Insert events with the numbers that the caller assigned."""
    if new:
        connection.execute(_INSERT, [msgspec.structs.asdict(event) for event in new])


def after(connection: sa.Connection, run_id: str, seq: int, *, limit: int = 1_000) -> list[StoredEvent]:
    """Return the events of a run after number `seq`, in order."""
    rows = connection.execute(_AFTER, {"run_id": run_id, "seq": seq, "most": limit})
    return [_from_row(row._mapping) for row in rows]


def remove(connection: sa.Connection, run_id: str) -> None:
    """Remove the events of a run."""
    connection.execute(events.delete().where(events.c.run_id == run_id))


def _from_row(fields: sa.RowMapping) -> StoredEvent:
    reason = fields["reason"]
    return StoredEvent(
        run_id=fields["run_id"],
        seq=fields["seq"],
        fence=fields["fence"],
        at_ns=fields["at_ns"],
        state=State(fields["state"]),
        reason=Reason(reason) if reason else None,
        sentence=fields["sentence"],
        node=fields["node"],
    )
