"""Reports usage and costs by group, billing table rows, list prices and device demand.

A report adds the posted usage in the ledger and the unposted usage. The unposted usage belongs to running attempts and
to attempts that have just ended.

    facts, up to the last report ─▶ `metering.so_far` ─▶ minus posted entries ─▶ `UnpostedDay` of each node

A report counts all usage exactly once, because one transaction reads posted and unposted usage. If an attempt's facts
contradict each other, its usage counts as zero, as in the ledger. A report reads at most `UNPOSTED_MAX` unposted rows
of `crews` and states if more exist. For a caller with limited access, all sums and totals contain only the usage of the
caller and of the caller's teams.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.access_control import AccessReach, covers
from serverless_gpu.model.billing import billing_rows, usage_report
from serverless_gpu.model.billing.ledger import LedgerLine
from serverless_gpu.model.billing.metering import SEGMENTS
from serverless_gpu.model.billing.usage_report import PERIODS, Amounts, DayRange, ReportRow, parse_by
from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.server.billing.run_costs import lines_so_far
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Query, Routes, reading
from serverless_gpu.server.lifecycle import metering
from serverless_gpu.server.lifecycle.liveness import Leases
from serverless_gpu.server.lifecycle.metering import Now
from serverless_gpu.server.records import attempts, charges, facts, nodes, prices, runs, usage
from serverless_gpu.server.records.charges import Account, PostedEntry
from serverless_gpu.server.records.crews import CrewId, StoredCrew
from serverless_gpu.server.records.prices import StoredPrice
from serverless_gpu.server.records.usage import DemandFilter, ReportRequest, ReportResult
from serverless_gpu.wire.billing import (
    GROUPS_DEFAULT,
    GROUPS_MAX,
    NAME_ENTRIES_MAX,
    NAMES_MAX,
    RECORDS_MAX,
    SKUS_MAX,
    TAG_KEYS_MAX,
    DemandPage,
    DemandRow,
    ListPrices,
    NameCosts,
    RecordPage,
    TagKeys,
    UsageView,
)

DAYS = 30
"""The default number of days in a report."""
_decode = msgspec.json.Decoder(dict[str, str]).decode
UNPOSTED_MAX = 1_000
_EVER_NS = 1 << 62
_NUMBERS = (*SEGMENTS, "gpu_ms", "billed_ms", "core_ms", "memory_mib_ms", "dbu_micros")


class UsageReports:
    """Returns usage reports, ledger rows, list prices and demand."""

    def __init__(self, *, settings: Settings, clock: Clock, database: Transactions, leases: Leases) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._leases = leases

    def view(self, who: Caller, reach: str, wanted: ReportRequest) -> UsageView:
        """Return a usage report, limited by `reach` to usage that the caller may see."""
        seen_by, teams = _limits(who, reach)
        wanted = msgspec.structs.replace(wanted, seen_by=seen_by, teams=teams)
        at = metering.now(self._clock, self._leases)

        def work(connection: sa.Connection) -> tuple[ReportResult, UnpostedDays]:
            return usage.find(connection, wanted), find_unposted(connection, at, currency=self._settings.currency)

        found, going = self._database.read(work)
        lines = [one for one in going.lines if _is_wanted(one, wanted, who, reach)]
        groups = group_unposted(lines, wanted.by)
        if found.is_cut:
            shown = {(group.key, group.currency) for group in found.groups}
            groups = [group for group in groups if (group.key, group.currency) in shown]
        return UsageView(
            by=wanted.by,
            from_day=wanted.window.from_day,
            until_day=wanted.window.until_day,
            groups=tuple(usage_report.in_order(usage_report.together([*found.groups, *groups]), wanted.by)),
            totals=tuple(usage_report.totals([*found.totals, *group_unposted(lines, ())])),
            is_cut=found.is_cut,
            going=len({(one.run_id, one.fence) for one in lines}),
            is_going_cut=going.is_cut,
        )

    def view_records(self, who: Caller, reach: str, window: DayRange, *, after: int, limit: int) -> RecordPage:
        """Return ledger entries in the format of billing tables.

        A ledger entry corresponds to up to three rows of a billing table. `after` is the number of the last entry that
        the caller has already read.
        """
        may_see = usage.visible(*_limits(who, reach))
        entries = max(1, limit // 3)
        rows = self._database.read(
            lambda connection: usage.page(connection, window, may_see, after=after, limit=entries + 1)
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
        """Return the prices of all devices with a price or in use, in the format of billing tables."""

        def work(connection: sa.Connection) -> tuple[list[StoredPrice], list[tuple[str, str]]]:
            return prices.every(connection), usage.skus(connection, limit=SKUS_MAX + 1)

        book, used = self._database.read(work)
        rows = [stored.price for stored in book]
        found = billing_rows.list_prices(rows, used[:SKUS_MAX], currency=self._settings.currency)
        return ListPrices(prices=tuple(found), is_cut=len(used) > SKUS_MAX)

    def view_tags(self, who: Caller, reach: str) -> TagKeys:
        """Return the keys of tags of the usage that the caller may see."""
        may_see = usage.visible(*_limits(who, reach))
        keys = self._database.read(lambda connection: usage.tag_keys(connection, may_see, limit=TAG_KEYS_MAX + 1))
        return TagKeys(keys=tuple(keys[:TAG_KEYS_MAX]), is_cut=len(keys) > TAG_KEYS_MAX)

    def view_names(self, who: Caller, reach: str, wanted: ReportRequest) -> NameCosts:
        """Return the mean and median cost of the caller's visible runs by name, without unposted usage."""
        seen_by, teams = _limits(who, reach)
        wanted = msgspec.structs.replace(wanted, seen_by=seen_by, teams=teams, limit=NAME_ENTRIES_MAX)
        costs, is_cut = self._database.read(lambda connection: usage.run_costs(connection, wanted))
        priced = [(one.name, one.currency, one.micros, one.gpu_ms) for one in costs if one.micros is not None]
        return NameCosts(
            from_day=wanted.window.from_day,
            until_day=wanted.window.until_day,
            names=tuple(usage_report.unit_economics(priced)[:NAMES_MAX]),
            is_cut=is_cut,
        )

    def view_demand(self, who: Caller, reach: str, asked: DemandFilter, *, after: int, limit: int) -> DemandPage:
        """Return the device usage over time that the caller may see. The last page contains running attempts."""
        may_see = usage.visible(*_limits(who, reach))
        at = metering.now(self._clock, self._leases)

        def work(connection: sa.Connection) -> tuple[list[tuple[int, DemandRow]], UnpostedDays]:
            rows = usage.demand(connection, asked, may_see, after=after, limit=limit + 1)
            is_last = len(rows) <= limit
            return rows, find_unposted(connection, at, currency=self._settings.currency) if is_last else UnpostedDays()

        rows, going = self._database.read(work)
        if len(rows) > limit:
            return DemandPage(rows=tuple(row for _, row in rows[:limit]), cursor=str(rows[limit - 1][0]))
        now = [_demand(one) for one in going.lines if not one.is_posted and _is_demanded(one, asked, who, reach)]
        return DemandPage(rows=(*(row for _, row in rows), *now))

    def window(self, from_day: int | None, until_day: int | None) -> DayRange:
        """Return the requested range of days. The default is the last 30 days."""
        today = self._clock.wall_ns() // DAY_NS
        until = today + 1 if until_day is None else until_day
        return usage_report.checked(DayRange(max(0, until - DAYS) if from_day is None else from_day, until))


