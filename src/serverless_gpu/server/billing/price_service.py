"""Lists, sets and ends prices in the price book, and defines the price routes.

    set H100 2.99 from F      … ─ 3.49 ─┤F├─ 2.99 ─ …      the price in force at F ends at F
                                                            a price planned for later ends the new price
                                                            a price planned for F itself is replaced
    end H100 at F             … ─ 3.49 ─┤F                  prices planned for later are withdrawn

A price that was in force never changes, because tariffs of attempts refer to the price. An operator can backdate a
price only if the server has placed no attempt for this price since the start time. Each change adds an audit entry.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, NotFound
from serverless_gpu.model.billing.pricing import CORE, MEMORY, MICROS_MAX, Price, check_book, is_in_force, of_dbus
from serverless_gpu.model.hardware import FAMILIES, canonical, is_listed
from serverless_gpu.server import pools
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Query, Routes, reading, writing
from serverless_gpu.server.records import attempts, audit, charges, nodes, prices
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.prices import StoredPrice
from serverless_gpu.units import MICROS_PER_UNIT
from serverless_gpu.wire.base import LABEL_CHARACTERS_MAX, NAME_CHARACTERS_MAX
from serverless_gpu.wire.billing import Moment, PriceList, PriceRequest, PriceSet, PriceView

PRICES_MAX = 5_000
"""The maximum number of rows in the price book, including ended prices."""


class PriceService:
    """Lists, sets and ends prices."""

    def __init__(self, *, settings: Settings, clock: Clock, database: Transactions) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database

    def view(self, *, past: bool = False) -> PriceList:
        """Return the price book."""
        at_ns = self._clock.wall_ns()
        found = self._database.read(lambda connection: prices.every(connection, from_ns=0 if past else at_ns))
        return PriceList(prices=_views(found, at_ns), currency=self._settings.currency)

    def set(self, who: Caller, resource: str, asked: PriceRequest) -> PriceSet:
        """Set a price that applies from a given time. Earlier attempts keep their price.

        `resource` is a GPU type in any spelling, "core" or "memory". A start time in the past is valid only if the
        server has placed no attempt since that time.
        """
        at_ns = self._clock.wall_ns()
        name = _name(resource)
        micros, dbu_micros = _amount(name, asked)
        from_ns = at_ns if asked.from_ns is None else asked.from_ns

        def work(connection: sa.Connection) -> PriceSet:
            if asked.pool:
                pools.find_pool(connection, asked.pool)
            _refuse_past(connection, name, from_ns, at_ns)
            own = prices.of(connection, name, asked.pool)
            replaced = [one for one in own if one.price.from_ns == from_ns]
            ended = [one for one in own if _is_before(one, from_ns)]
            later = min((one.price.from_ns for one in own if one.price.from_ns > from_ns), default=None)
            price = Price(
                resource=name,
                pool=asked.pool,
                micros_per_hour=micros,
                dbu_micros_per_hour=dbu_micros,
                from_ns=from_ns,
                until_ns=later,
            )
            _take_back(connection, replaced)
            if prices.count(connection) >= PRICES_MAX:
                raise InvalidValue(f"the price book already has {PRICES_MAX} rows, the maximum")
            _end(connection, ended, from_ns)
            prices.insert(connection, price, at_ns=at_ns)
            check_book([one.price for one in prices.of(connection, name, asked.pool)])
            detail = {
                "micros_per_hour": micros,
                "dbu_micros_per_hour": dbu_micros,
                "pool": asked.pool,
                "from_ns": from_ns,
            }
            audit.record(connection, who=who, action=Action.PRICE_SET, subject=name, now_ns=at_ns, detail=detail)
            is_known = name in (CORE, MEMORY, *FAMILIES) or is_listed(name)
            is_known = is_known or any(
                device.type == name for node in nodes.every(connection) for device in node.hello.devices
            )
            return PriceSet(
                price=_view(StoredPrice(price=price, set_ns=at_ns), at_ns),
                ended=_views(ended, at_ns),
                withdrawn=_views(replaced, at_ns),
                is_known=is_known,
                currency=self._settings.currency,
            )

        return self._database.write(work)

    def end(self, who: Caller, resource: str, *, pool: str = "", until_ns: int | None = None) -> PriceSet:
        """End a price. Later attempts use the price for all pools, or have no price."""
        at_ns = self._clock.wall_ns()
        name = _name(resource)
        when_ns = at_ns if until_ns is None else until_ns

        def work(connection: sa.Connection) -> PriceSet:
            _refuse_past(connection, name, when_ns, at_ns)
            own = prices.of(connection, name, pool)
            ended = [one for one in own if _is_before(one, when_ns)]
            withdrawn = [one for one in own if one.price.from_ns >= when_ns]
            if not ended and not withdrawn:
                where = f" in pool {pool!r}" if pool else ""
                raise NotFound(f"{name[:64]!r} has no price{where}", hint="list all prices: sgpu price list")
            _take_back(connection, withdrawn)
            _end(connection, ended, when_ns)
            detail = {"pool": pool, "until_ns": when_ns, "withdrawn": len(withdrawn)}
            audit.record(connection, who=who, action=Action.PRICE_END, subject=name, now_ns=at_ns, detail=detail)
            return PriceSet(
                price=None,
                ended=_views(ended, at_ns),
                withdrawn=_views(withdrawn, at_ns),
                is_known=True,
                currency=self._settings.currency,
            )

        return self._database.write(work)


def _name(resource: str) -> str:
    """Return the name of a resource in the spelling of the catalogue."""
    written = resource.strip()
    if not 0 < len(written) <= LABEL_CHARACTERS_MAX or not written.isprintable():
        raise InvalidValue(f"{resource[:64]!r} is not a valid resource name", hint="use a GPU type, core or memory")
    return written.casefold() if written.casefold() in (CORE, MEMORY) else canonical(written)


def _amount(name: str, asked: PriceRequest) -> tuple[int, int]:
    """Return the price per device-hour, and the DBUs per device-hour."""
    hint = "specify either a price per hour, or DBUs per hour and the price of one DBU"
    made = (asked.dbu_micros_per_hour, asked.micros_per_dbu)
    if asked.micros_per_hour is not None:
        if made != (None, None):
            raise InvalidValue(f"the request contains two prices for {name}", hint=hint)
        return asked.micros_per_hour, 0
    if asked.dbu_micros_per_hour is None or asked.micros_per_dbu is None:
        raise InvalidValue(f"the request contains no price for {name}", hint=hint)
    if name in (CORE, MEMORY):
        raise InvalidValue(f"{name} cannot have a price in DBUs, because DBUs count devices", hint=hint)
    micros = of_dbus(asked.dbu_micros_per_hour, asked.micros_per_dbu)
    if micros > MICROS_MAX:
        raise InvalidValue(f"the price of {name} would be over {MICROS_MAX // MICROS_PER_UNIT} per hour")
    return micros, asked.dbu_micros_per_hour


def _refuse_past(connection: sa.Connection, name: str, from_ns: int, at_ns: int) -> None:
    if from_ns >= at_ns:
        return
    types = None if name in (CORE, MEMORY) else [name, *FAMILIES.get(name, ())]
    if attempts.is_any_since(connection, from_ns, types) or charges.is_any_since(connection, from_ns, types):
        raise InvalidValue(
            f"the price of {name} cannot change in the past, because attempts since then already have a price",
            hint="set the price from now on, or from a future time",
        )


def _is_before(row: StoredPrice, at_ns: int) -> bool:
    """Return True if a price began before a time and is still in force at that time."""
    return row.price.from_ns < at_ns and is_in_force(row.price, at_ns)


def _take_back(connection: sa.Connection, rows: list[StoredPrice]) -> None:
    for row in rows:
        prices.remove(connection, row.price)


def _end(connection: sa.Connection, rows: list[StoredPrice], until_ns: int) -> None:
    for row in rows:
        prices.end(connection, row.price, until_ns=until_ns)


def _views(rows: list[StoredPrice], at_ns: int) -> tuple[PriceView, ...]:
    return tuple(_view(row, at_ns) for row in rows)


def _view(row: StoredPrice, at_ns: int) -> PriceView:
    price = row.price
    return PriceView(
        resource=price.resource,
        pool=price.pool,
        micros_per_hour=price.micros_per_hour,
        dbu_micros_per_hour=price.dbu_micros_per_hour,
        from_ns=price.from_ns,
        until_ns=price.until_ns,
        set_ns=row.set_ns,
        in_force=is_in_force(price, at_ns),
    )


routes = Routes("prices")


class PricesQuery(Query, frozen=True, kw_only=True):
    """Parameters of the price list. `all` includes prices that have ended."""

    all: bool = False


class EndQuery(Query, frozen=True, kw_only=True):
    """Parameters of a request that ends a price: pool and end time."""

    pool: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    at_ns: Moment | None = None


@routes.get("/prices", needs=reading("prices"))
def list_prices(call: Call, prices: PriceService, query: PricesQuery) -> PriceList:
    """List the current prices and the planned prices."""
    return prices.view(past=query.all)


@routes.put("/prices/{resource}", needs=writing("prices"))
def set_price(call: Call, prices: PriceService, resource: str, body: PriceRequest) -> PriceSet:
    """Set a price that applies from a given time. Earlier attempts keep their price."""
    return prices.set(call.who, resource, body)


@routes.delete("/prices/{resource}", needs=writing("prices"))
def end_price(call: Call, prices: PriceService, resource: str, query: EndQuery) -> PriceSet:
    """End a price. Later attempts use the price for all pools, or have no price."""
    return prices.end(call.who, resource, pool=query.pool, until_ns=query.at_ns)
