"""Shows usage and cost: a total, a chart by day, groups with links down to runs, and downloads.

Every choice is in the address: the grouping, the days, the filters and the measure. Days are UTC
days, as in the ledger.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model import calendars
from serverless_gpu.model.billing import usage_report, usage_table
from serverless_gpu.model.billing.billing_rows import BillingRow
from serverless_gpu.model.billing.usage_report import ACCOUNT_FIELDS, TAG, Amounts, DayRange, ReportRow
from serverless_gpu.server.billing import usage_reports
from serverless_gpu.server.billing.usage_reports import NamesQuery, RecordsQuery, UsageQuery
from serverless_gpu.server.http.routing import Call, Query, Routes, reading
from serverless_gpu.server.web import downloads, stacked_chart
from serverless_gpu.server.web.downloads import CSV, PARQUET, Download, csv_pieces
from serverless_gpu.server.web.site import WEB, Page, Site
from serverless_gpu.server.web.stacked_chart import StackedChart
from serverless_gpu.units import format_gpu_ms, format_micros
from serverless_gpu.wire.billing import GROUPS_MAX, RECORDS_MAX, NameCosts, UsageView

routes = Routes("usage-pages", mount=WEB)
CHARGEBACK = "chargeback"
ROWS = 100
_CELLS_MAX = 2_000
"""Maximum number of pairs of day and group from which the page computes everything with one query."""
_BY_DAY_MAX, _BY_WEEK_MAX = 62, 400
"""Maximum numbers of days in a chart with a column for each day, and for each week."""
_FILTERS = tuple(ACCOUNT_FIELDS)
_TITLES = {
    "user": "User",
    "team": "Team",
    "gpu_type": "GPU type",
    "pool": "Pool",
    "name": "Run name",
    "policy": "Policy",
    "workload": "Workload",
    "environment": "Environment",
    "day": "Day",
    "run": "Run",
    CHARGEBACK: "Chargeback",
}
_OF_RUNS = {"user": "owner", "team": "team", "name": "name", "gpu_type": "type"}
"""Filters of the page of runs, by field of a report."""
Filter = Annotated[str, msgspec.Meta(max_length=256)]


class UsagePageQuery(Query, frozen=True, kw_only=True):
    """Choices of the page.

    `by` is a field of a report, "tag:KEY" or "chargeback". `from` and `to` are days, and `to` is inclusive. `tag` holds
    comma-separated tags (`project=atlas,stage=dev`). The value "-" selects usage without a value.
    """

    by: Annotated[str, msgspec.Meta(max_length=300)] = "user"
    from_: Annotated[str, msgspec.Meta(max_length=10)] = msgspec.field(default="", name="from")
    to: Annotated[str, msgspec.Meta(max_length=10)] = ""
    measure: Annotated[str, msgspec.Meta(pattern="^(cost|time)?$")] = ""
    tag: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    user: Filter = ""
    team: Filter = ""
    pool: Filter = ""
    policy: Filter = ""
    gpu_type: Filter = ""
    name: Filter = ""
    workload: Filter = ""
    environment: Filter = ""
    rows: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = ROWS


class Group(NamedTuple):
    """A row of the table, with the filter value of its key and its share of the shown measure."""

    label: str
    value: str
    currency: str
    amounts: Amounts
    share: float | None


class _Choice(NamedTuple):
    """The decoded choices of a request."""

    query: UsagePageQuery
    window: DayRange
    where: Mapping[str, str]

    @property
    def fields(self) -> tuple[str, ...]:
        return ("team", "user") if self.query.by == CHARGEBACK else (self.query.by,)

    @property
    def where_json(self) -> str:
        return msgspec.json.encode(self.where).decode() if self.where else ""


class _Report(NamedTuple):
    groups: tuple[ReportRow, ...]  # Without periods, the highest cost first.
    cells: tuple[ReportRow, ...]  # Keys of cells are column and group.
    columns: Mapping[str, ReportRow]  # Totals of columns, in one currency.
    totals: tuple[ReportRow, ...]
    is_cut: bool
    is_going_cut: bool


@routes.get("/usage", needs=reading("usage"))
def show_usage(call: Call, site: Site, query: UsagePageQuery) -> Page:
    """Show usage by group and day."""
    today = call.clock.wall_ns() // calendars.DAY_NS
    choice = _choice(query, today)
    found = _report(site, call, choice)
    currency = found.totals[0].currency if found.totals else ""
    is_priced = any(total.amounts.micros is not None for total in found.totals)
    measure = query.measure or ("cost" if is_priced else "time")
    chart = _chart(choice, found, measure, currency)
    groups = _groups(choice, found.groups, found.totals, measure)
    asked = NamesQuery(from_day=choice.window.from_day, until_day=choice.window.until_day, where=choice.where_json)
    names = site.ask(call, usage_reports.view_names, query=asked) if query.by == "name" else None
    tags = site.ask(call, usage_reports.view_tags)
    return site.page(
        call,
        "usage.html",
        title="Usage",
        nav="usage",
        query=query,
        address=lambda **changes: _address(query, **changes),
        runs_address=lambda **more: _runs_address(choice, **more),
        drill=lambda group: _drill(choice, group),
        by=query.by,
        by_title=_title(query.by),
        fields=[(field, title) for field, title in _TITLES.items() if field not in ("day", "run")],
        tags=tags,
        ranges=_ranges(today),
        window=choice.window,
        first_day=calendars.format_day(choice.window.from_day),
        last_day=calendars.format_day(choice.window.until_day - 1),
        filters=[(_title(field), value, _without(query, field)) for field, value in choice.where.items()],
        measure=measure,
        chart=chart,
        groups=groups[: query.rows],
        group_count=len(groups),
        totals=found.totals,
        is_cut=found.is_cut,
        is_going_cut=found.is_going_cut,
        economics=_economics(names),
        names=names,
        has_parquet=downloads.has_parquet(),
        shown_currency=currency,
        money_of=lambda currency: lambda micros: format_micros(micros, currency),
        gpu_time_of=format_gpu_ms,
    )


@routes.get("/usage/report.csv", needs=reading("usage"))
def download_csv(call: Call, site: Site, query: UsagePageQuery) -> Download:
    """Return the report as CSV, with the columns of `sgpu usage --csv`."""
    choice = _choice(query, call.clock.wall_ns() // calendars.DAY_NS)
    table = _table(site, call, choice)
    return Download(name=_file_name(choice, "csv"), media_type=CSV, content=csv_pieces(table.names, table.lines))


@routes.get("/usage/report.parquet", needs=reading("usage"))
def download_parquet(call: Call, site: Site, query: UsagePageQuery) -> Download:
    """Return the report as Parquet, with the columns of `sgpu usage --parquet`."""
    choice = _choice(query, call.clock.wall_ns() // calendars.DAY_NS)
    content = downloads.parquet(_table(site, call, choice))
    return Download(name=_file_name(choice, "parquet"), media_type=PARQUET, content=content)


@routes.get("/usage/records.csv", needs=reading("usage"))
def download_records(call: Call, site: Site, query: UsagePageQuery) -> Download:
    """Return ledger rows as CSV, as `sgpu usage --records --csv` does. The file ignores filters."""
    choice = _choice(query, call.clock.wall_ns() // calendars.DAY_NS)
    window = choice.window

    def records() -> Iterator[BillingRow]:
        after: int | None = 0
        while after is not None:
            asked = RecordsQuery(after=after, from_day=window.from_day, until_day=window.until_day, limit=RECORDS_MAX)
            page = site.ask(call, usage_reports.view_records, query=asked)
            yield from page.records
            after = page.after

    lines = (usage_table.text_cells(record) for record in records())
    name = f"usage-records-{calendars.format_day(window.from_day)}-{calendars.format_day(window.until_day - 1)}.csv"
    return Download(name=name, media_type=CSV, content=csv_pieces(BillingRow.__struct_fields__, lines))


# --- choices ----------------------------------------------------------------------------------------------------------


def _choice(query: UsagePageQuery, today: int) -> _Choice:
    if query.by != CHARGEBACK:
        usage_report.refuse_unknown(query.by)
    until = usage_report.day_of(query.to) + 1 if query.to else today + 1
    first = usage_report.day_of(query.from_) if query.from_ else max(0, until - usage_reports.DAYS)
    where = {field: getattr(query, field) for field in _FILTERS if getattr(query, field)}
    where |= {f"{TAG}{key}": value for key, value in _parse_tags(query.tag).items()}
    # Only "-" can express usage without a value in an address, because an empty parameter means any value.
    where = {field: "" if value == "-" else value for field, value in where.items()}
    if len(where) > usage_report.WHERE_MAX:
        raise InvalidValue(f"a report has at most {usage_report.WHERE_MAX} filters, not {len(where)}")
    return _Choice(query, usage_report.checked(DayRange(first, until)), where)


def _title(field: str) -> str:
    return f"Tag {field.removeprefix(TAG)}" if field.startswith(TAG) else _TITLES.get(field, field)


def _address(query: UsagePageQuery, **changes: Any) -> dict[str, Any]:
    """Return the parameters of this page with some changes, without defaults."""
    said = {name: getattr(query, name) for name in query.__struct_fields__} | changes
    usual = {"by": "user", "rows": ROWS}
    return {name: value for name, value in said.items() if value not in ("", None, usual.get(name))}


def _without(query: UsagePageQuery, field: str) -> dict[str, Any]:
    if not field.startswith(TAG):
        return _address(query, **{field: ""})
    key = field.removeprefix(TAG)
    kept = {name: value for name, value in _parse_tags(query.tag).items() if name != key}
    return _address(query, tag=_write_tags(kept))


def _parse_tags(text: str) -> dict[str, str]:
    """Return the tags of an address, in which `%2C` stands for a comma and `%25` for a per cent sign."""
    pairs = (part.replace("%2C", ",").replace("%25", "%").partition("=") for part in text.split(",") if part.strip())
    return {key.strip(): value for key, _, value in pairs if key.strip()}


def _write_tags(tags: Mapping[str, str]) -> str:
    return usage_report.write_by(f"{key}={value}" for key, value in tags.items())


def _drill(choice: _Choice, group: Group) -> dict[str, Any] | None:
    """Return the parameters of this page with the next finer grouping, within one group."""
    query, by = choice.query, choice.query.by
    if by == CHARGEBACK:
        return None
    following = {"user": "name", "team": "user", "gpu_type": "user", "pool": "user", "name": "user"}.get(by, "user")
    value = group.value or "-"
    if by.startswith(TAG):
        tags = _parse_tags(query.tag) | {by.removeprefix(TAG): value}
        return _address(query, by=following, tag=_write_tags(tags))
    return _address(query, by=following, **{by: value})


def _runs_address(choice: _Choice, *, field: str = "", value: str = "") -> dict[str, Any] | None:
    """Return the parameters of the page of runs for one group, or None if that page lacks a filter."""
    where = dict(choice.where) | ({field: value} if field and field != CHARGEBACK else {})
    found: dict[str, Any] = {}
    tags: list[str] = []
    for name, wanted in where.items():
        if not wanted:
            return None
        if name.startswith(TAG):
            tags.append(f"{name.removeprefix(TAG)}={wanted}")
        elif name in _OF_RUNS:
            found[_OF_RUNS[name]] = wanted
        else:
            return None
    first, last = choice.window.from_day, choice.window.until_day - 1
    days = {"from_": calendars.format_day(first), "to": calendars.format_day(last)}
    return found | ({"tag": ",".join(tags)} if tags else {}) | days


class _Range(NamedTuple):
    title: str
    first: str
    last: str


def _ranges(today: int) -> list[_Range]:
    """Return the ranges of days that a click selects."""
    week, month = calendars.days_of_week(calendars.week_of(today)), calendars.days_of_month(today)
    before = calendars.days_of_month(month.start - 1)
    found = (
        ("Today", today, today),
        ("Yesterday", today - 1, today - 1),
        ("This week", week.start, today),
        ("Last week", week.start - 7, week.start - 1),
        ("Last 7 days", today - 6, today),
        ("Last 30 days", today - 29, today),
        ("This month", month.start, today),
        ("Last month", before.start, before.stop - 1),
        ("Last 12 months", today - 364, today),
    )
    return [_Range(title, calendars.format_day(first), calendars.format_day(last)) for title, first, last in found]


def _file_name(choice: _Choice, suffix: str) -> str:
    first, last = calendars.format_day(choice.window.from_day), calendars.format_day(choice.window.until_day - 1)
    return f"usage-by-{choice.query.by.replace(':', '-')}-{first}-{last}.{suffix}"


# --- reports ----------------------------------------------------------------------------------------------------------


def _ask(site: Site, call: Call, choice: _Choice, by: Sequence[str], limit: int) -> UsageView:
    query = UsageQuery(
        by=usage_report.write_by(by),
        from_day=choice.window.from_day,
        until_day=choice.window.until_day,
        where=choice.where_json,
        limit=limit,
    )
    return site.ask(call, usage_reports.view_usage, query=query)


def _table(site: Site, call: Call, choice: _Choice) -> usage_table.UsageTable:
    found = _ask(site, call, choice, choice.fields, GROUPS_MAX)
    if choice.query.by == CHARGEBACK:
        return usage_table.chargeback(choice.window.from_day, usage_report.chargeback(found.groups))
    return usage_table.report(found.by, found.groups)


def _period(window: DayRange) -> str:
    days = window.until_day - window.from_day
    return "day" if days <= _BY_DAY_MAX else "week" if days <= _BY_WEEK_MAX else "month"


def _columns(window: DayRange) -> list[str]:
    """Return the labels of the chart's columns, which equal the keys of the report's periods."""
    period = _period(window)
    if period == "month":
        return [name for _, name in usage_report.months(window)]
    if period == "week":
        weeks = range(calendars.week_of(window.from_day), calendars.week_of(window.until_day - 1) + 1)
        return [calendars.format_week(week) for week in weeks]
    return [calendars.format_day(day) for day in range(*window)]


def _report(site: Site, call: Call, choice: _Choice) -> _Report:
    """Return groups, and groups by period, with one query if there are few groups."""
    period, fields = _period(choice.window), choice.fields
    cells = _ask(site, call, choice, (period, *fields), _CELLS_MAX)
    if not cells.is_cut:
        groups = usage_report.together(
            ReportRow(key=one.key[1:], currency=one.currency, amounts=one.amounts) for one in cells.groups
        )
        return _Report(
            groups=tuple(usage_report.in_order(groups, fields)),
            cells=cells.groups,
            columns={},
            totals=cells.totals,
            is_cut=False,
            is_going_cut=cells.is_going_cut,
        )
    groups_found = _ask(site, call, choice, fields, 1_000)
    columns = _ask(site, call, choice, (period,), GROUPS_MAX)
    currency = cells.totals[0].currency if cells.totals else ""
    return _Report(
        groups=groups_found.groups,
        cells=cells.groups,
        columns={one.key[0]: one for one in columns.groups if one.currency == currency},
        totals=groups_found.totals,
        is_cut=groups_found.is_cut,
        is_going_cut=groups_found.is_going_cut,
    )


def _chart(choice: _Choice, found: _Report, measure: str, currency: str) -> StackedChart:
    values: dict[tuple[str, str], int] = {}
    for cell in found.cells:
        if cell.currency == currency:
            place = (cell.key[0], _label(choice, cell.key[1:]))
            values[place] = values.get(place, 0) + _measured(cell.amounts, measure)
    shown: dict[str, int] = {}
    for (column, _), value in values.items():
        shown[column] = shown.get(column, 0) + value
    rest = {label: _measured(one.amounts, measure) - shown.get(label, 0) for label, one in found.columns.items()}
    return stacked_chart.stack(_columns(choice.window), values, rest)


def _groups(choice: _Choice, groups: Sequence[ReportRow], totals: Sequence[ReportRow], measure: str) -> list[Group]:
    whole = {total.currency: _measured(total.amounts, measure) for total in totals}
    if choice.query.by == CHARGEBACK:
        shares = usage_report.chargeback(groups)
        rows = [((f"{'Team' if one.is_team else 'User'} {one.name}", one.name), one.group) for one in shares]
    else:
        rows = [((_label(choice, one.key), one.key[0]), one) for one in groups]
    if measure == "time":
        rows.sort(key=lambda row: -row[1].amounts.gpu_ms)
    return [
        Group(
            label=label,
            value=value,
            currency=one.currency,
            amounts=one.amounts,
            share=_measured(one.amounts, measure) / whole[one.currency] if whole.get(one.currency) else None,
        )
        for (label, value), one in rows
    ]


def _label(choice: _Choice, key: Sequence[str]) -> str:
    if choice.query.by == CHARGEBACK:
        return f"Team {key[0]}" if key[0] else f"User {key[1]}"
    if choice.query.by == "environment":
        return key[0][:12] or "none"
    return key[0] or "none"


def _measured(amounts: Amounts, measure: str) -> int:
    return amounts.gpu_ms if measure == "time" else amounts.micros or 0


def _economics(names: NameCosts | None) -> dict[tuple[str, str], usage_report.NameCost]:
    return {} if names is None else {(one.name, one.currency): one for one in names.names}