def where_of(text: str) -> Mapping[str, str]:
    """Return the filter of charges that the caller requested.

    `text` is a JSON object of fields and their values, or "".
    """
    try:
        where = _decode(text) if text else {}
    except msgspec.DecodeError as error:
        raise InvalidValue(
            f"where= is not valid: {error}", hint='use a JSON object, for example {"team":"search"}'
        ) from error
    for field, value in where.items():
        usage_report.refuse_unknown(field)
        if "\0" in value:
            raise InvalidValue(f"where= contains an invalid value of {field}")
        if field in PERIODS:
            raise InvalidValue(f"where= cannot filter by {field}", hint="use from_day and until_day to select days")
    if len(where) > usage_report.WHERE_MAX:
        raise InvalidValue(f"where= has {len(where)} fields, over the limit of {usage_report.WHERE_MAX}")
    return where


def _limits(who: Caller, reach: str) -> tuple[str | None, tuple[str, ...]]:
    """Return the principal and the teams whose usage the caller may see; None for all usage."""
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


class UnpostedDay(msgspec.Struct, frozen=True, kw_only=True):
    """The unposted usage of an attempt on one node and one day."""

    run_id: str
    fence: int
    account: Account
    line: LedgerLine  # Current metering line of the day. `amounts` contains only the unposted part.
    amounts: Amounts
    is_posted: bool  # True if the ledger already has entries for the day of the metering line.


