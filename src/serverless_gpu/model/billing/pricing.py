"""Prices per hour for a device, a core or a GiB of memory, by start date and pool.

    price book ── price in force when the devices were reserved ─▶ tariff of the attempt ── × its use ─▶ micros

Device usage without a price counts as unpriced time, because billing never guesses a price. A later price change does
not affect an attempt's charge, because the attempt keeps its tariff. Money is an integer number of micros (millionths
of the currency unit). Billing rounds the total cost of an attempt up once.

A device type without a price is unpriced even if cores have a price. Every displayed cost is therefore complete.

The price of a GPU type is the price of one device. A CPU slot is a device of type ``CPU``. The server does not charge
the slot's core a second time. The server charges for cores and memory if an attempt limits them (`cpus=`, `memory=`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise

import msgspec

from serverless_gpu import units
from serverless_gpu.errors import InvalidOption, InvalidValue
from serverless_gpu.model.hardware import CPU, FAMILIES, canonical, families_of

CORE = "core"
MEMORY = "memory"
"""Priced resources besides GPU types: cores, and GiB (2^30 bytes) of host memory."""
MICROS_MAX = 10**11
"""Maximum price (100,000 currency units per hour), to catch typing errors and prevent overflow."""
_UNITS_MAX = MICROS_MAX // units.MICROS_PER_UNIT
_MIB_PER_GIB = 1024

_PRICE_HINT = 'write the price of one GPU-hour in USD, for example {"H100": 2.99}'


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """One price in the price book."""

    resource: str  # Priced resource: a GPU type, `CORE` or `MEMORY`.
    micros_per_hour: int  # Price per unit of the resource and hour, in millionths of the currency unit.
    pool: str = ""  # Pool to which the price applies, or "" for all pools without a separate price.
    # Start of validity in nanoseconds since 1970. `until_ns` is the end of validity, or None if the price is valid
    # until a later price begins.
    from_ns: int = 0
    until_ns: int | None = None
    dbu_micros_per_hour: int = 0  # Price in millionths of a DBU per unit of the resource, or 0 for prices in currency.


class Tariff(msgspec.Struct, frozen=True, kw_only=True):
    """Prices of an attempt at the reservation of its devices. None means unpriced, not free.

    Attributes:
        gpu_micros_per_hour: price of one device. The core and memory fields are for one core and one GiB of host
            memory.
        dbu_micros_per_hour: millionths of a DBU for one device.
        currency: currency of all prices.
    """

    gpu_micros_per_hour: int | None = None
    core_micros_per_hour: int | None = None
    memory_micros_per_hour: int | None = None
    dbu_micros_per_hour: int = 0
    currency: str = "USD"


UNPRICED = Tariff()


def cost(tariff: Tariff, gpu_ms: int, core_ms: int = 0, memory_mib_ms: int = 0) -> int | None:
    """Return the cost of an attempt, rounded up to a whole micro, or None for unpriced devices.

    Callers pass the total usage of an attempt, once per attempt. The sum of rounded parts would exceed the rounded
    total.
    """
    if tariff.gpu_micros_per_hour is None:
        return None
    if gpu_ms < 0 or core_ms < 0 or memory_mib_ms < 0:
        raise ValueError(f"a cost cannot be negative: {gpu_ms} GPU-ms, {core_ms} core-ms, {memory_mib_ms} MiB-ms")
    whole = gpu_ms * tariff.gpu_micros_per_hour + core_ms * (tariff.core_micros_per_hour or 0)
    memory = memory_mib_ms * (tariff.memory_micros_per_hour or 0)
    return -(-(whole * _MIB_PER_GIB + memory) // (units.MS_PER_HOUR * _MIB_PER_GIB))


def cost_of(tariff: Tariff, ms: int, *, gpu_type: str, gpus: int, cpus: int = 0, memory_bytes: int = 0) -> int | None:
    """Return the cost of constant resources for a duration, with the ledger's rounding.

    `cpus` and `memory_bytes` are 0 for an attempt without a limit on cores or memory.
    """
    core_ms, memory_mib_ms = cores_beside(gpu_type, gpus, cpus) * ms, (memory_bytes >> 20) * ms
    return cost(tariff, gpus * ms, core_ms, memory_mib_ms)


def rate(tariff: Tariff, *, gpu_type: str, gpus: int, cpus: int = 0, memory_bytes: int = 0) -> int | None:
    """Return the cost of constant resources for one hour."""
    return cost_of(tariff, units.MS_PER_HOUR, gpu_type=gpu_type, gpus=gpus, cpus=cpus, memory_bytes=memory_bytes)


def cores_beside(gpu_type: str, gpus: int, cpus: int) -> int:
    """Return the number of cores to charge in addition to the devices, excluding cores of CPU slots."""
    return max(0, cpus - gpus) if gpu_type == CPU else cpus


def cost_parts(tariff: Tariff, gpu_ms: int, core_ms: int, memory_mib_ms: int) -> tuple[int, int, int]:
    """Return the separate costs of devices, cores and memory, each 0 without a price."""
    devices = cost(tariff, gpu_ms) or 0
    cores = cost(tariff, gpu_ms, core_ms) or 0
    return devices, cores - devices, (cost(tariff, gpu_ms, core_ms, memory_mib_ms) or 0) - cores


def dbu_cost(tariff: Tariff, gpu_ms: int) -> int:
    """Return the cost of an attempt in millionths of a DBU, rounded up, or 0 without a price in DBU."""
    return -(-gpu_ms * tariff.dbu_micros_per_hour // units.MS_PER_HOUR)


def tariff(rows: Iterable[Price], *, gpu_type: str, pool: str, at_ns: int, currency: str) -> Tariff:
    """Return the prices for an attempt whose devices are reserved at a given time.

    A pool's price takes precedence over the price for all pools. A type's own price takes precedence over its family's
    price. Among otherwise equal prices, the price with the latest start applies.
    """
    names = [gpu_type, *families_of(gpu_type)]
    found: dict[str, tuple[tuple[bool, int, int], Price]] = {}
    for row in rows:
        if row.pool not in ("", pool) or not is_in_force(row, at_ns):
            continue
        if row.resource in names:
            what, rank = "gpu", (row.pool != "", -names.index(row.resource), row.from_ns)
        elif row.resource in (CORE, MEMORY):
            what, rank = row.resource, (row.pool != "", 0, row.from_ns)
        else:
            continue
        if what not in found or found[what][0] < rank:
            found[what] = (rank, row)
    price = {what: row for what, (_, row) in found.items()}
    return Tariff(
        gpu_micros_per_hour=price["gpu"].micros_per_hour if "gpu" in price else None,
        core_micros_per_hour=price[CORE].micros_per_hour if CORE in price else None,
        memory_micros_per_hour=price[MEMORY].micros_per_hour if MEMORY in price else None,
        dbu_micros_per_hour=price["gpu"].dbu_micros_per_hour if "gpu" in price else 0,
        currency=currency,
    )


def is_in_force(price: Price, at_ns: int) -> bool:
    """Return True if a timestamp is within the validity of a price.

    A later price may still override a valid price.
    """
    return price.from_ns <= at_ns and (price.until_ns is None or at_ns < price.until_ns)


def check_book(rows: Iterable[Price]) -> None:
    """Refuse a price book with two prices for the same resource and pool at the same time.

    A price without an end is valid until the next price of the same resource and pool. A price with an end must end
    before the next price begins.
    """
    ordered = sorted(rows, key=lambda row: (row.resource, row.pool, row.from_ns))
    for row in ordered:
        if row.until_ns is not None and row.until_ns <= row.from_ns:
            raise InvalidValue(f"the price of {_place(row)} ends before it begins", hint="set a later end")
    for row, following in pairwise(ordered):
        if (row.resource, row.pool) != (following.resource, following.pool):
            continue
        if row.from_ns == following.from_ns or (row.until_ns is not None and row.until_ns > following.from_ns):
            raise InvalidValue(
                f"two prices of {_place(row)} are valid at the same time",
                hint="end the earlier price at the start of the later price",
            )


def of_dbus(dbu_micros_per_hour: int, micros_per_dbu: int) -> int:
    """Convert a price in DBU to micros per device-hour, rounded up like a cost."""
    return -(-dbu_micros_per_hour * micros_per_dbu // units.MICROS_PER_UNIT)


def _place(price: Price) -> str:
    return f"{price.resource} in pool {price.pool}" if price.pool else price.resource


class OfDbus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A price in DBU, as written in a configuration file."""

    dbu_per_gpu_hour: float  # DBUs for one device in one hour.
    usd_per_dbu: float


