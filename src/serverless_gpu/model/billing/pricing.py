"""Prices: what a device, a core or a GiB of memory costs for one hour, since when, and in which pool.

    price book ── in force when the devices were reserved ─▶ tariff of the attempt ── × what it used ─▶ micros

A price that is not there is not invented: the time counts, and is unpriced. An attempt keeps the tariff it began with,
so a price that changes later changes no charge. Money is integers; a cost is rounded up once for an attempt as a whole.

A type without a price is unpriced as a whole, also where its cores have one: what looks like a cost is all of it.

A GPU type's price is that of one device. A CPU slot is a device of the type ``CPU``, and its core is not charged again.
Cores and memory are charged where an attempt was given a limit of them (`cpus=`, `memory=`).
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
"""What has a price beside GPU types: one core, and one GiB (2^30 bytes) of host memory."""
MICROS_MAX = 10**11
"""A hundred thousand of the currency unit for one hour: a slip of the finger, and not more than a sum can hold."""
_UNITS_MAX = MICROS_MAX // units.MICROS_PER_UNIT
_MIB_PER_GIB = 1024

_PRICE_HINT = 'write the price of one GPU for one hour in USD, for example {"H100": 2.99}'


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the price book."""

    resource: str  # a GPU type, `CORE` or `MEMORY`
    micros_per_hour: int  # millionths of the currency unit for one of it
    pool: str = ""  # "" for every pool that has none of its own
    # Since when it is in force, nanoseconds since 1970; `until_ns` until when, None for as long as no later one begins.
    from_ns: int = 0
    until_ns: int | None = None
    dbu_micros_per_hour: int = 0  # millionths of a DBU for one of it, where prices are made of those; else 0


class Tariff(msgspec.Struct, frozen=True, kw_only=True):
    """The prices in force when an attempt's devices were reserved; None is "unpriced", which is not 0.

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


def cost(tariff: Tariff, gpu_ms: int, core_ms: int = 0, memory_mib_ms: int = 0) -> int | None:
    """Return what an attempt costs, rounded up to a whole micro; None where its devices have no price.

    Call it once per attempt with the attempt's totals: rounding parts would add up to more than the whole.
    """
    if tariff.gpu_micros_per_hour is None:
        return None
    if gpu_ms < 0 or core_ms < 0 or memory_mib_ms < 0:
        raise ValueError(f"a cost cannot be negative: {gpu_ms} GPU-ms, {core_ms} core-ms, {memory_mib_ms} MiB-ms")
    whole = gpu_ms * tariff.gpu_micros_per_hour + core_ms * (tariff.core_micros_per_hour or 0)
    memory = memory_mib_ms * (tariff.memory_micros_per_hour or 0)
    return -(-(whole * _MIB_PER_GIB + memory) // (units.MS_PER_HOUR * _MIB_PER_GIB))


def cost_of(tariff: Tariff, ms: int, *, gpu_type: str, gpus: int, cpus: int = 0, memory_bytes: int = 0) -> int | None:
    """Return what an attempt costs that has the same for a while, as the ledger charges facts of it.

    `cpus` and `memory_bytes` are 0 where the attempt has no limit of them.
    """
    core_ms, memory_mib_ms = cores_beside(gpu_type, gpus, cpus) * ms, (memory_bytes >> 20) * ms
    return cost(tariff, gpus * ms, core_ms, memory_mib_ms)


def rate(tariff: Tariff, *, gpu_type: str, gpus: int, cpus: int = 0, memory_bytes: int = 0) -> int | None:
    """Return what that costs in an hour."""
    return cost_of(tariff, units.MS_PER_HOUR, gpu_type=gpu_type, gpus=gpus, cpus=cpus, memory_bytes=memory_bytes)


def cores_beside(gpu_type: str, gpus: int, cpus: int) -> int:
    """Return the cores that are paid beside the devices: a CPU slot is one, and is paid as a device."""
    return max(0, cpus - gpus) if gpu_type == CPU else cpus


def cost_parts(tariff: Tariff, gpu_ms: int, core_ms: int, memory_mib_ms: int) -> tuple[int, int, int]:
    """Return what of a cost is for devices, for cores and for memory; they add up to it. 0 where there is no price."""
    devices = cost(tariff, gpu_ms) or 0
    cores = cost(tariff, gpu_ms, core_ms) or 0
    return devices, cores - devices, (cost(tariff, gpu_ms, core_ms, memory_mib_ms) or 0) - cores


def dbu_cost(tariff: Tariff, gpu_ms: int) -> int:
    """Return millionths of a DBU of an attempt, rounded up as a cost is; 0 where the price is not made of DBUs."""
    return -(-gpu_ms * tariff.dbu_micros_per_hour // units.MS_PER_HOUR)


def tariff(rows: Iterable[Price], *, gpu_type: str, pool: str, at_ns: int, currency: str) -> Tariff:
    """Return what an attempt pays whose devices are reserved at a moment.

    A price of the pool itself goes before one of every pool, then the type's own before its family's, then what began
    later.
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
    """Return whether a price holds at a moment, where none that began later does."""
    return price.from_ns <= at_ns and (price.until_ns is None or at_ns < price.until_ns)