class UnpostedDays(msgspec.Struct, frozen=True, kw_only=True):
    """Usage that the ledger does not contain yet."""

    lines: tuple[UnpostedDay, ...] = ()
    attempts: int = 0  # Number of pairs of attempt and node in the result.
    is_cut: bool = False  # True if attempts outside the result also have unposted usage.


def find_unposted(connection: sa.Connection, at: Now, *, currency: str, limit: int = UNPOSTED_MAX) -> UnpostedDays:
    """Return usage that the ledger does not contain yet."""
    ids = sorted(
        {*charges.crews_going_on(connection, before_ns=_EVER_NS), *charges.due_crews(connection, limit=limit + 1)}
    )
    shown = ids[:limit]
    tries = attempts.of_runs(connection, sorted({run_id for run_id, _, _ in shown}))
    found = [(tries[run_id, fence], number) for run_id, fence, number in shown if (run_id, fence) in tries]
    known = charges.find_accounts(connection, [one.account_id for one, _ in found if one.account_id is not None])
    posted, told = charges.of_crews(connection, shown), facts.ends_of_crews(connection, shown)
    lines: list[UnpostedDay] = []
    for attempt, number in found:
        crew = attempt.crews[number]
        account = known.get(attempt.account_id or 0)
        if account is None:  # An older server version placed this attempt without an account.
            run, pool = runs.find(connection, attempt.run_id), nodes.pool_of(connection, attempt.crews[0].node_id)
            if run is not None:
                gpu_type = attempt.gpu_type
                account = charges.account_of_run(connection, run, gpu_type=gpu_type, pool=pool, currency=currency)
        if account is not None:
            lines += _lines(crew, account, posted[crew.id], lines_so_far(attempt, crew, told[crew.id], at))
    return UnpostedDays(lines=_first_counted(lines, posted), attempts=len(shown), is_cut=len(ids) > limit)


def group_unposted(lines: Iterable[UnpostedDay], by: Sequence[str]) -> list[ReportRow]:
    """Group unposted usage for a report, without days that the ledger contains completely."""
    return usage_report.together(
        ReportRow(
            key=usage_report.key_of(by, one.account, run_id=one.run_id, day=one.line.day),
            currency=one.account.currency,
            amounts=one.amounts,
        )
        for one in lines
        if one.amounts.runs or any(getattr(one.amounts, name) for name in _NUMBERS)
    )


def _lines(
    crew: StoredCrew, account: Account, posted: Sequence[PostedEntry], used: Sequence[LedgerLine]
) -> list[UnpostedDay]:
    there: dict[int, list[LedgerLine]] = defaultdict(list)
    for one in posted:
        there[one.entry.line.day].append(one.entry.line)
    return [
        UnpostedDay(
            run_id=crew.run_id,
            fence=crew.fence,
            account=account,
            line=line,
            amounts=_less(line, there.get(line.day, ())),
            is_posted=line.day in there,
        )
        for line in used
    ]


def _less(line: LedgerLine, posted: Sequence[LedgerLine]) -> Amounts:
    """Return the usage of a day minus the amounts that the ledger already contains."""
    numbers = {name: getattr(line, name) - sum(getattr(one, name) for one in posted) for name in _NUMBERS}
    priced = [one.micros for one in posted if one.micros is not None]
    micros = None if line.micros is None and not priced else (line.micros or 0) - sum(priced)
    unpriced = line.billed_ms if line.micros is None else 0
    unpriced -= sum(one.billed_ms for one in posted if one.micros is None)
    return Amounts(**numbers, micros=micros, unpriced_ms=unpriced, going_ms=numbers["gpu_ms"])