def parse_prices(table: Mapping[str, float | OfDbus]) -> dict[str, Tariff]:
    """Return the price book from the price table of a configuration file, by GPU type name.

    A price for a GPU family applies to each member without a separate price. The function accepts unknown names,
    because cards with custom or product names can have prices too.

    `table` has USD per GPU-hour by type name, per core-hour under `core`, and per GiB-hour under `memory`. Raises
    InvalidOption when a price is not a number. Raises InvalidValue when a price is negative, too high or a duplicate.
    """
    micros: dict[str, tuple[int, int]] = {}
    for written, amount in table.items():
        name = written.casefold() if written.casefold() in (CORE, MEMORY) else canonical(written)
        if name in micros:
            raise InvalidValue(f"the price table contains {name} twice", hint=_PRICE_HINT)
        if isinstance(amount, OfDbus):
            if name in (CORE, MEMORY):
                raise InvalidValue(
                    f"the price of {name} cannot be in DBUs: only devices have prices in DBUs", hint=_PRICE_HINT
                )
            dbu_micros = _price_micros(f"{name}, dbu_per_gpu_hour", amount.dbu_per_gpu_hour)
            made = of_dbus(dbu_micros, _price_micros(f"{name}, usd_per_dbu", amount.usd_per_dbu))
            if made > MICROS_MAX:
                raise InvalidValue(f"the price of {name} would be over {_UNITS_MAX} for one hour", hint=_PRICE_HINT)
            micros[name] = made, dbu_micros
        else:
            micros[name] = _price_micros(name, amount), 0
    core, _ = micros.pop(CORE, (None, 0))
    memory, _ = micros.pop(MEMORY, (None, 0))
    for family, members in FAMILIES.items():
        if family in micros:
            for member in members:
                micros.setdefault(member, micros[family])
    return {
        name: Tariff(
            gpu_micros_per_hour=price,
            core_micros_per_hour=core,
            memory_micros_per_hour=memory,
            dbu_micros_per_hour=dbu_micros,
        )
        for name, (price, dbu_micros) in micros.items()
    }


def _price_micros(name: str, amount: float) -> int:
    # A price of True is a mistake, although Python treats bool as an int.
    if isinstance(amount, bool) or not isinstance(amount, int | float):
        raise InvalidOption(f"the price of {name} is {amount!r}, not a number", hint=_PRICE_HINT)
    if not math.isfinite(amount) or not 0 <= amount <= _UNITS_MAX:
        raise InvalidValue(f"the price of {name} is {amount!r}, not between 0 and {_UNITS_MAX}", hint=_PRICE_HINT)
    return round(amount * units.MICROS_PER_UNIT)
