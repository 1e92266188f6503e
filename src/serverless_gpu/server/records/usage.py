"""Sums ledger entries for usage reports, and returns ledger rows for billing tables.

A report over a million charges takes one second, with any grouping. Each grouping reads one of these tables:

    used_plain_days, by plain account and day   for reports without tags, environments and runs
    used_days, by account and day               for tags or environments, if few accounts exist
    charges                                     for runs; or tags, if nearly each run has its own account
      └── plus charges after the sums ── join accounts ─▶ by user, team, tag, month … ─▶ the most expensive

For a report that reads `charges`, a query with only two sums first finds the most expensive groups. A second query then
computes all sums of the most expensive groups. The queries read tags from the table `account_tags`. SQLite and
PostgreSQL join `account_tags` by index instead of parsing the JSON of a million accounts. Each run belongs to exactly
one group, because a run counts in the group of its first charge. Observed GPU utilisation comes from a separate table,
`utilisations`, and uses the same groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.billing import usage_report
from serverless_gpu.model.billing.ledger import EntryKind
from serverless_gpu.model.billing.metering import SEGMENTS
from serverless_gpu.model.billing.usage_report import ACCOUNT_FIELDS, TAG, Amounts, DayRange, ReportRow
from serverless_gpu.model.calendars import SINCE_MONDAY
from serverless_gpu.server.db.tables import (
    account_tags,
    accounts,
    charges,
    folded,
    used_days,
    used_plain_days,
    utilisations,
)
from serverless_gpu.server.records.charges import Account, PostedEntry, find_accounts, posted_from_row
from serverless_gpu.wire.billing import DemandRow

_OBSERVED = ("observed_ms", "busy_ms", "peak_memory_bytes")
_OF_ACCOUNT = ("name", "owner", "team", "pool", "reserved", "gpu_type", "currency")
_OF_CHARGE = ("run_id", "fence", "day", "start_ns", "end_ns", "gpus", "queued_ms", "gpu_ms", "billed_ms", "micros")


ACCOUNTS_FEW = 20_000
"""Maximum number of accounts for which reports use daily sums by account.

With more accounts, the table of daily sums is nearly as large as the table of charges.
"""
_PLAIN = ("queued_ms", *SEGMENTS, "gpu_ms", "billed_ms", "core_ms", "memory_mib_ms", "micros", "dbu_micros")
SUMS = (*_PLAIN, "runs", "unpriced_ms", "provisional_ms")
FOLDED = "charges"
"""Name of the row in `folded` with the number of the last ledger entry in the daily sums."""
_SEEN = ("observed_ms", "busy_ms")
Column = sa.ColumnElement[Any]


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """A ledger entry with its account."""

    posted: PostedEntry
    account: Account


def visible(seen_by: str | None, teams: Sequence[str]) -> list[sa.ColumnElement[bool]]:
    """Return the SQL condition that selects the accounts that a caller may see."""
    if seen_by is None:
        return []
    return [sa.or_(accounts.c.owner == seen_by, accounts.c.team.in_(teams))]


def page(
    connection: sa.Connection, window: DayRange, may_see: Sequence[sa.ColumnElement[bool]], *, after: int, limit: int
) -> list[UsageRow]:
    """Return the ledger entries in a range of days with a number above `after`, in posting order."""
    query = (
        sa.select(charges)
        .join(accounts, accounts.c.id == charges.c.account_id)
        .where(charges.c.seq > after, charges.c.day >= window.from_day, charges.c.day < window.until_day, *may_see)
        .order_by(charges.c.seq)
        .limit(limit)
    )
    posted = [posted_from_row(row) for row in connection.execute(query)]
    known = find_accounts(connection, {one.account_id for one in posted})
    return [UsageRow(posted=one, account=known[one.account_id]) for one in posted]


def skus(connection: sa.Connection, *, limit: int) -> list[tuple[str, str]]:
    """Return all pairs of GPU type and pool in the accounts."""
    query = sa.select(accounts.c.gpu_type, accounts.c.pool).distinct().order_by(accounts.c.gpu_type, accounts.c.pool)
    return [(gpu_type, pool) for gpu_type, pool in connection.execute(query.limit(limit))]


class DemandFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of `demand`.

    Attributes:
        from_ns: start of the interval in nanoseconds since 1970. `to_ns` is the end of the interval.
        team: the team whose usage to include; "" for any team. In each filter, "" selects all usage.
    """

    from_ns: int
    to_ns: int
    team: str = ""
    pool: str = ""
    gpu_type: str = ""


