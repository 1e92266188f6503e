"""Defines bodies for billing: budgets, prices, usage reports, and ledger rows.

    GET    /budgets                                   → BudgetList    budgets that the caller may see
    GET    /budgets/{name}                            → BudgetView
    PUT    /budgets/{name}          BudgetRequest     → BudgetView    creates or replaces the budget
    GET    /budgets/{name}/history                    → BudgetHistory reached thresholds of this and earlier periods
    GET    /notices                                   → NoticeList    latest notices of budgets, and alarms
    POST   /budgets/{name}/reopen                     → BudgetView    allows new runs after the budget stopped runs
    DELETE /budgets/{name}                            → BudgetView    the deleted budget

    GET    /prices?all                                → PriceList     in force and planned; `all`: also ended prices
    PUT    /prices/{resource}       PriceRequest      → PriceSet      starts at a given time and ends the previous price
    DELETE /prices/{resource}?pool&at_ns              → PriceSet      the resource has no price from this time on

    GET    /usage?by&from_day&until_day&where&limit   → UsageView     sums by user, team, tag, month …
    GET    /usage/names?from_day&until_day&where      → NameCosts     mean and median cost of runs by name
    GET    /usage/tags                                → TagKeys       keys of tags, for `by` and `where`
    GET    /usage/prices                              → ListPrices    the price list, to join with the records
    GET    /usage/records?after&from_day&until_day&limit              → RecordPage   rows in the form of billing tables
    GET    /usage/demand?from_ns&to_ns&team&pool&gpu_type&limit&cursor → DemandPage  rows that `sgpu advise` reads

A resource is a GPU type, "core" or "memory". The price of a resource applies to one hour of a device, a core or a GiB.
Amounts are in micros, which are millionths of a currency unit or of a DBU. The API numbers UTC days from 1970-01-01.
The parameter `until_day` is the first day after the requested range. Sums omit charges that the caller may not see.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from serverless_gpu.model.billing.billing_rows import BillingRow, ListPrice
from serverless_gpu.model.billing.budget import Period, ScopeKind
from serverless_gpu.model.billing.pricing import MICROS_MAX
from serverless_gpu.model.billing.usage_report import NameCost, ReportRow
from serverless_gpu.wire.base import NAME_CHARACTERS_MAX, Answer, Request


class BudgetView(Answer, frozen=True, kw_only=True):
    """A budget with its limit, usage and forecast.

    Money amounts are in millionths of `currency`. GPU time is in GPU-milliseconds.

    Attributes:
        kind: type of the scope: "everything", "user", "team", "pool", "policy" or "tag".
        scope: name within the type. For a tag, ``key=value``, or ``key`` for each run that has the tag.
        limit_micros: limit in money. A budget has either `limit_micros` or `limit_gpu_ms`.
        hard: True if the server stops runs when the budget is used up. False if running runs may finish and no new run
            starts.
        start_ns: start of the budget period, in nanoseconds since 1970. `end_ns` is the start of the next budget
            period.
        used: usage in the unit of the limit. `held` is the additional reservation of running attempts.
        percent: used percentage of the limit.
        unpriced_ms: device-milliseconds of runs without a price, which do not count toward a budget of money.
        going_on: number of running attempts that count toward the budget.
        forecast: expected usage at the end of the budget period, at the average rate of the last days.
        per_day: usage per day that the forecast assumes.
        reached_ns: time at which the budget is used up at the rate of the forecast. None means after the current budget
            period.
        basis: basis of the forecast as a sentence.
        sentence: state of the budget as a sentence.
        time_zone: time zone of the budget periods.
        closed: True if the server has closed a hard budget and starts no new runs until an operator reopens the budget.
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
    closed: bool = False


class AlarmView(Answer, frozen=True, kw_only=True):
    """An alarm about a user or team that has spent far more than usual.

    Attributes:
        at_ns: time of the alarm, in nanoseconds since 1970.
        subject: object of the alarm: "run <id>" or "team <name>".
        sentence: the observation as a sentence.
    """

    at_ns: int
    subject: str
    sentence: str


class BudgetList(Answer, frozen=True, kw_only=True):
    """All budgets sorted by name, and the alarms of the last seven days, newest first."""

    budgets: tuple[BudgetView, ...]
    alarms: tuple[AlarmView, ...] = ()


class BudgetMark(Answer, frozen=True, kw_only=True):
    """A threshold that a budget has reached.

    Attributes:
        start_ns: start of the budget period, in nanoseconds since 1970.
        percent: threshold in per cent of the limit. 101 means that the server closed a hard budget.
        at_ns: time at which the server noticed the threshold.
    """

    start_ns: int
    percent: int
    at_ns: int


class BudgetHistory(Answer, frozen=True, kw_only=True):
    """The reached thresholds of a budget since its last change, newest first."""

    marks: tuple[BudgetMark, ...]


class NoticeView(Answer, frozen=True, kw_only=True):
    """A notice that the server sends to the webhook, if one is set.

    Attributes:
        at_ns: time of the notice, in nanoseconds since 1970.
        kind: "budget.warning", "budget.reached", "budget.closed" or "spend.alarm".
        subject: name of the budget, or "run <id>" or "team <name>" for an alarm.
        sentence: the notice as a sentence.
        sent: True if the webhook has accepted the notice, or the server has given the notice up.
    """

    at_ns: int
    kind: str
    subject: str
    sentence: str
    sent: bool


