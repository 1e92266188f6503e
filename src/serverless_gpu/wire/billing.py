"""Money and use: budgets, prices, use by group, rows of the ledger.

    GET    /budgets                                   → BudgetList    as far as the caller may see it
    GET    /budgets/{name}                            → BudgetView
    PUT    /budgets/{name}          BudgetRequest     → BudgetView    made, or put in the place of another
    POST   /budgets/{name}/reopen                     → BudgetView    one that has stopped runs lets others start again
    DELETE /budgets/{name}                            → BudgetView    as it was

    GET    /prices?all                                → PriceList     in force and planned; `all`: those that ended, too
    PUT    /prices/{resource}       PriceRequest      → PriceSet      from a time on; the one before ends there
    DELETE /prices/{resource}?pool&at_ns              → PriceSet      from then on it has no price

    GET    /usage?by&from_day&until_day&where&limit   → UsageView     sums by user, team, tag, month …
    GET    /usage/prices                              → ListPrices    the price book, to join those with
    GET    /usage/records?after&from_day&until_day&limit              → RecordPage   rows, as billing tables have them
    GET    /usage/demand?from_ns&to_ns&team&pool&gpu_type&limit&cursor → DemandPage  rows, as `sgpu advise` reads them

A resource is a GPU type, "core" or "memory"; its price is for one hour of a device, a core or a GiB. Amounts are
micros: millionths of the currency unit, or of a DBU. Days are of UTC, numbered from 1970-01-01; `until_day` is the
first that is not among them. Rows that the caller may not see are in no sum.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from serverless_gpu.model.billing.billing_rows import BillingRow, ListPrice
from serverless_gpu.model.billing.budget import Period, ScopeKind
from serverless_gpu.model.billing.pricing import MICROS_MAX
from serverless_gpu.model.billing.usage_report import ReportRow
from serverless_gpu.wire.base import NAME_CHARACTERS_MAX, Answer, Request


class BudgetView(Answer, frozen=True, kw_only=True):
    """A budget, and how it stands now. Money is millionths of `currency`, GPU time is GPU-milliseconds.

    Attributes:
        kind: whose use counts: "everything", "user", "team", "pool", "policy", "tag".
        scope: their name; of a tag ``key=value``, or ``key`` for each run that has it.
        limit_micros: exactly one of the two limits is there; `limit_gpu_ms` the other.
        hard: whether runs are stopped when it is used up; else they finish, and nothing new starts.
        start_ns: when its period began, nanoseconds since 1970; `end_ns` when the next one begins.
        used: in the unit of the limit; `held` what goes on holds beside that.
        percent: of the limit that is used.
        unpriced_ms: device-milliseconds of its runs that have no price, and count nothing for a budget of money.
        going_on: how many attempts count for it now.
        forecast: what will be used at the end of the period at the rate of the last days.
        per_day: that rate.
        reached_ns: when it is used up at that rate; None: not in this period.
        basis: what the forecast rests on, in words.
        sentence: how it stands, in words.
        time_zone: of its periods.
    """

    name: str
    kind: ScopeKind
    scope: str
    period: Period
    currency: str
    limit_micros: int | None
    limit_gpu_ms: int | None
    hard: bool
    start_ns: int
    end_ns: int
    used: int
    held: int
    percent: float
    unpriced_ms: int
    going_on: int
    forecast: int
    per_day: int
    reached_ns: int | None
    basis: str
    sentence: str
    time_zone: str = "UTC"


class AlarmView(Answer, frozen=True, kw_only=True):
    """Somebody who spent far more than they are used to.

    Attributes:
        at_ns: when that was seen, nanoseconds since 1970.
        subject: who: "run <id>" or "team <name>".
        sentence: what was seen.
    """

    at_ns: int
    subject: str
    sentence: str


class BudgetList(Answer, frozen=True, kw_only=True):
    """Budgets by name, and the alarms of the last seven days, latest first."""

    budgets: tuple[BudgetView, ...]
    alarms: tuple[AlarmView, ...] = ()


class BudgetRequest(Request, frozen=True, kw_only=True):
    """Make a budget, or put another one in its place; one of the two limits. Money is in the server's currency."""

    kind: ScopeKind
    scope: str = ""
    period: Period
    limit_micros: int | None = None
    limit_gpu_ms: int | None = None
    hard: bool = False
    time_zone: str = ""


