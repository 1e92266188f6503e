"""Reads `config.toml` of a home: own GPU types, prices, retention of ended runs, checkpoint directory.

[types.MYCARD]
memory_gib = 48
products = ["ACME Accelerator 48G"]      # the driver's product names

[prices]                                  # USD per hour: GPU, core, GiB
H100 = 2.99
core = 0.04
memory = 0.005
A100 = {dbu_per_gpu_hour = 4.5, usd_per_dbu = 0.70}    # or computed from DBUs

[retention]                               # 0: no limit; missing: the default
days = 30
gib = 20

[xids]                                    # effect of an Xid, if it differs from model/xid.py
63 = "other"

[checkpoints]                             # on several nodes: a shared directory with the same path on all nodes
directory = "/shared/checkpoints"
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from serverless_gpu.errors import InvalidValue, UsageError
from serverless_gpu.json_codec import from_builtins
from serverless_gpu.model.billing.pricing import OfDbus, Tariff, parse_prices
from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.model.hardware import GpuType
from serverless_gpu.model.lifecycle.retention import DEFAULT_DAYS, DEFAULT_GIB, Policy
from serverless_gpu.model.xid import XidKind
from serverless_gpu.node.base.home import Home


class _OwnType(msgspec.Struct, forbid_unknown_fields=True):
    memory_gib: float
    products: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


class _Retention(msgspec.Struct, forbid_unknown_fields=True):
    days: float = DEFAULT_DAYS
    gib: float = DEFAULT_GIB


class _Checkpoints(msgspec.Struct, forbid_unknown_fields=True):
    directory: str = ""


_TABLES = ("types", "prices", "retention", "checkpoints", "xids")

T = TypeVar("T")


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """The user's configuration."""

    types: tuple[GpuType, ...] = ()  # GPU types that the user has defined.
    prices: dict[str, Tariff] = {}  # GPU type → tariff
    retention: Policy = Policy()
    checkpoints: str = ""  # Checkpoint directory of all runs; "" selects the directory in the home.
    xids: dict[int, XidKind] = {}  # Maps Xid numbers to fault kinds that differ from `model.xid.TABLE`.


def read_configuration(home: Home) -> Configuration:
    """Return the configuration, or the defaults if the file does not exist.

    Raises InvalidValue, which names the file and the error.
    """
    path = home.root / "config.toml"
    try:
        with path.open("rb") as file:
            tables: dict[str, object] = tomllib.load(file)
    except FileNotFoundError:
        return Configuration()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise InvalidValue(f"{path} cannot be read: {error}") from error
    unknown = set(tables) - set(_TABLES)
    if unknown:
        raise InvalidValue(
            f"{path} has unknown tables: {', '.join(sorted(unknown))}", hint=f"known: {', '.join(_TABLES)}"
        )
    try:
        return Configuration(
            types=_types(tables),
            prices=_prices(tables),
            retention=_retention(tables),
            checkpoints=_checkpoints(tables),
            xids=_xids(tables),
        )
    except UsageError as error:
        raise InvalidValue(f"{path}, {error.message}", hint=error.hint) from None


def _types(tables: Mapping[str, object]) -> tuple[GpuType, ...]:
    types = _converted(tables, "types", dict[str, _OwnType])
    for name, own in types.items():
        if not 0 < own.memory_gib < 1_000_000:  # Comparisons with NaN are False, so the check also rejects NaN.
            raise InvalidValue(f"table types: memory_gib of {name} must be a positive number, not {own.memory_gib}")
    return tuple(
        GpuType(name=name, memory_bytes=round(own.memory_gib * 2**30), products=own.products, aliases=own.aliases)
        for name, own in types.items()
    )


def _prices(tables: Mapping[str, object]) -> dict[str, Tariff]:
    try:
        amounts = _converted(tables, "prices", dict[str, float | OfDbus])
    except InvalidValue as error:
        raise InvalidValue(
            error.message, hint="H100 = 2.99, or { dbu_per_gpu_hour = 8.9, usd_per_dbu = 0.7 }"
        ) from None
    try:
        return parse_prices(amounts)
    except UsageError as error:
        raise InvalidValue(f"table prices: {error.message}", hint=error.hint) from None


def _retention(tables: Mapping[str, object]) -> Policy:
    own = _converted(tables, "retention", _Retention)
    for name, value in (("days", own.days), ("gib", own.gib)):
        if not 0 <= value < 1_000_000:  # Comparisons with NaN are False, so the check also rejects NaN.
            raise InvalidValue(f"table retention: {name} must be a number of at least 0, not {value}")
    return Policy(
        age_ns=round(own.days * DAY_NS) or None,
        size_bytes_max=round(own.gib * 2**30) or None,
    )


def _checkpoints(tables: Mapping[str, object]) -> str:
    own = _converted(tables, "checkpoints", _Checkpoints)
    directory = os.path.expanduser(own.directory)
    if directory and not os.path.isabs(directory):
        raise InvalidValue(f"table checkpoints: directory must be an absolute path, not {own.directory!r}")
    return directory


def _xids(tables: Mapping[str, object]) -> dict[int, XidKind]:
    kinds = _converted(tables, "xids", dict[str, str])
    for number, kind in kinds.items():
        if not number.isascii() or not number.isdigit():
            raise InvalidValue(f"table xids: {number!r} is not a valid Xid number", hint='for example: 63 = "other"')
        if kind not in tuple(XidKind):
            raise InvalidValue(
                f"table xids: {number} is {kind!r}, which is not a valid kind", hint=f"one of {', '.join(XidKind)}"
            )
    return {int(number): XidKind(kind) for number, kind in kinds.items()}


def _converted(tables: Mapping[str, object], name: str, kind: type[T]) -> T:
    try:
        return from_builtins(tables.get(name, {}), kind)
    except msgspec.ValidationError as error:
        raise InvalidValue(f"table {name}: {error}") from None
