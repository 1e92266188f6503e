"""Prices: what a device, a core or a GiB of memory costs for one hour, since when, and in which pool.

    GET    /prices?all                                → PriceList     in force and planned; `all`: those that ended, too
    PUT    /prices/{resource}       PriceRequest      → PriceSet      from a time on; the one before ends there
    DELETE /prices/{resource}?pool&at_ns              → PriceSet      from then on it has no price

A resource is a GPU type, "core" or "memory". Amounts are micros: millionths of the currency unit, or of a DBU.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from serverless_gpu.model.billing.pricing import MICROS_MAX
from serverless_gpu.wire.base import NAME_CHARACTERS_MAX, Answer, Request

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
