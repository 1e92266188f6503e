"""Repository of the price book (`model/billing/pricing.py`).

The server may end a price that was in force, but never changes the price's amount.
"""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.billing import pricing
from serverless_gpu.model.billing.pricing import CORE, MEMORY, Price, Tariff
from serverless_gpu.model.hardware import families_of
from serverless_gpu.server.db.tables import prices

_OF_PRICE = Price.__struct_fields__


class StoredPrice(msgspec.Struct, frozen=True, kw_only=True):
    """Stored price, with the time at which the server stored it."""

    price: Price
    set_ns: int


def every(connection: sa.Connection, *, from_ns: int = 0) -> list[StoredPrice]:
    """Return the prices that apply at a time or later, ordered by resource, pool and time."""
    lasting = sa.or_(prices.c.until_ns.is_(None), prices.c.until_ns > from_ns)
    query = sa.select(prices).where(lasting)
    return _read(connection, query.order_by(prices.c.resource, prices.c.pool, prices.c.from_ns))


def of(connection: sa.Connection, resource: str, pool: str) -> list[StoredPrice]:
    """Return all prices of one resource in one pool, by time."""
    own = sa.and_(prices.c.resource == resource, prices.c.pool == pool)
    return _read(connection, sa.select(prices).where(own).order_by(prices.c.from_ns))


def count(connection: sa.Connection) -> int:
    """Return the number of rows in the price book."""
    return connection.scalar(sa.select(sa.func.count()).select_from(prices)) or 0


def tariff(connection: sa.Connection, gpu_type: str, pool: str, at_ns: int, currency: str) -> Tariff:
    """Return the prices for an attempt that is placed at a given time."""
    wanted = sa.and_(
        prices.c.resource.in_([gpu_type, *families_of(gpu_type), CORE, MEMORY]),
        prices.c.pool.in_(["", pool]),
        prices.c.from_ns <= at_ns,
        sa.or_(prices.c.until_ns.is_(None), prices.c.until_ns > at_ns),
    )
    rows = [one.price for one in _read(connection, sa.select(prices).where(wanted))]
    return pricing.tariff(rows, gpu_type=gpu_type, pool=pool, at_ns=at_ns, currency=currency)


def insert(connection: sa.Connection, price: Price, *, at_ns: int) -> None:
    """Insert a row into the price book."""
    connection.execute(prices.insert(), msgspec.structs.asdict(price) | {"set_ns": at_ns})


def end(connection: sa.Connection, price: Price, *, until_ns: int) -> None:
    """Set the end of a price."""
    connection.execute(prices.update().where(_is(price)).values(until_ns=until_ns))


def remove(connection: sa.Connection, price: Price) -> None:
    """Delete a price that was never in force."""
    connection.execute(prices.delete().where(_is(price)))


def _read(connection: sa.Connection, query: sa.Select[tuple[object, ...]]) -> list[StoredPrice]:
    rows = connection.execute(query).mappings()
    return [StoredPrice(price=Price(**{name: row[name] for name in _OF_PRICE}), set_ns=row["set_ns"]) for row in rows]


def _is(price: Price) -> sa.ColumnElement[bool]:
    return sa.and_(prices.c.resource == price.resource, prices.c.pool == price.pool, prices.c.from_ns == price.from_ns)
