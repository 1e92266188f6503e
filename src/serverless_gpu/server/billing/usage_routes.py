"""Routes of `wire/billing.py`: what was used, and what it cost."""

from __future__ import annotations

from typing import Annotated

import msgspec

from serverless_gpu.model.billing.usage_report import parse_by
from serverless_gpu.server.billing import usage_reports as usage
from serverless_gpu.server.billing.usage_reports import UsageReports
from serverless_gpu.server.http.routing import Call, Query, Routes, reading
from serverless_gpu.server.records.usage_rows import DemandFilter
from serverless_gpu.server.records.usage_sums import ReportRequest
from serverless_gpu.wire.billing import (
    GROUPS_DEFAULT,
    GROUPS_MAX,
    RECORDS_MAX,
    DemandPage,
    ListPrices,
    RecordPage,
    UsageView,
)

routes = Routes("usage")
Day = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


class UsageQuery(Query, frozen=True, kw_only=True):
    """By what (fields with commas), over which days, and of whom (`where`: a JSON object); how many groups."""

    by: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    from_day: Day | None = None
    until_day: Day | None = None
    where: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=GROUPS_MAX)] = GROUPS_DEFAULT


class RecordsQuery(Query, frozen=True, kw_only=True):
    """From where on, over which days, and how many at most."""

    after: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0
    from_day: Day | None = None
    until_day: Day | None = None
    limit: Annotated[int, msgspec.Meta(ge=3, le=RECORDS_MAX)] = RECORDS_MAX


class DemandQuery(Query, frozen=True, kw_only=True):
    """Of when, and only of this team, pool and GPU type; `cursor` of the page before."""

    from_ns: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0
    to_ns: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = (1 << 62) - 1
    team: Annotated[str, msgspec.Meta(max_length=256)] = ""
    pool: Annotated[str, msgspec.Meta(max_length=256)] = ""
    gpu_type: Annotated[str, msgspec.Meta(max_length=256)] = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1000
    cursor: Annotated[str, msgspec.Meta(pattern="^[0-9]{0,18}$")] = ""


@routes.get("/usage", needs=reading("usage"))
def view_usage(call: Call, usage_reports: UsageReports, query: UsageQuery) -> UsageView:
    """Return what was used and what it cost, by whatever it is grouped by."""
    wanted = ReportRequest(
        by=parse_by(query.by),
        window=usage_reports.window(query.from_day, query.until_day),
        where=usage.where_of(query.where),
        limit=query.limit,
    )
    return usage_reports.view(call.who, call.reach, wanted)


@routes.get("/usage/records", needs=reading("usage"))
def view_records(call: Call, usage_reports: UsageReports, query: RecordsQuery) -> RecordPage:
    """Return rows of the ledger as billing tables have them."""
    window = usage_reports.window(query.from_day, query.until_day)
    return usage_reports.view_records(call.who, call.reach, window, after=query.after, limit=query.limit)


@routes.get("/usage/prices", needs=reading("prices"))
def view_prices(call: Call, usage_reports: UsageReports) -> ListPrices:
    """Return the price book as billing tables have it."""
    return usage_reports.view_prices()


@routes.get("/usage/demand", needs=reading("usage"))
def view_demand(call: Call, usage_reports: UsageReports, query: DemandQuery) -> DemandPage:
    """Return when devices were had, and by whom."""
    asked = DemandFilter(
        from_ns=query.from_ns, to_ns=query.to_ns, team=query.team, pool=query.pool, gpu_type=query.gpu_type
    )
    after = int(query.cursor or 0)
    return usage_reports.view_demand(call.who, call.reach, asked, after=after, limit=query.limit)
