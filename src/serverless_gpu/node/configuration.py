"""`config.toml` in the home directory: the user's own GPU types, their prices, and how long ended runs are kept.

[types.MYCARD]
memory_gib = 48
products = ["ACME Accelerator 48G"]      # what the driver calls it

[prices]                                  # USD per GPU-hour
H100 = 2.99

[retention]                               # 0: no such limit; left out: the default
days = 30
gib = 20
"""

from __future__ import annotations

import tomllib

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.hardware import GpuType
from serverless_gpu.model.retention import DAY_NS, DEFAULT_DAYS, DEFAULT_GIB, Policy
from serverless_gpu.node.home import Home


class _OwnType(msgspec.Struct, forbid_unknown_fields=True):
    memory_gib: float
    products: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


class _Retention(msgspec.Struct, forbid_unknown_fields=True):
    days: float = DEFAULT_DAYS
    gib: float = DEFAULT_GIB


_TABLES = ("types", "prices", "retention")


def read_configuration(home: Home) -> dict[str, object]:
    """Return the configuration as a dictionary, empty when there is none.

    Raises:
        InvalidValue: the file is not TOML, or has a table that does not exist.
    """
    path = home.root / "config.toml"
    try:
        with path.open("rb") as file:
            table: dict[str, object] = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise InvalidValue(f"{path} cannot be read: {error}") from error
    unknown = set(table) - set(_TABLES)
    if unknown:
        raise InvalidValue(
            f"{path} has unknown tables: {', '.join(sorted(unknown))}", hint=f"known: {', '.join(_TABLES)}"
        )
    return table


def configured_types(table: dict[str, object]) -> tuple[GpuType, ...]:
    """Return the user's own GPU types.

    Raises:
        InvalidValue: a type is not described as it must be.
    """
    try:
        types = msgspec.convert(table.get("types", {}), dict[str, _OwnType])
    except msgspec.ValidationError as error:
        raise InvalidValue(f"config.toml, table types: {error}") from error
    for name, own in types.items():
        if not 0 < own.memory_gib < 1_000_000:  # NaN is neither
            raise InvalidValue(f"config.toml, type {name}: memory_gib must be a positive number, not {own.memory_gib}")
    return tuple(
        GpuType(name=name, memory_bytes=round(own.memory_gib * 2**30), products=own.products, aliases=own.aliases)
        for name, own in types.items()
    )


def configured_retention(table: dict[str, object]) -> Policy:
    """Return how long ended runs are kept.

    Raises:
        InvalidValue: the table is not what it must be.
    """
    try:
        own = msgspec.convert(table.get("retention", {}), _Retention)
    except msgspec.ValidationError as error:
        raise InvalidValue(f"config.toml, table retention: {error}") from error
    for name, value in (("days", own.days), ("gib", own.gib)):
        if not 0 <= value < 1_000_000:  # NaN is neither
            raise InvalidValue(f"config.toml, table retention: {name} must be a number from 0 on, not {value}")
    return Policy(
        age_ns=round(own.days * DAY_NS) or None,
        size_bytes_max=round(own.gib * 2**30) or None,
    )