class NoticeList(Answer, frozen=True, kw_only=True):
    """The latest notices that the caller may see, newest first."""

    notices: tuple[NoticeView, ...]


class BudgetRequest(Request, frozen=True, kw_only=True):
    """Create or replace a budget with exactly one limit. Money limits are in the server's currency."""

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
    """One row of the price list.

    Attributes:
        resource: a GPU type, a family of GPU types, "core" or "memory".
        pool: pool of the price, or "" for every pool without its own price.
        micros_per_hour: price per hour of one device, core or GiB.
        dbu_micros_per_hour: DBUs per hour of one device for a price in DBUs, else 0.
        from_ns: start of the price, in nanoseconds since 1970. `until_ns` is the end of the price, or None for an open
            end.
        set_ns: time at which an operator set the price.
        in_force: True if the price is in force now.
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
    """The price list, sorted by resource, pool and time.

    Attributes:
        currency: currency of all prices.
    """

    prices: tuple[PriceView, ...]
    currency: str


class PriceRequest(Request, frozen=True, kw_only=True):
    """Set a price per hour, or a number of DBUs per hour and a price per DBU.

    Attributes:
        micros_per_hour: price per hour of one device, core or GiB.
        dbu_micros_per_hour: DBUs per hour of one device. `micros_per_dbu` is the price of one DBU.
        pool: pool of the price, or "" for every pool without its own price.
        from_ns: start of the price. None means now. The server accepts a past time only if the price applies to no run
            that was placed since then.
    """

    micros_per_hour: Micros | None = None
    dbu_micros_per_hour: Micros | None = None
    micros_per_dbu: Micros | None = None
    pool: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    from_ns: Moment | None = None


class PriceSet(Answer, frozen=True, kw_only=True):
    """The changes of the price list after a request.

    Attributes:
        price: the new price, or None if the request ended a price.
        ended: prices that the request ends, in their state before the request.
        withdrawn: planned prices that the request removes.
        is_known: True if the catalogue or a node has a resource of this name.
        currency: currency of all prices.
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
TAG_KEYS_MAX = 200
NAMES_MAX = 500
NAME_ENTRIES_MAX = 5_000
"""Maximum number of ledger entries from which the server computes the costs of runs by name."""


class UsageView(Answer, frozen=True, kw_only=True):
    """A report of the usage and cost of each group.

    Attributes:
        by: grouping of the report.
        from_day: first day of the report. `until_day` is the first day after the end of the report.
        groups: groups with the highest cost, or periods in chronological order.
        totals: sums of all groups, including omitted groups, with one row per currency.
        is_cut: True if the report omits some groups.
        going: number of attempts that are running or not in the ledger yet. The server computes the usage of these
            attempts from reports of nodes.
        is_going_cut: True if the report omits some attempts that are running or not in the ledger yet.
    """

    by: tuple[str, ...]
    from_day: int
    until_day: int
    groups: tuple[ReportRow, ...]
    totals: tuple[ReportRow, ...]
    is_cut: bool = False
    going: int = 0
    is_going_cut: bool = False


class NameCosts(Answer, frozen=True, kw_only=True):
    """Unit economics of runs by name, starting with the highest total cost.

    Attributes:
        from_day: first day of the report. `until_day` is the first day after the end of the report.
        is_cut: True if the report covers only `NAME_ENTRIES_MAX` ledger entries of the latest of these days.
    """

    from_day: int
    until_day: int
    names: tuple[NameCost, ...]
    is_cut: bool = False


class TagKeys(Answer, frozen=True, kw_only=True):
    """The keys of tags in alphabetical order.

    Attributes:
        is_cut: True if the list omits some keys.
    """

    keys: tuple[str, ...]
    is_cut: bool = False


class RecordPage(Answer, frozen=True, kw_only=True):
    """A page of ledger rows in posting order.

    Attributes:
        after: value of `after` for the next page, or None on the last page.
    """

    records: tuple[BillingRow, ...]
    after: int | None = None


class ListPrices(Answer, frozen=True, kw_only=True):
    """The price list in the format of billing tables.

    Attributes:
        is_cut: True if the list omits some used resources.
    """

    prices: tuple[ListPrice, ...]
    is_cut: bool = False


class DemandRow(Answer, frozen=True, kw_only=True):
    """The usage of one attempt on one UTC day.

    Attributes:
        day: days since 1970-01-01.
        name: name of the run.
        owner: owner of the run.
        reserved: True if the pool was reserved.
        start_ns: start of the usage in nanoseconds since 1970. `end_ns` is the end of the usage.
        gpus: maximum number of devices that the attempt had at the same time.
        queued_ms: waiting time of the attempt in milliseconds. Only the first day of an attempt has a value above 0.
        gpu_ms: device-milliseconds of usage. `billed_ms` counts the device-milliseconds with a price.
        lent_ms: device-milliseconds of lent devices, summed over all segments.
        micros: cost in millionths of the currency unit, or None without a price.
        used_ms: device-milliseconds of the whole attempt, repeated on each of its days, like the next three fields.
        observed_ms: device-milliseconds with telemetry. `busy_ms` counts device-milliseconds of busy devices.
        peak_memory_bytes: maximum memory of one device, or None if unknown.
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
    """A page of demand rows, sorted by day for each attempt.

    Attributes:
        cursor: cursor of the next page, or "" on the last page.
    """

    rows: tuple[DemandRow, ...]
    cursor: str = ""
