"""Runs that had more GPU than they used."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from serverless_gpu.model.billing.advice import ObservedAttempt, OversizedRuns, oversized_runs
from serverless_gpu.model.hardware import GIB, GpuType
from tests.support.golden import golden

HOUR = 3_600_000
BOOK = {"H100": 3_000_000, "L4": 1_000_000, "A10": 1_200_000, "CPU": 50_000}


def ran(**changes: Any) -> ObservedAttempt:
    usual: dict[str, Any] = {
        "owner": "ada",
        "name": "train",
        "gpu_type": "H100",
        "gpu_ms": 10 * HOUR,
        "observed_ms": 10 * HOUR,
        "busy_ms": 9 * HOUR,
        "peak_memory_bytes": 70 * GIB,
    }
    return ObservedAttempt(**(usual | changes))


def only(*attempts: ObservedAttempt, prices: dict[str, int] = BOOK) -> OversizedRuns | None:
    found = oversized_runs(attempts, prices)
    assert len(found) <= 1
    return found[0] if found else None


def test_a_run_that_uses_what_it_has_is_not_named() -> None:
    assert only(ran()) is None


def test_a_device_that_hardly_works_is_cpu_work() -> None:
    found = only(ran(busy_ms=HOUR // 4, peak_memory_bytes=GIB))
    assert found is not None
    assert (found.verdict, found.types, found.busy_percent) == ("cpu", ("CPU",), 2.5)
    assert (found.micros, found.saves_micros) == (30_000_000, 29_500_000)
    assert found.text() == golden("model.unneeded.cpu-work-gpus")


@pytest.mark.parametrize(("busy_percent", "is_named"), [(4.9, True), (5.0, False)])
def test_five_per_cent_is_work(busy_percent: float, is_named: bool) -> None:
    assert (only(ran(busy_ms=round(HOUR * busy_percent / 10))) is not None) is is_named


def test_what_fits_into_a_smaller_type_gets_the_cheapest_that_is_cheaper() -> None:
    found = only(ran(peak_memory_bytes=20 * GIB))
    assert found is not None
    assert (found.verdict, found.types, found.saves_micros, found.slower) == ("smaller", ("L4",), 20_000_000, 3.0)
    assert found.text() == golden("model.unneeded.20-gib-memory")


@pytest.mark.parametrize(("peak", "is_named"), [(20 * GIB, True), (20 * GIB + 1, False)])
def test_a_fifth_is_left_free(peak: int, is_named: bool) -> None:
    """24 GiB are 20 GiB and a fifth on top; nothing between 24 and 80 GiB has a price."""
    assert (only(ran(peak_memory_bytes=peak)) is not None) is is_named


def test_runs_of_a_name_are_looked_at_together_by_their_largest() -> None:
    assert only(ran(peak_memory_bytes=GIB), ran(peak_memory_bytes=75 * GIB)) is None
    found = only(ran(peak_memory_bytes=GIB), ran(peak_memory_bytes=2 * GIB))
    assert found is not None
    assert (found.runs, found.gpu_ms, found.peak_memory_bytes) == (2, 20 * HOUR, 2 * GIB)


def test_nothing_is_said_where_little_was_seen() -> None:
    assert only(ran(observed_ms=599_999, busy_ms=0, gpu_ms=600_000)) is None
    assert only(ran(observed_ms=600_000, busy_ms=0, gpu_ms=600_000)) is not None
    assert only(ran(observed_ms=5 * HOUR - 1, busy_ms=0)) is None  # of ten hours
    assert only(ran(peak_memory_bytes=None)) is None
    assert only(ran(peak_memory_bytes=GIB), ran(peak_memory_bytes=None)) is None


def test_without_prices_the_catalogue_says_what_would_do() -> None:
    found = only(ran(peak_memory_bytes=GIB), prices={})
    assert found is not None
    assert found.types == ("A16", "A2", "P100", "RTX-A4000")
    assert (found.micros, found.saves_micros, found.slower) == (None, None, None)
    assert found.text() == golden("model.unneeded.gib-memory-most")


def test_a_type_that_costs_more_is_no_advice() -> None:
    assert only(ran(peak_memory_bytes=GIB), prices={"H100": 3_000_000, "L4": 3_000_000}) is None
    assert only(ran(busy_ms=0), prices={"H100": 3_000_000, "CPU": 3_000_001}) is None


def test_cpu_slots_and_cards_that_nobody_knows() -> None:
    assert only(ran(gpu_type="CPU", busy_ms=0)) is None
    assert only(ran(gpu_type="Acme 9", peak_memory_bytes=GIB), prices={}) is None
    own = GpuType(name="Acme 9", memory_bytes=100 * GIB)
    (found,) = oversized_runs([ran(gpu_type="acme-9", peak_memory_bytes=80 * GIB)], {}, [own])
    assert found.types == ("GH200", "H20", "RTX-PRO-6000")


def test_who_saves_most_is_first() -> None:
    few = ran(owner="bob", busy_ms=0, gpu_ms=HOUR, observed_ms=HOUR)
    unpriced = ran(owner="eve", gpu_type="H200", busy_ms=0)
    found = oversized_runs([few, unpriced, ran(busy_ms=0)], BOOK)
    assert [each.owner for each in found] == ["ada", "bob", "eve"]
    assert msgspec.json.decode(msgspec.json.encode(found[0]), type=OversizedRuns) == found[0]
