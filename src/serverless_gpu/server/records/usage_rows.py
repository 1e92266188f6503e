"""Rows of the ledger with who they are of: the query room of what billing tables are made of."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.billing.ledger import EntryKind
from serverless_gpu.model.billing.metering import SEGMENTS
from serverless_gpu.model.billing.usage_report import DayRange
from serverless_gpu.server.db.tables import accounts, charges, utilisations
from serverless_gpu.server.records.charges import Account, Posted, find_accounts, from_row
from serverless_gpu.wire.billing import DemandRow

_SEEN = ("observed_ms", "busy_ms", "peak_memory_bytes")
_OF_ACCOUNT = ("name", "owner", "team", "pool", "reserved", "gpu_type", "currency")
_OF_CHARGE = ("run_id", "fence", "day", "start_ns", "end_ns", "gpus", "queued_ms", "gpu_ms", "billed_ms", "micros")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the ledger, and who it is of."""

    posted: Posted
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
    connection: sa.Connection, window: DayRange, may_see: Sequence[sa.ColumnElement[bool]], *, after: int, limit: int
) -> list[Row]:
    """Return entries of some days in the order in which they were posted, from the one after `after` on."""
    query = (
        sa.select(charges)
        .join(accounts, accounts.c.id == charges.c.account_id)
        .where(charges.c.seq > after, charges.c.day >= window.from_day, charges.c.day < window.until_day, *may_see)
        .order_by(charges.c.seq)
        .limit(limit)
    )
    posted = [from_row(row) for row in connection.execute(query)]
    known = find_accounts(connection, {one.account_id for one in posted})
    return [Row(posted=one, account=known[one.account_id]) for one in posted]


def skus(connection: sa.Connection, *, limit: int) -> list[tuple[str, str]]:
    """Return GPU types and pools in which they were used."""
    query = sa.select(accounts.c.gpu_type, accounts.c.pool).distinct().order_by(accounts.c.gpu_type, accounts.c.pool)
    return [(gpu_type, pool) for gpu_type, pool in connection.execute(query.limit(limit))]


class DemandFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Whose use `demand` is to return, and of when.

    Attributes:
        from_ns: what ended before it is left out, nanoseconds since 1970; `to_ns` what began after it.
        team: only this team's; "" for any. Likewise the others.
    """

    from_ns: int
    to_ns: int
    team: str = ""
    pool: str = ""
    gpu_type: str = ""


def demand(
    connection: sa.Connection, asked: DemandFilter, may_see: Sequence[sa.ColumnElement[bool]], *, after: int, limit: int
) -> list[tuple[int, DemandRow]]:
    """Return what attempts used on each day, as it holds now, from the entry after `after` on, each with its number."""
    later = charges.alias("later")
    same_day = sa.and_(*(later.c[name] == charges.c[name] for name in ("run_id", "fence", "crew", "day")))
    same_crew = sa.and_(*(utilisations.c[name] == charges.c[name] for name in ("run_id", "fence", "crew")))
    is_last = ~sa.exists(sa.select(sa.literal(1)).where(same_day, later.c.number > charges.c.number))
    named = {name: getattr(asked, name) for name in ("team", "pool", "gpu_type") if getattr(asked, name)}
    query = (
        sa.select(charges, *(accounts.c[name] for name in _OF_ACCOUNT), *(utilisations.c[name] for name in _SEEN))
        .add_columns(utilisations.c.gpu_ms.label("used_ms"))
        .join(accounts, accounts.c.id == charges.c.account_id)
        .outerjoin(utilisations, same_crew)
        .where(charges.c.seq > after, charges.c.end_ns > asked.from_ns, charges.c.start_ns < asked.to_ns)
        .where(charges.c.kind != EntryKind.REVERSAL.value, is_last, *may_see)
        .where(*(accounts.c[name] == value for name, value in named.items()))
        .order_by(charges.c.seq)
        .limit(limit)
    )
    return [(row["seq"], _demand(row)) for row in connection.execute(query).mappings()]


def _demand(row: sa.RowMapping) -> DemandRow:
    same = {name: row[name] for name in (*_OF_ACCOUNT, *_OF_CHARGE)}
    return DemandRow(
        **same,
        lent_ms=sum(row[name] for name in SEGMENTS),
        used_ms=row["used_ms"] or 0,
        observed_ms=row["observed_ms"] or 0,
        busy_ms=row["busy_ms"] or 0,
        peak_memory_bytes=row["peak_memory_bytes"],
    )