def demand(
    connection: sa.Connection, asked: DemandFilter, may_see: Sequence[sa.ColumnElement[bool]], *, after: int, limit: int
) -> list[tuple[int, DemandRow]]:
    """Return daily usage rows from ledger entries above number `after`, each with its entry number."""
    later = charges.alias("later")
    same_day = sa.and_(*(later.c[name] == charges.c[name] for name in ("run_id", "fence", "crew", "day")))
    same_crew = sa.and_(*(utilisations.c[name] == charges.c[name] for name in ("run_id", "fence", "crew")))
    is_last = ~sa.exists(sa.select(sa.literal(1)).where(same_day, later.c.number > charges.c.number))
    named = {name: getattr(asked, name) for name in ("team", "pool", "gpu_type") if getattr(asked, name)}
    query = (
        sa.select(charges, *(accounts.c[name] for name in _OF_ACCOUNT), *(utilisations.c[name] for name in _OBSERVED))
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


class ReportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a usage report.

    Attributes:
        by: fields by which the report groups usage.
        window: the days that the report covers.
        where: fields and the values that counted usage must have.
        seen_by: the principal whose usage counts, in addition to `teams`; None for all usage.
        limit: maximum number of groups.
    """

    by: tuple[str, ...]
    window: DayRange
    where: Mapping[str, str] = {}
    seen_by: str | None = None
    teams: tuple[str, ...] = ()
    limit: int


class ReportResult(msgspec.Struct, frozen=True, kw_only=True):
    """The groups and totals of a usage report."""

    groups: list[ReportRow]
    totals: list[ReportRow]
    is_cut: bool


def find(connection: sa.Connection, wanted: ReportRequest) -> ReportResult:
    """Return the usage and the charges of each group."""
    report = _Report(connection, wanted)
    rows = report.charged(wanted.by, limit=wanted.limit + 1)
    groups, is_cut = rows[: wanted.limit], len(rows) > wanted.limit
    if not is_cut:
        groups = report.seen(wanted.by, groups)
        return ReportResult(groups=groups, totals=usage_report.totals(groups), is_cut=False)
    totals = report.seen((), report.charged((), limit=None))
    return ReportResult(groups=report.seen(wanted.by, groups, only=True), totals=totals, is_cut=True)


def tag_keys(connection: sa.Connection, may_see: Sequence[sa.ColumnElement[bool]], *, limit: int) -> list[str]:
    """Return the keys of tags in alphabetical order. Each key costs one or two index lookups."""
    found: list[str] = []
    last = ""
    while len(found) < limit:
        last = connection.scalar(sa.select(sa.func.min(account_tags.c.key)).where(account_tags.c.key > last)) or ""
        if not last:
            break
        own = sa.select(sa.literal(1)).select_from(account_tags.join(accounts)).where(account_tags.c.key == last)
        if not may_see or connection.execute(own.where(*may_see).limit(1)).first() is not None:
            found.append(last)
    return found


class RunCost(NamedTuple):
    """The cost and usage of one run in a range of days."""

    name: str
    currency: str
    micros: int | None
    gpu_ms: int


def run_costs(connection: sa.Connection, wanted: ReportRequest) -> tuple[list[RunCost], bool]:
    """Return the costs of the runs in ledger entries of the latest days.

    `wanted.limit` is the maximum number of ledger entries. The second result is True if there are more entries.
    """
    columns = (charges.c.run_id, charges.c.account_id, charges.c.micros, charges.c.gpu_ms)
    latest = sa.select(*columns).where(*_Report(connection, wanted)._conditions(charges))
    rows = latest.order_by(charges.c.day.desc()).limit(wanted.limit).subquery("latest")
    sums = (sa.func.sum(rows.c.micros), sa.func.sum(rows.c.gpu_ms), sa.func.count())
    query = (
        sa.select(accounts.c.name, accounts.c.currency, *sums)
        .select_from(rows.join(accounts, accounts.c.id == rows.c.account_id))
        .group_by(accounts.c.name, accounts.c.currency, rows.c.run_id)
    )
    found = [tuple(row) for row in connection.execute(query)]
    costs = [
        # PostgreSQL returns sums as `Decimal` values.
        RunCost(name, currency, None if micros is None else int(micros), int(gpu_ms))
        for name, currency, micros, gpu_ms, _ in found
    ]
    return costs, sum(row[-1] for row in found) >= wanted.limit


def folded_seq(connection: sa.Connection) -> int:
    """Return the number of the last ledger entry in the sums by account and day."""
    return connection.scalar(sa.select(folded.c.seq).where(folded.c.name == FOLDED)) or 0


class _Report:
    """Builds the SQL queries of one usage report.

    Group key columns have the labels `k0`, `k1` …. Labels of sum columns have the prefix `s_`.
    """

    def __init__(self, connection: sa.Connection, wanted: ReportRequest) -> None:
        self._connection = connection
        self._wanted = wanted
        few = sa.select(accounts.c.id).limit(ACCOUNTS_FEW + 1).subquery()
        self._is_few = (connection.scalar(sa.select(sa.func.count()).select_from(few)) or 0) <= ACCOUNTS_FEW
        self._currencies = list(connection.scalars(sa.select(accounts.c.currency).distinct()))

    def charged(self, by: tuple[str, ...], *, limit: int | None) -> list[ReportRow]:
        """Return the most expensive groups of charges, or all groups if `limit` is None."""
        source, conditions, sums = self._source(by)
        if source is charges and limit is not None and (field := self._finest(by)):
            conditions = self._narrowed(charges, field, self._dearest(by, field, limit))
        query = self._grouped(by, source, sums).where(*conditions)
        if limit is not None:
            query = self._dearest_first(query, by, *(sums[SUMS.index(name)] for name in ("micros", "gpu_ms")))
            query = query.limit(limit)
        return [self._group(by, row, SUMS) for row in self._rows(query)]

    def seen(self, by: tuple[str, ...], groups: list[ReportRow], *, only: bool = False) -> list[ReportRow]:
        """Add the observed GPU utilisation to report groups. With `only`, the query reads no other groups."""
        source: sa.FromClause = utilisations
        conditions = self._conditions(utilisations)
        if "run" not in by and (self._is_plain(by) or self._is_few):
            whose = utilisations.c.plain_id if self._is_plain(by) else utilisations.c.account_id
            named = [sa.func.sum(utilisations.c[name]).label(name) for name in _SEEN]
            daily = sa.select(utilisations.c.day, whose.label("account_id"), *named).where(*conditions)
            source = daily.group_by(utilisations.c.day, whose).subquery("seen")
            conditions = []
        sums = [sa.func.sum(source.c[name]).label(f"s_{name}") for name in _SEEN]
        query = self._grouped(by, source, sums).where(*conditions)
        if only and (field := self._finest(by)):
            at = by.index(field)
            values = list(dict.fromkeys(group.key[at] for group in groups))
            if source is utilisations:
                query = self._grouped(by, source, sums).where(*self._narrowed(utilisations, field, values))
            else:
                query = query.where(self._is_among(field, source, values))
        found = {
            (each.key, each.currency): each.amounts for each in (self._group(by, r, _SEEN) for r in self._rows(query))
        }
        shown = [
            msgspec.structs.replace(
                group,
                amounts=usage_report.added(group.amounts, found.pop((group.key, group.currency), Amounts())),
            )
            for group in groups
        ]
        # If utilisation and charges fall on different days, the report has a separate row for the utilisation.
        rest = (
            []
            if only
            else [ReportRow(key=key, currency=currency, amounts=each) for (key, currency), each in found.items()]
        )
        return shown + rest

    def _source(self, by: tuple[str, ...]) -> tuple[sa.FromClause, list[Column], list[sa.Label[Any]]]:
        """Return the source table of a report, the conditions on its rows, and the sum columns."""
        if "run" in by or not (self._is_plain(by) or self._is_few):
            return charges, self._conditions(charges), sums_of_rows()
        daily = self._daily(used_plain_days if self._is_plain(by) else used_days)
        return daily, [], [sa.func.sum(daily.c[f"s_{name}"]).label(f"s_{name}") for name in SUMS]

    def _is_plain(self, by: tuple[str, ...]) -> bool:
        """Return True if plain accounts, which have no tags and environments, suffice for the report."""
        return not any(field == "environment" or field.startswith(TAG) for field in (*by, *self._wanted.where))

    @staticmethod
    def _finest(by: tuple[str, ...]) -> str:
        """Return the grouping field with the most values, which is "run", else the first tag, else ""."""
        return next((field for field in by if field == "run"), next((f for f in by if f.startswith(TAG)), ""))

    def _daily(self, table: sa.Table) -> sa.FromClause:
        """Return sums by account and day, including ledger entries that are newer than the stored sums."""
        if "run" in self._wanted.where:
            return self._of_entries(self._conditions(charges)).subquery("daily")
        after = folded_seq(self._connection)
        there = sa.select(table.c.day, table.c.account_id, *(table.c[name].label(f"s_{name}") for name in SUMS)).where(
            *self._conditions(table)
        )
        # `day + 0` bypasses the index on `day`, because the stored sums already cover nearly all entries of the window.
        last = self._of_entries([charges.c.seq > after, *self._conditions(charges, day=charges.c.day + 0)])
        return sa.union_all(there, last).subquery("daily")

    def _of_entries(self, conditions: list[Column]) -> sa.Select[Any]:
        query = sa.select(charges.c.day, charges.c.account_id, *sums_of_rows()).where(*conditions)
        return query.group_by(charges.c.day, charges.c.account_id)

    def _dearest(self, by: tuple[str, ...], field: str, limit: int) -> list[Any]:
        """Return the field's values in the most expensive groups, from a query with only two sums."""
        # Sum the values as doubles, which are exact up to 2^53. PostgreSQL sums integers as `numeric`, which takes one
        # second longer for a million groups.
        cost, used = (sa.func.sum(sa.cast(charges.c[name], sa.Double)).label(name) for name in ("micros", "gpu_ms"))
        query = self._grouped(by, charges, [cost, used]).where(*self._conditions(charges))
        rows = self._connection.execute(self._dearest_first(query, by, cost, used).limit(limit))
        return list(dict.fromkeys(row[by.index(field)] for row in rows))

    def _dearest_first(
        self, query: sa.Select[Any], by: tuple[str, ...], cost: sa.Label[Any], used: sa.Label[Any]
    ) -> sa.Select[Any]:
        keys = [sa.text(f"k{place}") for place in range(len(by) + self._has_currencies)]
        return query.order_by(sa.desc(cost).nulls_last(), sa.desc(used), *keys)

    def _grouped(self, by: tuple[str, ...], source: sa.FromClause, sums: Sequence[sa.Label[Any]]) -> sa.Select[Any]:
        joined = source
        if self._has_currencies or any(field in ACCOUNT_FIELDS for field in by):
            joined = source.join(accounts, accounts.c.id == source.c.account_id)
        keys: list[Column] = []
        for field in by:
            if field.startswith(TAG):
                tag = account_tags.alias()
                is_own = sa.and_(tag.c.key == field.removeprefix(TAG), tag.c.account_id == source.c.account_id)
                joined = joined.outerjoin(tag, is_own)
                keys.append(sa.func.coalesce(tag.c.value, ""))
            else:
                keys.append(self._key(field, source))
        if self._has_currencies:
            keys.append(accounts.c.currency)
        labelled = [key.label(f"k{place}") for place, key in enumerate(keys)]
        query = sa.select(*labelled, *sums).select_from(joined)
        # Group by label: PostgreSQL does not recognize equal expressions with parameters as the same group key.
        return query.group_by(*(sa.text(f"k{place}") for place in range(len(keys)))) if keys else query

    def _conditions(self, table: sa.Table, *, day: Column | None = None) -> list[Column]:
        wanted, day = self._wanted, table.c.day if day is None else day
        found: list[Column] = [day >= wanted.window.from_day, day < wanted.window.until_day]
        of_account = visible(wanted.seen_by, wanted.teams)
        for field, value in wanted.where.items():
            if field == "run":
                found.append(table.c.run_id == value)
            else:
                of_account.append(self._is_among(field, accounts, [value]))
        if of_account:
            found.append(table.c.account_id.in_(sa.select(accounts.c.id).where(*of_account)))
        return found

    def _key(self, field: str, source: sa.FromClause) -> Column:
        if field in ACCOUNT_FIELDS:
            return accounts.c[ACCOUNT_FIELDS[field]]
        if field == "run":
            return source.c.run_id
        if field == "day":
            return source.c.day
        if field == "week":
            return (source.c.day + SINCE_MONDAY) // 7
        if field == "month":
            months = usage_report.months(self._wanted.window)
            return sa.case(*((source.c.day < until_day, name) for until_day, name in months), else_="")
        raise AssertionError(field)

    def _narrowed(self, table: sa.Table, field: str, values: Sequence[Any]) -> list[Column]:
        """Return SQL conditions that select the rows with one of the given field values."""
        if field.startswith(TAG) and "" not in values:
            tagged = self._is_among(field, accounts, values)
            ids = list(self._connection.scalars(sa.select(accounts.c.id).where(tagged).limit(self._wanted.limit * 2)))
            if len(ids) < self._wanted.limit * 2:
                # With lists of days and accounts, the query uses the index on both columns. With a range of days, the
                # query would read all rows of these days.
                days = table.c.day.in_(range(*self._wanted.window))
                return [days, table.c.account_id.in_(ids), *self._conditions(table)]
        return [*self._conditions(table), self._is_among(field, table, values)]

    def _is_among(self, field: str, source: sa.FromClause, values: Sequence[Any]) -> Column:
        """Return the SQL condition for one of the given values of a field. "" denotes a missing tag."""
        if not field.startswith(TAG):
            return self._key(field, source).in_(values)
        account_id = accounts.c.id if source is accounts else source.c.account_id
        tagged = sa.select(account_tags.c.account_id).where(account_tags.c.key == field.removeprefix(TAG))
        found = account_id.in_(tagged.where(account_tags.c.value.in_(values)))
        if "" not in values:
            return found
        return sa.or_(found, ~tagged.where(account_tags.c.account_id == account_id).exists())

    @property
    def _has_currencies(self) -> bool:
        return len(self._currencies) > 1

    def _rows(self, query: sa.Select[Any]) -> list[sa.Row[Any]]:
        # Drop rows with only NULLs, which a query without group keys returns if no charges match.
        return [row for row in self._connection.execute(query) if any(value is not None for value in row)]

    def _group(self, by: tuple[str, ...], row: sa.Row[Any], names: Sequence[str]) -> ReportRow:
        # PostgreSQL returns sums as `Decimal` values. A sum of NULLs is None. An amount of None means "unpriced".
        sums = {name: int(value or 0) for name, value in zip(names, row[-len(names) :], strict=True)}
        micros = row[-len(names) + names.index("micros")] if "micros" in names else None
        sums.pop("micros", None)
        return ReportRow(
            key=tuple(usage_report.label(field, value) for field, value in zip(by, row, strict=False)),
            currency=row[len(by)] if self._has_currencies else next(iter(self._currencies), ""),
            amounts=Amounts(**sums, micros=None if micros is None else int(micros)),
        )


def sums_of_rows() -> list[sa.Label[Any]]:
    """Return columns that sum the charges, with numeric results that an outer query can sum again."""
    earlier = charges.alias("earlier")
    same_run = sa.and_(earlier.c.run_id == charges.c.run_id, earlier.c.seq < charges.c.seq)
    is_first = sa.and_(charges.c.number == 1, ~sa.exists(sa.select(sa.literal(1)).where(same_run)))
    columns: dict[str, Column] = {name: charges.c[name] for name in _PLAIN}
    columns["runs"] = sa.case((is_first, 1), else_=0)
    columns["unpriced_ms"] = sa.case((charges.c.micros.is_(None), charges.c.billed_ms), else_=0)
    columns["provisional_ms"] = sa.case((charges.c.provisional, charges.c.gpu_ms), else_=0)
    return [sa.func.sum(columns[name]).label(f"s_{name}") for name in SUMS]
