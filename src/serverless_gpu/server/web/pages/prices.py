"""Shows the price book with planned changes and earlier prices, and sets and ends prices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from serverless_gpu.ambient import format_utc
from serverless_gpu.errors import InvalidValue, ServerlessGpuError
from serverless_gpu.model.billing.billing_rows import ListPrice
from serverless_gpu.model.billing.usage_table import text_cells
from serverless_gpu.model.calendars import DAY_NS, format_day
from serverless_gpu.server.billing import price_service, usage_reports
from serverless_gpu.server.billing.price_service import EndQuery, PricesQuery
from serverless_gpu.server.http.routing import FORM_BYTES_MAX, Call, Form, Query, Routes, reading, writing
from serverless_gpu.server.web import form_values, stacked_chart
from serverless_gpu.server.web.downloads import CSV, Download, csv_pieces
from serverless_gpu.server.web.list_pages import page_of
from serverless_gpu.server.web.site import WEB, Page, Redirect, Site
from serverless_gpu.server.web.stacked_chart import Step
from serverless_gpu.units import MICROS_PER_UNIT
from serverless_gpu.wire.base import LABEL_CHARACTERS_MAX, NAME_CHARACTERS_MAX
from serverless_gpu.wire.billing import Moment, PriceRequest, PriceView

routes = Routes("price-pages", mount=WEB)
CHARTS_MAX = 30
CHART_HEIGHT = 48
_AHEAD_NS = 30 * DAY_NS
_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]
_Amount = Annotated[str, msgspec.Meta(max_length=40)]


class PricesPageQuery(Query, frozen=True, kw_only=True):
    """Choice of the list. `all` includes prices that have ended. `after` is the cursor of the page before."""

    all: bool = False
    after: Annotated[str, msgspec.Meta(max_length=400)] = ""


class PriceForm(Form, frozen=True, kw_only=True):
    """A price as a person types it: an amount per hour, or DBUs per hour and the price of a DBU."""

    resource: Annotated[str, msgspec.Meta(max_length=LABEL_CHARACTERS_MAX)] = ""
    pool: _Name = ""
    amount: _Amount = ""
    dbus: _Amount = ""
    per_dbu: _Amount = ""
    since: _Amount = ""

    def request(self) -> PriceRequest:
        """Return the request to the API."""
        if not self.resource.strip():
            raise InvalidValue("the price has no resource", hint="write a GPU type, core or memory")
        return PriceRequest(
            micros_per_hour=_amount("price", self.amount),
            dbu_micros_per_hour=_amount("DBUs per hour", self.dbus),
            micros_per_dbu=_amount("price of a DBU", self.per_dbu),
            pool=self.pool.strip(),
            from_ns=form_values.moment_ns("start", self.since),
        )


class EndForm(Form, frozen=True, kw_only=True):
    """The end of a price: a typed time, the exact start of a planned price, or now."""

    resource: Annotated[str, msgspec.Meta(max_length=LABEL_CHARACTERS_MAX)]
    pool: _Name = ""
    at: _Amount = ""
    at_ns: Moment | None = None


class Tariff(NamedTuple):
    """The prices of one resource in one pool over time."""

    resource: str
    pool: str
    steps: tuple[Step, ...]
    labels: tuple[str, ...]
    planned: tuple[bool, ...]
    first_day: str
    last_day: str


@routes.get("/prices", needs=reading("prices"))
def show_prices(call: Call, site: Site, query: PricesPageQuery) -> Page:
    """List prices."""
    return _page(call, site, PriceForm(), query)


@routes.post("/prices", needs=writing("prices"), limit=FORM_BYTES_MAX)
def set_price(call: Call, site: Site, body: PriceForm) -> Page | Redirect:
    """Set a price from now on, or from a later time."""
    try:
        done = site.ask(call, price_service.set_price, resource=body.resource, body=body.request())
    except ServerlessGpuError as problem:
        return form_values.with_problem(_page(call, site, body), problem)
    if not done.is_known:
        notice = f"Neither the GPU catalogue nor any node has a GPU named {body.resource}. The price is set."
        page = _page(call, site, PriceForm())
        return msgspec.structs.replace(page, values={**page.values, "notice": notice})
    return Redirect(path="/prices")


@routes.post("/prices/end", needs=writing("prices"), limit=FORM_BYTES_MAX)
def end_price(call: Call, site: Site, body: EndForm) -> Page | Redirect:
    """End a price now, or at a later time. This also withdraws planned prices from that time on."""
    try:
        query = EndQuery(pool=body.pool, at_ns=form_values.moment_ns("end", body.at) if body.at else body.at_ns)
        site.ask(call, price_service.end_price, resource=body.resource, query=query)
    except ServerlessGpuError as problem:
        return form_values.with_problem(_page(call, site, PriceForm()), problem)
    return Redirect(path="/prices")


@routes.get("/prices/records.csv", needs=reading("prices"))
def download_prices(call: Call, site: Site) -> Download:
    """Return the price book as CSV, with the columns of `sgpu price list --records`."""
    found = site.ask(call, usage_reports.view_prices)
    content = csv_pieces(ListPrice.__struct_fields__, (text_cells(price) for price in found.prices))
    return Download(name="prices.csv", media_type=CSV, content=content)


def _page(call: Call, site: Site, form: PriceForm, query: PricesPageQuery = PricesPageQuery()) -> Page:  # noqa: B008 - it cannot change
    every = site.ask(call, price_service.list_prices, query=PricesQuery(all=True))
    now_ns = call.clock.wall_ns()
    prices = [one for one in every.prices if query.all or one.until_ns is None or one.until_ns > now_ns]
    return site.page(
        call,
        "prices.html",
        title="Prices",
        nav="prices",
        page=page_of(prices, lambda one: f"{one.from_ns}.{one.pool}.{one.resource}", query.after),
        past=query.all,
        after=query.after,
        tariffs=tariffs(every.prices, now_ns, every.currency)[:CHARTS_MAX],
        form=form,
        decimal=decimal,
        unit=unit,
        problem=None,
    )


def tariffs(prices: Sequence[PriceView], now_ns: int, currency: str) -> list[Tariff]:
    """Return the prices over time of resources with more than one price."""
    named: dict[tuple[str, str], list[PriceView]] = {}
    for one in prices:
        named.setdefault((one.resource, one.pool), []).append(one)
    found: list[Tariff] = []
    for (resource, pool), rows in named.items():
        if len(rows) < 2:
            continue
        rows = sorted(rows, key=lambda one: one.from_ns)
        from_ns = max(rows[0].from_ns, rows[0].set_ns)  # A price without a start has held since the server's first day.
        until_ns = max(now_ns, rows[-1].from_ns, rows[-1].until_ns or 0) + _AHEAD_NS
        periods = [(one.from_ns, one.until_ns, one.micros_per_hour) for one in rows]
        labels = tuple(
            f"{decimal(one.micros_per_hour)} {currency} per {unit(resource)} and hour, from {format_utc(one.from_ns)}"
            + (f" until {format_utc(one.until_ns)}" if one.until_ns is not None else "")
            for one in rows
        )
        steps = stacked_chart.steps(periods, from_ns=from_ns, until_ns=until_ns, height=CHART_HEIGHT)
        planned = tuple(one.from_ns > now_ns for one in rows)
        days = (format_day(from_ns // DAY_NS), format_day(until_ns // DAY_NS))
        found.append(Tariff(resource, pool, steps, labels, planned, *days))
    return found


def unit(resource: str) -> str:
    """Return the thing that costs the price of a resource."""
    return {"core": "core", "memory": "GiB"}.get(resource, "device")


def decimal(micros: int) -> str:
    """Return an amount in millionths as a decimal number with at least two decimal places."""
    whole, rest = divmod(micros, MICROS_PER_UNIT)
    return f"{whole:,}.{f'{rest:06d}'.rstrip('0').ljust(2, '0')}"


def _amount(what: str, text: str) -> int | None:
    return form_values.amount(what, text) if text.strip() else None