def _first_counted(
    lines: Sequence[UnpostedDay], posted: Mapping[CrewId, Sequence[PostedEntry]]
) -> tuple[UnpostedDay, ...]:
    """Return metering lines that count each unposted run once, in the first line of the run."""
    counted = {run_id for (run_id, fence, _), entries in posted.items() if entries or fence > 1}
    found = []
    for one in sorted(lines, key=lambda line: (line.run_id, line.fence, line.line.day)):
        is_first = one.run_id not in counted
        counted.add(one.run_id)
        found.append(
            msgspec.structs.replace(one, amounts=msgspec.structs.replace(one.amounts, runs=1)) if is_first else one
        )
    return tuple(found)


routes = Routes("usage")
Day = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


class UsageQuery(Query, frozen=True, kw_only=True):
    """Parameters of a usage report: groups `by`, days, `where` (JSON), and the number of groups."""

    by: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    from_day: Day | None = None
    until_day: Day | None = None
    where: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=GROUPS_MAX)] = GROUPS_DEFAULT


class NamesQuery(Query, frozen=True, kw_only=True):
    """Parameters for the costs of runs by name: days, and `where` (JSON)."""

    from_day: Day | None = None
    until_day: Day | None = None
    where: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class RecordsQuery(Query, frozen=True, kw_only=True):
    """Parameters for ledger rows: the last entry already read, days, and the maximum number of rows."""

    after: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0
    from_day: Day | None = None
    until_day: Day | None = None
    limit: Annotated[int, msgspec.Meta(ge=3, le=RECORDS_MAX)] = RECORDS_MAX


class DemandQuery(Query, frozen=True, kw_only=True):
    """Parameters for device demand: time, team, pool, GPU type, and the `cursor` of the previous page."""

    from_ns: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0
    to_ns: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = (1 << 62) - 1
    team: Annotated[str, msgspec.Meta(max_length=256)] = ""
    pool: Annotated[str, msgspec.Meta(max_length=256)] = ""
    gpu_type: Annotated[str, msgspec.Meta(max_length=256)] = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1000
    cursor: Annotated[str, msgspec.Meta(pattern="^[0-9]{0,18}$")] = ""


@routes.get("/usage", needs=reading("usage"))
def view_usage(call: Call, usage_reports: UsageReports, query: UsageQuery) -> UsageView:
    """Return usage and costs by group."""
    wanted = ReportRequest(
        by=parse_by(query.by),
        window=usage_reports.window(query.from_day, query.until_day),
        where=where_of(query.where),
        limit=query.limit,
    )
    return usage_reports.view(call.who, call.reach, wanted)


@routes.get("/usage/names", needs=reading("usage"))
def view_names(call: Call, usage_reports: UsageReports, query: NamesQuery) -> NameCosts:
    """Return the mean and median cost of runs by name."""
    window, where = usage_reports.window(query.from_day, query.until_day), where_of(query.where)
    wanted = ReportRequest(by=("name",), window=window, where=where, limit=NAME_ENTRIES_MAX)
    return usage_reports.view_names(call.who, call.reach, wanted)


@routes.get("/usage/tags", needs=reading("usage"))
def view_tags(call: Call, usage_reports: UsageReports) -> TagKeys:
    """Return the keys of tags, by which a report can group usage."""
    return usage_reports.view_tags(call.who, call.reach)


@routes.get("/usage/records", needs=reading("usage"))
def view_records(call: Call, usage_reports: UsageReports, query: RecordsQuery) -> RecordPage:
    """Return ledger entries in the format of billing tables."""
    window = usage_reports.window(query.from_day, query.until_day)
    return usage_reports.view_records(call.who, call.reach, window, after=query.after, limit=query.limit)


@routes.get("/usage/prices", needs=reading("prices"))
def view_prices(call: Call, usage_reports: UsageReports) -> ListPrices:
    """Return the price book in the format of billing tables."""
    return usage_reports.view_prices()


@routes.get("/usage/demand", needs=reading("usage"))
def view_demand(call: Call, usage_reports: UsageReports, query: DemandQuery) -> DemandPage:
    """Return the usage of devices over time, with the owners of the runs."""
    asked = DemandFilter(
        from_ns=query.from_ns, to_ns=query.to_ns, team=query.team, pool=query.pool, gpu_type=query.gpu_type
    )
    after = int(query.cursor or 0)
    return usage_reports.view_demand(call.who, call.reach, asked, after=after, limit=query.limit)