Micros = Annotated[int, msgspec.Meta(ge=0, le=MICROS_MAX)]
Moment = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class PriceView(Answer, frozen=True, kw_only=True):
    """One row of the price book.

    Attributes:
        resource: a GPU type, or a family of them; "core", "memory".
        pool: where it holds; "" for every pool that has none of its own.
        micros_per_hour: of one device, core or GiB.
        dbu_micros_per_hour: DBUs of one device, where the price is made of those; else 0.
        from_ns: since when, nanoseconds since 1970; `until_ns` until when, None for as long as nothing else is said.
        set_ns: when that was written.
        in_force: whether it holds now.
    """

    resource: str
    pool: str
    micros_per_hour: int
    dbu_micros_per_hour: int
    from_ns: int
    until_ns: int | None
    set_ns: int
    in_force: bool


class PriceList(Answer, frozen=True, kw_only=True):
    """The price book, by resource, pool and time.

    Attributes:
        currency: of all of them.
    """

    prices: tuple[PriceView, ...]
    currency: str


class PriceRequest(Request, frozen=True, kw_only=True):
    """Set a price: either so much for one hour, or so many DBUs at so much each.

    Attributes:
        micros_per_hour: of one device, core or GiB.
        dbu_micros_per_hour: DBUs of one device; `micros_per_dbu` what one DBU costs.
        pool: "" for every pool that has none of its own.
        from_ns: from when on; None for now. The past only as long as nothing was placed since that could have paid it.
    """

    micros_per_hour: Micros | None = None
    dbu_micros_per_hour: Micros | None = None
    micros_per_dbu: Micros | None = None
    pool: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    from_ns: Moment | None = None


class PriceSet(Answer, frozen=True, kw_only=True):
    """What has changed in the book.

    Attributes:
        price: that was set; None where one was ended.
        ended: prices that end by it, as they were.
        withdrawn: prices that were planned, and are gone.
        is_known: whether the catalogue, or a node, has something of this name.
        currency: of all of them.
    """

    price: PriceView | None
    ended: tuple[PriceView, ...]
    withdrawn: tuple[PriceView, ...]
    is_known: bool
    currency: str


GROUPS_MAX = 10_000
GROUPS_DEFAULT = 1_000
RECORDS_MAX = 2_000
SKUS_MAX = 500


class UsageView(Answer, frozen=True, kw_only=True):
    """A report.

    Attributes:
        by: what it is grouped by.
        from_day: the first day; `until_day` the first that is not in it any more.
        groups: those that cost most; periods in their order.
        totals: of all there are, shown or not, one for each currency.
        is_cut: whether there are more groups.
        going: how many attempts go on, or ended and are not in the ledger yet: computed from what their nodes told.
        is_going_cut: whether there are more of those than were looked at.
    """

    by: tuple[str, ...]
    from_day: int
    until_day: int
    groups: tuple[ReportRow, ...]
    totals: tuple[ReportRow, ...]
    is_cut: bool = False
    going: int = 0
    is_going_cut: bool = False


class RecordPage(Answer, frozen=True, kw_only=True):
    """Some rows of the ledger, in the order in which they were posted.

    Attributes:
        after: what to ask with for those that follow; None where these are the last.
    """

    records: tuple[BillingRow, ...]
    after: int | None = None


class ListPrices(Answer, frozen=True, kw_only=True):
    """The price book as billing tables have it.

    Attributes:
        is_cut: whether more was used than is looked at.
    """

    prices: tuple[ListPrice, ...]
    is_cut: bool = False


class DemandRow(Answer, frozen=True, kw_only=True):
    """What one attempt used on one day (UTC), as it holds now.

    Attributes:
        day: days since 1970-01-01.
        name: of the run.
        owner: whose run it was.
        reserved: whether the pool was.
        start_ns: nanoseconds since 1970; `end_ns` likewise.
        gpus: the most devices lent at once.
        queued_ms: for which the attempt waited; 0 but on its first day.
        gpu_ms: device-milliseconds that count as use; `billed_ms` those that cost something, or would.
        lent_ms: device-milliseconds for which devices were lent, all segments together.
        micros: millionths of the currency unit; None where there is no price.
        used_ms: device-milliseconds of the whole attempt, on each of its days; so are the next three.
        observed_ms: device-milliseconds that telemetry saw; `busy_ms` those in which a device worked.
        peak_memory_bytes: the most of one device; None where that is not known.
    """

    run_id: str
    fence: int
    day: int
    name: str
    owner: str
    team: str
    pool: str
    reserved: bool
    gpu_type: str
    start_ns: int
    end_ns: int
    gpus: int
    queued_ms: int
    gpu_ms: int
    billed_ms: int
    lent_ms: int
    currency: str
    micros: int | None = None
    used_ms: int = 0
    observed_ms: int = 0
    busy_ms: int = 0
    peak_memory_bytes: int | None = None


class DemandPage(Answer, frozen=True, kw_only=True):
    """A page of rows; those of one attempt are in the order of their days.

    Attributes:
        cursor: what the next page is asked for with; "" when there is none.
    """

    rows: tuple[DemandRow, ...]
    cursor: str = ""
