"""Prices: what a device, a core or a GiB of memory costs for one hour, since when, and in which pool.

    price book ── in force when the devices were reserved ─▶ tariff of the attempt ── × what it used ─▶ micros

A price that is not there is not invented: the time counts, and is unpriced. An attempt keeps the tariff it began with,
so a price that changes later changes no charge. Money is integers; a cost is rounded up once for an attempt as a whole.

A GPU type's price is that of one device. A CPU slot is a device of the type ``CPU``, and its core is not charged again.
Cores and memory are charged where an attempt was given a limit of them (`cpus=`, `memory=`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from serverless_gpu import units
from serverless_gpu.errors import InvalidOption, InvalidValue
from serverless_gpu.model.hardware import FAMILIES, canonical

CORE = "core"
MEMORY = "memory"
"""What has a price beside GPU types: one core, and one GiB (2^30 bytes) of host memory."""
_PRICE_MAX_PER_GPU_HOUR = 1_000_000

_PRICE_HINT = 'write the price of one GPU for one hour in USD, for example {"H100": 2.99}'


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the price book.

    Attributes:
        resource: a GPU type, `CORE` or `MEMORY`.
        pool: where it holds; "" for every pool that has none of its own.
        micros_per_hour: millionths of the currency unit for one of it.
        from_ns: since when it is in force, nanoseconds since 1970; `until_ns` until when, None for as long as no
            later one begins.
        dbu_micros_per_hour: millionths of a DBU for one of it, where prices are made of those; else 0.
    """

    resource: str
    micros_per_hour: int
    pool: str = ""
    from_ns: int = 0
    until_ns: int | None = None
    dbu_micros_per_hour: int = 0


class Tariff(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt pays, as it was in force when its devices were reserved; None is "unpriced", which is not 0.

    Attributes:
        gpu_micros_per_hour: for one device; likewise of one core and of one GiB of host memory.
        dbu_micros_per_hour: millionths of a DBU for one device.
        currency: of all of them.
    """

    gpu_micros_per_hour: int | None = None
    core_micros_per_hour: int | None = None
    memory_micros_per_hour: int | None = None
    dbu_micros_per_hour: int = 0
    currency: str = "USD"


UNPRICED = Tariff()


def parse_prices(table: Mapping[str, float]) -> dict[str, Tariff]:
    """Return prices by type name.

    A price for a family holds for each member that has none of its own. Names that no catalogue knows are kept: cards
    with own or product names have prices too.

    Args:
        table: USD per GPU-hour by type name, in any spelling.

    Raises:
        InvalidOption: a price is not a number.
        InvalidValue: a price is negative, not finite or absurd, or a type is priced twice.
    """
    prices: dict[str, Tariff] = {}
    for written, amount in table.items():
        name = canonical(written)
        if name in prices:
            raise InvalidValue(f"the price of {name} is given twice", hint=_PRICE_HINT)
        prices[name] = Tariff(gpu_micros_per_hour=_price_micros(name, amount))
    for family, members in FAMILIES.items():
        if family in prices:
            for member in members:
                prices.setdefault(member, prices[family])
    return prices


def _price_micros(name: str, amount: float) -> int:
    # bool is an int to Python, and True USD is a mistake.
    if isinstance(amount, bool) or not isinstance(amount, int | float):
        raise InvalidOption(f"the price of {name} is {amount!r}, not a number", hint=_PRICE_HINT)
    if not math.isfinite(amount) or not 0 <= amount <= _PRICE_MAX_PER_GPU_HOUR:
        raise InvalidValue(
            f"the price of {name} is {amount!r}, not between 0 and {_PRICE_MAX_PER_GPU_HOUR}", hint=_PRICE_HINT
        )
    return round(amount * units.MICROS_PER_UNIT)