def check_book(rows: Iterable[Price]) -> None:
    """Refuse a price book in which two prices of one thing in one pool hold at the same time.

    A price without an end ends where the next one of the same begins; one with an end must have ended by then.
    """
    ordered = sorted(rows, key=lambda row: (row.resource, row.pool, row.from_ns))
    for row in ordered:
        if row.until_ns is not None and row.until_ns <= row.from_ns:
            raise InvalidValue(f"the price of {_place(row)} ends before it begins", hint="say an end after its start")
    for row, following in pairwise(ordered):
        if (row.resource, row.pool) != (following.resource, following.pool):
            continue
        if row.from_ns == following.from_ns or (row.until_ns is not None and row.until_ns > following.from_ns):
            raise InvalidValue(
                f"two prices of {_place(row)} hold at the same time", hint="end the one before where the other begins"
            )


def of_dbus(dbu_micros_per_hour: int, micros_per_dbu: int) -> int:
    """Return the price of one device for one hour that is made of DBUs, in micros; rounded up, as a cost is."""
    return -(-dbu_micros_per_hour * micros_per_dbu // units.MICROS_PER_UNIT)


def _place(price: Price) -> str:
    return f"{price.resource} in pool {price.pool}" if price.pool else price.resource


class OfDbus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A price that is made of DBUs, as a file has it."""

    dbu_per_gpu_hour: float  # how many DBUs one device takes in one hour
    usd_per_dbu: float


def parse_prices(table: Mapping[str, float | OfDbus]) -> dict[str, Tariff]:
    """Return what an attempt pays, by type name, where prices are a table of a file.

    A price for a family holds for each member that has none of its own. Names that no catalogue knows are kept: cards
    with own or product names have prices too.

    `table` has USD per GPU-hour by type name, of one core under `core`, of one GiB under `memory`. Raises InvalidOption
    when a price is no number, and InvalidValue when it is negative, absurd or given twice.
    """
    micros: dict[str, tuple[int, int]] = {}
    for written, amount in table.items():
        name = written.casefold() if written.casefold() in (CORE, MEMORY) else canonical(written)
        if name in micros:
            raise InvalidValue(f"the price of {name} is given twice", hint=_PRICE_HINT)
        if isinstance(amount, OfDbus):
            if name in (CORE, MEMORY):
                raise InvalidValue(f"the price of {name} is not made of DBUs: those count devices", hint=_PRICE_HINT)
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
    # bool is an int to Python, and True USD is a mistake.
    if isinstance(amount, bool) or not isinstance(amount, int | float):
        raise InvalidOption(f"the price of {name} is {amount!r}, not a number", hint=_PRICE_HINT)
    if not math.isfinite(amount) or not 0 <= amount <= _UNITS_MAX:
        raise InvalidValue(f"the price of {name} is {amount!r}, not between 0 and {_UNITS_MAX}", hint=_PRICE_HINT)
    return round(amount * units.MICROS_PER_UNIT)
