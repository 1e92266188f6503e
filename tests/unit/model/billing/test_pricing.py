"""The price book: which price holds for what, where and when; what things cost, rounded once."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.billing.pricing import (
    UNPRICED,
    OfDbus,
    Price,
    Tariff,
    check_book,
    cost,
    cost_parts,
    dbu_cost,
    of_dbus,
    parse_prices,
    tariff,
)


def price(resource: str, micros: int, from_ns: int = 0, until_ns: int | None = None, *, pool: str = "") -> Price:
    return Price(resource=resource, micros_per_hour=micros, from_ns=from_ns, until_ns=until_ns, pool=pool)


def asked(rows: list[Price], gpu_type: str = "H100", pool: str = "", at_ns: int = 50) -> Tariff:
    return tariff(rows, gpu_type=gpu_type, pool=pool, at_ns=at_ns, currency="USD")


@pytest.mark.parametrize(
    ("rows", "gpu_type", "pool", "at_ns", "expected"),
    [
        ([], "H100", "", 50, None),
        ([price("H100", 1)], "H100", "", 50, 1),
        ([price("H100", 1)], "H200", "", 50, None),
        # Windows are [from, until).
        ([price("H100", 1, 50, 60)], "H100", "", 49, None),
        ([price("H100", 1, 50, 60)], "H100", "", 50, 1),
        ([price("H100", 1, 50, 60)], "H100", "", 60, None),
        # What began later holds; an end that is there was meant.
        ([price("H100", 1), price("H100", 2, 40)], "H100", "", 50, 2),
        ([price("H100", 2, 40), price("H100", 1)], "H100", "", 39, 1),
        ([price("H100", 1), price("H100", 2, 40, 45)], "H100", "", 50, 1),
        # A pool's own goes before one of every pool, and only there.
        ([price("H100", 1, pool="batch"), price("H100", 2, 40)], "H100", "batch", 50, 1),
        ([price("H100", 1, pool="batch"), price("H100", 2, 40)], "H100", "other", 50, 2),
        ([price("H100", 1, pool="batch")], "H100", "", 50, None),
        # A family's holds for a member that has none of its own.
        ([price("A100", 1)], "A100-80", "", 50, 1),
        ([price("A100", 1, 40), price("A100-80", 2)], "A100-80", "", 50, 2),
        ([price("A100-80", 2)], "A100-40", "", 50, None),
        ([price("A100", 1, pool="batch"), price("A100-80", 2)], "A100-80", "batch", 50, 1),
        ([price("A100", 0)], "A100", "", 50, 0),
    ],
)
def test_the_price_that_was_in_force_when_devices_were_reserved(
    rows: list[Price], gpu_type: str, pool: str, at_ns: int, expected: int | None
) -> None:
    for order in (rows, rows[::-1]):
        assert asked(order, gpu_type, pool, at_ns).gpu_micros_per_hour == expected


def test_cores_memory_and_dbus_go_with_the_devices() -> None:
    rows = [
        Price(resource="H100", micros_per_hour=6_218_800, dbu_micros_per_hour=8_884_000),
        price("core", 40_000),
        price("core", 50_000, pool="batch"),
        price("memory", 5_000),
    ]
    assert asked(rows, pool="batch") == Tariff(
        gpu_micros_per_hour=6_218_800,
        core_micros_per_hour=50_000,
        memory_micros_per_hour=5_000,
        dbu_micros_per_hour=8_884_000,
    )
    assert asked(rows).core_micros_per_hour == 40_000


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([price("H100", 1, 0, 50), price("H100", 2, 40)], "two prices of H100 are valid at the same time"),
        (
            [price("H100", 1, 40, pool="batch"), price("H100", 2, 40, pool="batch")],
            "two prices of H100 in pool batch are valid at the same time",
        ),
        ([price("core", 1, 50, 50)], "the price of core ends before it begins"),
    ],
)
def test_two_prices_of_one_thing_at_one_time_are_refused(rows: list[Price], text: str) -> None:
    with pytest.raises(InvalidValue, match=text):
        check_book(rows)


def test_a_book_without_overlaps_is_one() -> None:
    check_book(
        [
            price("H100", 2, 40),
            price("H100", 1, 0, 40),
            price("H100", 3, 90),  # the one before has no end, and ends here
            price("H100", 1, 0, pool="batch"),
            price("A100", 1, 0, 50),
        ]
    )


def test_a_price_that_is_made_of_dbus() -> None:
    assert (of_dbus(8_884_000, 700_000), of_dbus(0, 700_000)) == (6_218_800, 0)
    assert of_dbus(1, 1) == 1  # rounded up: what is used is never free
    made = parse_prices({"A100": OfDbus(dbu_per_gpu_hour=8.884, usd_per_dbu=0.70), "core": 0.04})
    assert set(made) == {"A100", "A100-40", "A100-80"}
    assert made["A100-40"] == Tariff(
        gpu_micros_per_hour=6_218_800, core_micros_per_hour=40_000, dbu_micros_per_hour=8_884_000
    )


@pytest.mark.parametrize(
    ("name", "dbu", "usd", "why"),
    [
        ("H100", 100_000, 2, "would be over 100000 for one hour"),
        ("H100", -1, 2, "H100, dbu_per_gpu_hour is -1, not between"),
        ("H100", 1, math.nan, "H100, usd_per_dbu is nan, not between"),
        ("core", 1, 1, "cannot be in DBUs"),
    ],
)
def test_what_cannot_be_made_of_dbus_is_refused(name: str, dbu: float, usd: float, why: str) -> None:
    with pytest.raises(InvalidValue, match=why):
        parse_prices({name: OfDbus(dbu_per_gpu_hour=dbu, usd_per_dbu=usd)})


def test_prices_of_a_file_have_cores_and_memory() -> None:
    assert parse_prices({"H100": 2.99, "Core": 0.04, "memory": 0.005, "A100": 1}) == {
        name: Tariff(gpu_micros_per_hour=micros, core_micros_per_hour=40_000, memory_micros_per_hour=5_000)
        for name, micros in (("H100", 2_990_000), ("A100", 1_000_000), ("A100-40", 1_000_000), ("A100-80", 1_000_000))
    }


AMOUNTS = st.integers(0, 10**15)
MICROS = st.integers(0, 10**12)


@given(MICROS, MICROS, MICROS, AMOUNTS, AMOUNTS, AMOUNTS)
def test_a_cost_is_rounded_up_once_and_its_parts_add_up(
    gpu: int, core: int, memory: int, gpu_ms: int, core_ms: int, memory_mib_ms: int
) -> None:
    pays = Tariff(gpu_micros_per_hour=gpu, core_micros_per_hour=core, memory_micros_per_hour=memory)
    exact = Fraction(gpu_ms * gpu + core_ms * core, 3_600_000) + Fraction(memory_mib_ms * memory, 1024 * 3_600_000)
    whole = cost(pays, gpu_ms, core_ms, memory_mib_ms)
    assert whole == math.ceil(exact)
    parts = cost_parts(pays, gpu_ms, core_ms, memory_mib_ms)
    assert sum(parts) == whole and min(parts) >= 0


def test_without_a_price_of_the_devices_nothing_is_a_cost() -> None:
    cores_only = Tariff(core_micros_per_hour=40_000)
    assert cost(UNPRICED, 1) is None and cost(cores_only, 1, 10**9) is None
    assert cost_parts(cores_only, 1, 10**9, 0) == (0, 0, 0)
    assert dbu_cost(UNPRICED, 10**9) == 0
    with pytest.raises(ValueError, match="cannot be negative"):
        cost(Tariff(gpu_micros_per_hour=1), -1)
