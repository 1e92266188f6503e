"""Routes of `wire/billing.py`: the price book."""

from __future__ import annotations

from typing import Annotated

import msgspec

from serverless_gpu.server.billing.price_service import PriceService
from serverless_gpu.server.http.routing import Call, Query, Routes, reading, writing
from serverless_gpu.wire.base import NAME_CHARACTERS_MAX
from serverless_gpu.wire.billing import Moment, PriceList, PriceRequest, PriceSet

routes = Routes("prices")


class PricesQuery(Query, frozen=True, kw_only=True):
    """Whether prices that have ended are to be there, too."""

    all: bool = False


class EndQuery(Query, frozen=True, kw_only=True):
    """Whose price ends, and when."""

    pool: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    at_ns: Moment | None = None


@routes.get("/prices", needs=reading("prices"))
def list_prices(call: Call, prices: PriceService, query: PricesQuery) -> PriceList:
    """List prices: those in force, and those that are planned."""
    return prices.view(past=query.all)


@routes.put("/prices/{resource}", needs=writing("prices"))
def set_price(call: Call, prices: PriceService, resource: str, body: PriceRequest) -> PriceSet:
    """Set a price from a time on; attempts that were placed before keep theirs."""
    return prices.set(call.who, resource, body)


@routes.delete("/prices/{resource}", needs=writing("prices"))
def end_price(call: Call, prices: PriceService, resource: str, query: EndQuery) -> PriceSet:
    """End a price; what is placed from then on has none, or that of every pool."""
    return prices.end(call.who, resource, pool=query.pool, until_ns=query.at_ns)
