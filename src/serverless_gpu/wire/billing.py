"""Budgets: limits of use per day, week or month, and their use.

GET    /budgets                          → BudgetList    as far as the caller may see it
GET    /budgets/{name}                   → BudgetView
PUT    /budgets/{name}   BudgetRequest   → BudgetView    made, or put in the place of another
POST   /budgets/{name}/reopen            → BudgetView    one that has stopped runs lets others start again
DELETE /budgets/{name}                   → BudgetView    as it was

Prices: what a device, a core or a GiB of memory costs for one hour, since when, and in which pool.

    GET    /prices?all                                → PriceList     in force and planned; `all`: those that ended, too
    PUT    /prices/{resource}       PriceRequest      → PriceSet      from a time on; the one before ends there
    DELETE /prices/{resource}?pool&at_ns              → PriceSet      from then on it has no price

A resource is a GPU type, "core" or "memory". Amounts are micros: millionths of the currency unit, or of a DBU.

Use and what it cost: sums of the ledger, and its rows.

GET /usage?by=&from_day=&until_day=&where=&limit=       → UsageView    sums by user, team, tag, month …
GET /usage/prices                                       → ListPrices   the price book, to join those with
GET /usage/records?after=&from_day=&until_day=&limit=   → RecordPage   rows, as billing tables have them
GET /usage/demand                                       → `demand.py`  when GPUs were had

Days are of UTC, numbered from 1970-01-01; `until_day` is the first that is not among them. What somebody may not see is
in no sum.

When GPUs were had, and by whom: rows of the ledger as `sgpu advise` reads them.

GET    /usage/demand?from_ns&to_ns&team&pool&gpu_type&limit&cursor   → DemandPage
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
    """A budget, and how it stands now. Money is millionths of `currency`, GPU time is GPU-milliseconds."""

    name: str
    kind: ScopeKind  # whose use counts: "everything", "user", "team", "pool", "policy", "tag"
    scope: str  # their name; of a tag ``key=value``, or ``key`` for each run that has it
    period: Period
    currency: str
    limit_micros: int | None  # exactly one of the two limits is there; `limit_gpu_ms` the other
    limit_gpu_ms: int | None
    hard: bool  # whether runs are stopped when it is used up; else they finish, and nothing new starts
    start_ns: int  # when its period began, nanoseconds since 1970; `end_ns` when the next one begins
    end_ns: int
    used: int  # in the unit of the limit; `held` what goes on holds beside that
    held: int
    percent: float  # of the limit that is used
    unpriced_ms: int  # device-milliseconds of its runs that have no price, and count nothing for a budget of money
    going_on: int  # how many attempts count for it now
    forecast: int  # what will be used at the end of the period at the rate of the last days
    per_day: int  # that rate
    reached_ns: int | None  # when it is used up at that rate; None: not in this period
    basis: str  # what the forecast rests on, in words
    sentence: str  # how it stands, in words
    time_zone: str = "UTC"  # of its periods


class AlarmView(Answer, frozen=True, kw_only=True):
    """Somebody who spent far more than they are used to."""

    at_ns: int  # when that was seen, nanoseconds since 1970
    subject: str  # who: "run <id>" or "team <name>"
    sentence: str  # what was seen


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
    """One row of the price book."""

    resource: str  # a GPU type, or a family of them; "core", "memory"
    pool: str  # where it holds; "" for every pool that has none of its own
    micros_per_hour: int  # of one device, core or GiB
    dbu_micros_per_hour: int  # DBUs of one device, where the price is made of those; else 0
    from_ns: int  # since when, nanoseconds since 1970; `until_ns` until when, None for as long as nothing else is said
    until_ns: int | None
    set_ns: int  # when that was written
    in_force: bool  # whether it holds now


class PriceList(Answer, frozen=True, kw_only=True):
    """The price book, by resource, pool and time."""

    prices: tuple[PriceView, ...]
    currency: str  # of all of them


class PriceRequest(Request, frozen=True, kw_only=True):
    """Set a price: either so much for one hour, or so many DBUs at so much each."""

    micros_per_hour: Micros | None = None  # of one device, core or GiB
    dbu_micros_per_hour: Micros | None = None  # DBUs of one device; `micros_per_dbu` what one DBU costs
    micros_per_dbu: Micros | None = None
    # "" for every pool that has none of its own
    pool: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    # from when on; None for now. The past only as long as nothing was placed since that could have paid it.
    from_ns: Moment | None = None


class PriceSet(Answer, frozen=True, kw_only=True):
    """What has changed in the book."""

    price: PriceView | None  # that was set; None where one was ended
    ended: tuple[PriceView, ...]  # prices that end by it, as they were
    withdrawn: tuple[PriceView, ...]  # prices that were planned, and are gone
    is_known: bool  # whether the catalogue, or a node, has something of this name
    currency: str  # of all of them


GROUPS_MAX = 10_000
GROUPS_DEFAULT = 1_000
RECORDS_MAX = 2_000
SKUS_MAX = 500


class UsageView(Answer, frozen=True, kw_only=True):
    """A report."""

    by: tuple[str, ...]  # what it is grouped by
    from_day: int  # the first day; `until_day` the first that is not in it any more
    until_day: int
    groups: tuple[ReportRow, ...]  # those that cost most; periods in their order
    totals: tuple[ReportRow, ...]  # of all there are, shown or not, one for each currency
    is_cut: bool = False  # whether there are more groups
    # how many attempts go on, or ended and are not in the ledger yet: computed from what their nodes told
    going: int = 0
    is_going_cut: bool = False  # whether there are more of those than were looked at


class RecordPage(Answer, frozen=True, kw_only=True):
    """Some rows of the ledger, in the order in which they were posted."""

    records: tuple[BillingRow, ...]
    after: int | None = None  # what to ask with for those that follow; None where these are the last


class ListPrices(Answer, frozen=True, kw_only=True):
    """The price book as billing tables have it."""

    prices: tuple[ListPrice, ...]
    is_cut: bool = False  # whether more was used than is looked at


class DemandRow(Answer, frozen=True, kw_only=True):
    """What one attempt used on one day (UTC), as it holds now."""

    run_id: str
    fence: int
    day: int  # days since 1970-01-01
    name: str  # of the run
    owner: str  # whose run it was
    team: str
    pool: str
    reserved: bool  # whether the pool was
    gpu_type: str
    start_ns: int  # nanoseconds since 1970; `end_ns` likewise
    end_ns: int
    gpus: int  # the most devices lent at once
    queued_ms: int  # for which the attempt waited; 0 but on its first day
    gpu_ms: int  # device-milliseconds that count as use; `billed_ms` those that cost something, or would
    billed_ms: int
    lent_ms: int  # device-milliseconds for which devices were lent, all segments together
    currency: str
    micros: int | None = None  # millionths of the currency unit; None where there is no price
    used_ms: int = 0  # device-milliseconds of the whole attempt, on each of its days; so are the next three
    observed_ms: int = 0  # device-milliseconds that telemetry saw; `busy_ms` those in which a device worked
    busy_ms: int = 0
    peak_memory_bytes: int | None = None  # the most of one device; None where that is not known


class DemandPage(Answer, frozen=True, kw_only=True):
    """A page of rows; those of one attempt are in the order of their days."""

    rows: tuple[DemandRow, ...]
    cursor: str = ""  # what the next page is asked for with; "" when there is none
