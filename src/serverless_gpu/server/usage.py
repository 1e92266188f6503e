"""What was used and what it cost, as whoever asks may see it: reports, and rows for billing tables.

Somebody who may not see everything gets sums of what they and their teams used, and nothing of others is in them: not
in the totals, not in anybody's part of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model import billing, usage
from serverless_gpu.model.access import Reach
from serverless_gpu.model.usage import PERIODS, Window
from serverless_gpu.server import usage_rows, usage_sums
from serverless_gpu.server.callers import Caller
from serverless_gpu.server.services import Services
from serverless_gpu.server.usage_sums import Found, Wanted
from serverless_gpu.wire.usage import RecordPage, UsageView

DAYS = 30
"""A report is over so many days, where nobody said otherwise."""
_decode = msgspec.json.Decoder(dict[str, str]).decode


def view_usage(services: Services, who: Caller, reach: str, wanted: Wanted) -> UsageView:
    """Return a report.

    Args:
        services: the server's.
        who: asks.
        reach: how far they may see.
        wanted: what it is to be; whom it shows is said by `reach` alone.
    """
    seen_by, teams = _limits(who, reach)
    wanted = msgspec.structs.replace(wanted, seen_by=seen_by, teams=teams)

    def work(connection: sa.Connection) -> Found:
        return usage_sums.find(connection, wanted)

    found = services.database.read(work)
    return UsageView(
        by=wanted.by,
        from_day=wanted.window.from_day,
        until_day=wanted.window.until_day,
        groups=tuple(usage.in_order(found.groups, wanted.by)),
        totals=tuple(found.totals),
        is_cut=found.is_cut,
    )


def view_records(services: Services, who: Caller, reach: str, window: Window, *, after: int, limit: int) -> RecordPage:
    """Return rows of the ledger as billing tables have them.

    Args:
        services: the server's.
        who: asks.
        reach: how far they may see.
        window: of which days.
        after: the last one that they have.
        limit: how many, at most; an entry has up to three rows.
    """
    may_see = usage_rows.visible(*_limits(who, reach))
    entries = max(1, limit // 3)
    rows = services.database.read(
        lambda connection: usage_rows.page(connection, window, may_see, after=after, limit=entries + 1)
    )
    shown = rows[:entries]
    found = [
        record
        for row in shown
        for record in billing.records(
            row.entry, row.account, run_id=row.run_id, fence=row.fence, posted_ns=row.posted_ns
        )
    ]
    return RecordPage(records=tuple(found), after=shown[-1].seq if len(rows) > entries else None)


def window_of(services: Services, from_day: int | None, until_day: int | None) -> Window:
    """Return the days that somebody asks about; the last 30 without saying.

    Raises:
        InvalidValue: they are none.
    """
    today = services.clock.wall_ns() // usage.DAY_NS
    until = today + 1 if until_day is None else until_day
    return usage.checked(Window(max(0, until - DAYS) if from_day is None else from_day, until))


def where_of(text: str) -> Mapping[str, str]:
    """Return which charges somebody asks about.

    Args:
        text: a JSON object of fields and the values that they have to have, or "".

    Raises:
        InvalidValue: it is none.
    """
    try:
        where = _decode(text) if text else {}
    except msgspec.DecodeError as error:
        raise InvalidValue(f"where= is not understood: {error}", hint='for example {"team":"search"}') from error
    for field, value in where.items():
        usage.refuse_unknown(field)
        if "\0" in value:
            raise InvalidValue(f"where= asks for a {field} that nothing can have")
        if field in PERIODS:
            raise InvalidValue(f"where= cannot be about a {field}", hint="from_day and until_day say which days")
    if len(where) > usage.WHERE_MAX:
        raise InvalidValue(f"where= has {len(where)} fields, and may have {usage.WHERE_MAX}")
    return where


def _limits(who: Caller, reach: str) -> tuple[str | None, tuple[str, ...]]:
    """Return whose use somebody may see, and of which teams."""
    if reach == Reach.ALL:
        return None, ()
    return who.name, who.teams if reach == Reach.TEAM else ()
