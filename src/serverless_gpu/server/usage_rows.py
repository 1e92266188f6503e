"""Rows of the ledger with who they are of: the query room of what billing tables are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.ledger import Entry, EntryKind, Line
from serverless_gpu.model.usage import Window
from serverless_gpu.server.tables import accounts, charges

_OF_LINE = Line.__struct_fields__
_decode_tags = msgspec.json.Decoder(dict[str, str]).decode


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Who used something, and as what."""

    owner: str
    team: str
    pool: str
    reserved: bool
    policy: str
    gpu_type: str
    name: str
    workload: str
    environment: str
    currency: str
    tags: dict[str, str]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the ledger.

    Attributes:
        seq: grows over all of them.
        posted_ns: when it was written, nanoseconds since 1970.
        account: who it is of.
    """

    seq: int
    run_id: str
    fence: int
    posted_ns: int
    entry: Entry
    account: Account


def visible(seen_by: str | None, teams: Sequence[str]) -> list[sa.ColumnElement[bool]]:
    """Return what makes an account one that somebody may see.

    Args:
        seen_by: who asks; None for somebody who may see everything.
        teams: they are in, as far as that lets them see more.
    """
    if seen_by is None:
        return []
    return [sa.or_(accounts.c.owner == seen_by, accounts.c.team.in_(teams))]


def page(
    connection: sa.Connection, window: Window, may_see: Sequence[sa.ColumnElement[bool]], *, after: int, limit: int
) -> list[Row]:
    """Return entries of some days in the order in which they were posted, from the one after `after` on."""
    named = [accounts.c[name].label(f"of_{name}") for name in (*Account.__struct_fields__[:-1], "tags_json")]
    query = (
        sa.select(charges, *named)
        .join(accounts, accounts.c.id == charges.c.account_id)
        .where(charges.c.seq > after, charges.c.day >= window.from_day, charges.c.day < window.until_day, *may_see)
        .order_by(charges.c.seq)
        .limit(limit)
    )
    return [_from_row(row._mapping) for row in connection.execute(query)]


def skus(connection: sa.Connection, may_see: Sequence[sa.ColumnElement[bool]], *, limit: int) -> list[tuple[str, str]]:
    """Return GPU types and pools in which they were used."""
    query = sa.select(accounts.c.gpu_type, accounts.c.pool).where(*may_see).distinct().order_by(sa.text("1, 2"))
    return [(gpu_type, pool) for gpu_type, pool in connection.execute(query.limit(limit))]


def _from_row(row: sa.RowMapping) -> Row:
    fields: dict[str, Any] = {name: row[f"of_{name}"] for name in Account.__struct_fields__[:-1]}
    return Row(
        seq=row["seq"],
        run_id=row["run_id"],
        fence=row["fence"],
        posted_ns=row["posted_ns"],
        entry=Entry(
            number=row["number"],
            kind=EntryKind(row["kind"]),
            provisional=row["provisional"],
            line=Line(**{name: row[name] for name in _OF_LINE}),
        ),
        account=Account(**fields, tags=_decode_tags(row["of_tags_json"])),
    )
