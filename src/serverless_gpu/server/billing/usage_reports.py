"""What was used and what it cost, as whoever asks may see it: reports, and rows for billing tables.

Somebody who may not see everything gets sums of what they and their teams used, and nothing of others is in them: not
in the totals, not in anybody's part of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.access.roles import AccessReach, covers
from serverless_gpu.model.billing import billing_rows, usage_report
from serverless_gpu.model.billing.metering import SEGMENTS
from serverless_gpu.model.billing.usage_report import PERIODS, DayRange
from serverless_gpu.model.utc_days import DAY_NS
from serverless_gpu.server.billing import running_usage
from serverless_gpu.server.billing.running_usage import UnpostedDay, UnpostedDays
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle import metering
from serverless_gpu.server.lifecycle.liveness import Leases
from serverless_gpu.server.records import prices, usage_rows, usage_sums
from serverless_gpu.server.records.accounts import Account
from serverless_gpu.server.records.prices import StoredPrice
from serverless_gpu.server.records.usage_rows import DemandFilter
from serverless_gpu.server.records.usage_sums import Found, ReportRequest
from serverless_gpu.wire.billing import SKUS_MAX, DemandPage, DemandRow, ListPrices, RecordPage, UsageView

DAYS = 30
"""A report is over so many days, where nobody said otherwise."""
_decode = msgspec.json.Decoder(dict[str, str]).decode


class UsageReports:
    """Reports usage, ledger records, list prices and demand."""

    def __init__(self, *, settings: Settings, clock: Clock, database: Transactions, leases: Leases) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._leases = leases

    def view(self, who: Caller, reach: str, wanted: ReportRequest) -> UsageView:
        """Return a report.

        Args:
            who: asks.
            reach: how far they may see.
            wanted: what it is to be; whom it shows is said by `reach` alone.
        """
        seen_by, teams = _limits(who, reach)
        wanted = msgspec.structs.replace(wanted, seen_by=seen_by, teams=teams)
        at = metering.now(self._clock, self._leases)

        def work(connection: sa.Connection) -> tuple[Found, UnpostedDays]:
            return usage_sums.find(connection, wanted), running_usage.find(
                connection, at, currency=self._settings.currency
            )

        found, going = self._database.read(work)
        lines = [one for one in going.lines if _is_wanted(one, wanted, who, reach)]
        groups = running_usage.groups(lines, wanted.by)
        if found.is_cut:
            shown = {(group.key, group.currency) for group in found.groups}
            groups = [group for group in groups if (group.key, group.currency) in shown]
        return UsageView(
            by=wanted.by,
            from_day=wanted.window.from_day,
            until_day=wanted.window.until_day,
            groups=tuple(usage_report.in_order(usage_report.together([*found.groups, *groups]), wanted.by)),
            totals=tuple(usage_report.totals([*found.totals, *running_usage.groups(lines, ())])),
            is_cut=found.is_cut,
            going=len({(one.run_id, one.fence) for one in lines}),
            is_going_cut=going.is_cut,
        )

    def view_records(self, who: Caller, reach: str, window: DayRange, *, after: int, limit: int) -> RecordPage:
        """Return rows of the ledger as billing tables have them.

        Args:
            who: asks.
            reach: how far they may see.
            window: of which days.
            after: the last one that they have.
            limit: how many, at most; an entry has up to three rows.
        """
        may_see = usage_rows.visible(*_limits(who, reach))
        entries = max(1, limit // 3)
        rows = self._database.read(
            lambda connection: usage_rows.page(connection, window, may_see, after=after, limit=entries + 1)
        )
        shown = rows[:entries]
        found = [
            record
            for row in shown
            for record in billing_rows.records(
                row.posted.entry,
                row.account,
                run_id=row.posted.run_id,
                fence=row.posted.fence,
                posted_ns=row.posted.posted_ns,
            )
        ]
        return RecordPage(records=tuple(found), after=shown[-1].posted.seq if len(rows) > entries else None)

    def view_prices(self) -> ListPrices:
        """Return the price book as billing tables have it, for what was used and what has a price."""

        def work(connection: sa.Connection) -> tuple[list[StoredPrice], list[tuple[str, str]]]:
            return prices.every(connection), usage_rows.skus(connection, limit=SKUS_MAX + 1)

        book, used = self._database.read(work)
        rows = [stored.price for stored in book]
        found = billing_rows.list_prices(rows, used[:SKUS_MAX], currency=self._settings.currency)
        return ListPrices(prices=tuple(found), is_cut=len(used) > SKUS_MAX)

    def view_demand(self, who: Caller, reach: str, asked: DemandFilter, *, after: int, limit: int) -> DemandPage:
        """Return when devices were had, as far as somebody may see; what goes on now is on the last page.

        Args:
            who: asks.
            reach: how far they may see.
            asked: whose use, and of when.
            after: the last one that they have.
            limit: how many, at most.
        """
        may_see = usage_rows.visible(*_limits(who, reach))
        at = metering.now(self._clock, self._leases)

        def work(connection: sa.Connection) -> tuple[list[tuple[int, DemandRow]], UnpostedDays]:
            rows = usage_rows.demand(connection, asked, may_see, after=after, limit=limit + 1)
            is_last = len(rows) <= limit
            return rows, running_usage.find(
                connection, at, currency=self._settings.currency
            ) if is_last else UnpostedDays()

        rows, going = self._database.read(work)
        if len(rows) > limit:
            return DemandPage(rows=tuple(row for _, row in rows[:limit]), cursor=str(rows[limit - 1][0]))
        now = [_demand(one) for one in going.lines if not one.is_posted and _is_demanded(one, asked, who, reach)]
        return DemandPage(rows=(*(row for _, row in rows), *now))

    def window(self, from_day: int | None, until_day: int | None) -> DayRange:
        """Return the days that somebody asks about; the last 30 without saying.

        Raises:
            InvalidValue: they are none.
        """
        today = self._clock.wall_ns() // DAY_NS
        until = today + 1 if until_day is None else until_day
        return usage_report.checked(DayRange(max(0, until - DAYS) if from_day is None else from_day, until))


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
        usage_report.refuse_unknown(field)
        if "\0" in value:
            raise InvalidValue(f"where= asks for a {field} that nothing can have")
        if field in PERIODS:
            raise InvalidValue(f"where= cannot be about a {field}", hint="from_day and until_day say which days")
    if len(where) > usage_report.WHERE_MAX:
        raise InvalidValue(f"where= has {len(where)} fields, and may have {usage_report.WHERE_MAX}")
    return where


def _limits(who: Caller, reach: str) -> tuple[str | None, tuple[str, ...]]:
    """Return whose use somebody may see, and of which teams."""
    if reach == AccessReach.ALL:
        return None, ()
    return who.name, who.teams if reach == AccessReach.TEAM else ()


def _may_see(account: Account, who: Caller, reach: str) -> bool:
    return covers(reach, name=who.name, teams=who.teams, owner=account.owner, team=account.team)


def _is_wanted(one: UnpostedDay, wanted: ReportRequest, who: Caller, reach: str) -> bool:
    if not wanted.window.from_day <= one.line.day < wanted.window.until_day or not _may_see(one.account, who, reach):
        return False
    fields = tuple(wanted.where)
    return usage_report.key_of(fields, one.account, run_id=one.run_id, day=one.line.day) == tuple(wanted.where.values())


def _is_demanded(one: UnpostedDay, asked: DemandFilter, who: Caller, reach: str) -> bool:
    named = all(getattr(asked, name) in ("", getattr(one.account, name)) for name in ("team", "pool", "gpu_type"))
    is_then = one.line.end_ns > asked.from_ns and one.line.start_ns < asked.to_ns
    return named and is_then and _may_see(one.account, who, reach)


def _demand(one: UnpostedDay) -> DemandRow:
    line, account = one.line, one.account
    return DemandRow(
        run_id=one.run_id,
        fence=one.fence,
        day=line.day,
        name=account.name,
        owner=account.owner,
        team=account.team,
        pool=account.pool,
        reserved=account.reserved,
        gpu_type=account.gpu_type,
        start_ns=line.start_ns,
        end_ns=line.end_ns,
        gpus=line.gpus,
        queued_ms=0,
        gpu_ms=line.gpu_ms,
        billed_ms=line.billed_ms,
        lent_ms=sum(getattr(line, name) for name in SEGMENTS),
        currency=account.currency,
        micros=line.micros,
    )
