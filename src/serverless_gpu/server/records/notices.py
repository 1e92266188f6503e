"""Notices: the query room of what is to be told to the webhook, and of alarms. An outbox: written with what they tell
of, sent until that was taken, or has become too old to matter."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec
import sqlalchemy as sa

from serverless_gpu.server.db.tables import notices

KEPT = 10_000
"""Notices beyond go, the oldest first, sent or not."""
_decode = msgspec.json.Decoder(dict[str, object]).decode


class Kind(StrEnum):
    """What is told."""

    WARNING = "budget.warning"
    REACHED = "budget.reached"
    CLOSED = "budget.closed"
    ALARM = "spend.alarm"


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One of them.

    Attributes:
        at_ns: nanoseconds since 1970.
        document: what is sent, beside kind and time.
    """

    seq: int
    at_ns: int
    kind: str
    document: dict[str, object]
    tries: int

    def text(self, name: str) -> str:
        """Return one text of the document, or ""."""
        return str(self.document.get(name, ""))


def add(connection: sa.Connection, kind: Kind, document: Mapping[str, object], *, at_ns: int) -> None:
    """Write a notice, in the transaction of what it tells of; the oldest go where there are too many, sent or not."""
    row = {"at_ns": at_ns, "kind": kind.value, "document_json": msgspec.json.encode(document).decode(), "tries": 0}
    seq = connection.execute(notices.insert().values(row)).inserted_primary_key
    assert seq is not None
    connection.execute(notices.delete().where(notices.c.seq <= seq[0] - KEPT))


def open_ones(connection: sa.Connection, *, limit: int) -> list[Notice]:
    """Return notices that were not sent: those that were tried least first, of them the oldest."""
    query = sa.select(notices).where(notices.c.sent_ns.is_(None)).order_by(notices.c.tries, notices.c.seq).limit(limit)
    return [_from_row(row._mapping) for row in connection.execute(query)]


def alarms(connection: sa.Connection, *, since_ns: int, limit: int = 1_000) -> list[Notice]:
    """Return alarms since a moment, latest first."""
    query = sa.select(notices).where(notices.c.kind == Kind.ALARM.value, notices.c.at_ns >= since_ns)
    return [_from_row(row._mapping) for row in connection.execute(query.order_by(notices.c.seq.desc()).limit(limit))]


def sent(connection: sa.Connection, seq: int, *, at_ns: int) -> None:
    """Note that a notice was taken, or is given up."""
    connection.execute(notices.update().where(notices.c.seq == seq).values(sent_ns=at_ns))


def tried(connection: sa.Connection, seq: int) -> None:
    """Note that a notice was sent in vain."""
    connection.execute(notices.update().where(notices.c.seq == seq).values(tries=notices.c.tries + 1))


def _from_row(fields: sa.RowMapping) -> Notice:
    return Notice(
        seq=fields["seq"],
        at_ns=fields["at_ns"],
        kind=fields["kind"],
        document=_decode(fields["document_json"]),
        tries=fields["tries"],
    )
