"""What a run costs, or would: sums of lines, and a tariff times a duration, each rounded up once."""

from __future__ import annotations

import math
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.billing.ledger import LedgerLine, charge
from serverless_gpu.model.billing.pricing import Tariff, rate
from serverless_gpu.model.cost import AttemptDuration, AttemptUse, Cost, CostEstimate, Devices, estimated, together
from serverless_gpu.model.lifecycle.attempt import Fact, FactKind
from tests.support.golden import golden

H100 = Tariff(gpu_micros_per_hour=2_990_000)
HOUR_MS = 3_600_000


def line(day: int = 20_000, **fields: int | None) -> LedgerLine:
    return LedgerLine(day=day, start_ns=0, end_ns=1, gpus=8, **fields)  # type: ignore[arg-type]  # numbers all of them


# --- after: what it used ----------------------------------------------------------------------------------------------


def test_days_and_attempts_add_up() -> None:
    first = AttemptUse(
        lines=(line(run_ms=HOUR_MS, gpu_ms=HOUR_MS, billed_ms=HOUR_MS, micros=2_990_000), line(20_001, micros=7)),
        gpu_type="H100",
        queued_ms=1_000,
    )
    failed = AttemptUse(lines=(line(run_ms=500, gpu_ms=500, micros=0),), gpu_type="H100", queued_ms=2_000)
    cost = together([first, failed], waits_ms=30)
    assert cost == Cost(
        micros=2_990_007,
        currency="USD",
        gpu_ms=HOUR_MS + 500,
        billed_ms=HOUR_MS,
        queued_ms=3_030,
        run_ms=HOUR_MS + 500,
        attempts=2,
        gpu_type="H100",
    )
    assert str(cost) == golden("model.cost.99-usd-gpu")


def test_time_without_a_price_is_counted_and_said() -> None:
    used = AttemptUse(lines=(line(run_ms=HOUR_MS, gpu_ms=HOUR_MS, billed_ms=HOUR_MS),), gpu_type="H100")
    cost = together([used])
    assert (cost.micros, cost.unpriced_ms) == (None, HOUR_MS)
    assert str(cost) == "unpriced · 1.0 GPU-hours"
    assert cost.rows() == {
        "cost": "unpriced",
        "used": "1.0 GPU-hours",
        "unpriced": "1.0 GPU-hours",
        "time": "run 1.0 GPU-hours",
    }


def test_where_one_attempt_has_a_price_the_time_of_the_other_is_said_beside_it() -> None:
    unpriced = AttemptUse(lines=(line(gpu_ms=600, billed_ms=600),), gpu_type="A10")
    cost = together([unpriced, AttemptUse(lines=(line(gpu_ms=100, billed_ms=100, micros=84),), gpu_type="H100")])
    assert (cost.micros, cost.unpriced_ms) == (84, 600)
    assert str(cost) == golden("model.cost.000084-usd-gpu")


def test_two_currencies_are_never_added() -> None:
    before = AttemptUse(lines=(line(gpu_ms=600, billed_ms=600, micros=50),), currency="EUR", gpu_type="H100")
    cost = together([before, AttemptUse(lines=(line(gpu_ms=100, billed_ms=100, micros=84),), gpu_type="H100")])
    assert (cost.micros, cost.currency, cost.billed_ms, cost.unpriced_ms) == (84, "USD", 700, 600)


def test_what_goes_on_is_so_far_and_what_never_began_used_nothing() -> None:
    assert together([], waits_ms=5_000, is_final=False).text() == golden("server.costing.nothing-used-so")
    assert together([]).rows() == {"cost": "nothing used", "used": "0.0 device-seconds"}
    going_on = AttemptUse(lines=(line(gpu_ms=1_000, billed_ms=1_000, micros=9),), gpu_type="CPU", is_final=False)
    assert together([going_on]).text() == golden("model.cost.000009-usd-cpu")


def test_what_the_platform_lost_is_nothing_to_pay() -> None:
    assert together([AttemptUse(lines=(line(gpu_ms=500),), gpu_type="H100")]).amount() == "nothing to pay"


def test_a_notebook_shows_the_same_rows_and_escapes_them() -> None:
    cost = Cost(micros=1, currency="<USD>", gpu_ms=1, billed_ms=1, dbu_micros=8_884_000, queued_ms=120_000)
    page = cost.html()
    assert "0.000001 &lt;USD&gt;" in page and "<USD>" not in page
    assert "8.884" in page and "2 min 00 s" in page


# --- before: what it would --------------------------------------------------------------------------------------------


def test_an_estimate_is_the_rate_times_the_limit_and_times_what_earlier_runs_took() -> None:
    found = estimated(Devices(gpu_type="H100", count=8, tariff=H100), AttemptDuration(limit_s=3_600, expected_s=1_200))
    assert found == CostEstimate(
        currency="USD",
        micros_per_hour=23_920_000,
        at_timeout_micros=23_920_000,
        expected_micros=7_973_334,
        expected_s=1_200,
        basis="8 H100 × 2.99 USD = 23.92 USD an hour; timeout 1 h 00 min; "
        "4 of 5 earlier runs of the same name took 20 min 00 s or less",
        at_timeout_gpu_ms=8 * HOUR_MS,
        expected_gpu_ms=8 * 1_200_000,
        gpu_type="H100",
    )
    assert found.text() == golden("model.cost.about-97-usd", basis=found.basis)


def test_cores_and_memory_count_where_they_are_asked_for_and_have_a_price() -> None:
    tariff = Tariff(gpu_micros_per_hour=1_000_000, core_micros_per_hour=40_000, memory_micros_per_hour=5_000)
    asked = Devices(gpu_type="H100", count=2, cpus=16, memory_bytes=64 << 30, tariff=tariff)
    found = estimated(asked, AttemptDuration())
    assert found.micros_per_hour == 2_000_000 + 16 * 40_000 + 64 * 5_000
    assert found.basis.startswith("2 H100 × 1.00 USD + 16 cores × 0.04 USD + 64 GiB × 0.005 USD = 2.96 USD an hour; ")
    slots = Devices(gpu_type="CPU", count=4, cpus=6, tariff=tariff)
    assert (
        estimated(slots, AttemptDuration()).micros_per_hour == 4_000_000 + 2 * 40_000
    )  # a slot is a core, paid as a device


def test_without_a_price_the_time_is_said_and_how_to_set_one() -> None:
    found = estimated(
        Devices(gpu_type="H100", count=8), AttemptDuration(limit_s=3_600), advice="`sgpu price set H100 2.99` sets one"
    )
    assert (found.micros_per_hour, found.at_timeout_micros, found.at_timeout_gpu_ms) == (None, None, 8 * HOUR_MS)
    assert found.text().startswith("at most 8.0 GPU-hours: 8 H100, unpriced (`sgpu price set H100 2.99` sets one); ")


def test_nothing_bounds_a_run_without_a_limit() -> None:
    found = estimated(Devices(gpu_type="H100", count=1, tariff=H100), AttemptDuration())
    assert (found.at_timeout_micros, found.at_timeout_gpu_ms, found.expected_micros) == (None, None, None)
    assert found.text().startswith(
        "2.99 USD an hour: 1 H100 × 2.99 USD = 2.99 USD an hour; the run has no time limit; "
    )


@pytest.mark.parametrize(
    ("lasting", "words", "times"),
    [
        (AttemptDuration(limit_s=60, tries=3), "timeout 1 min 00 s in each of up to 3 attempts", 3),
        (
            AttemptDuration(limit_s=60, resumes=True),
            "timeout 1 min 00 s, and the same again each time the run resumes",
            1,
        ),
        (AttemptDuration(limit_s=60, limit="max_run"), "max_run 1 min 00 s", 1),
        (AttemptDuration(limit_s=7 * 86_400, limit="max_run"), "max_run 7 days", 7 * 24 * 60),
        (AttemptDuration(limit_s=2.5 * 86_400), "timeout 60 h 00 min", 60 * 60),
    ],
)
def test_attempts_that_may_follow_are_in_the_most_it_costs(lasting: AttemptDuration, words: str, times: int) -> None:
    found = estimated(Devices(gpu_type="H100", count=1, tariff=H100), lasting)
    assert f"; {words}; " in found.basis
    assert found.at_timeout_micros == math.ceil(Fraction(2_990_000 * times, 60))
    assert (" in one go: " in found.text()) is found.resumes is lasting.resumes


def test_what_nobody_could_pay_is_no_number_that_does_not_travel() -> None:
    tariff = Tariff(gpu_micros_per_hour=10**11, memory_micros_per_hour=10**11)
    found = estimated(
        Devices(gpu_type="H100", count=100_000, memory_bytes=1 << 60, tariff=tariff),
        AttemptDuration(limit_s=10 * 366 * 86_400, tries=101),
    )
    assert (found.micros_per_hour, found.at_timeout_micros) == (None, None)
    assert golden("model.cost.too-much-say") in found.text() and msgspec.json.encode(found)


_AMOUNTS = st.none() | st.integers(0, 10**7)
_TARIFFS = st.builds(
    Tariff,
    gpu_micros_per_hour=st.integers(0, 10**9),
    core_micros_per_hour=_AMOUNTS,
    memory_micros_per_hour=_AMOUNTS,
)
_DEVICES = st.builds(
    Devices,
    gpu_type=st.just("H100"),
    count=st.integers(1, 1_000),
    cpus=st.integers(0, 1_000),
    memory_bytes=st.integers(0, 1 << 44),
    tariff=_TARIFFS,
)


@given(devices=_DEVICES, limit_ms=st.integers(1, 10**10))
def test_an_estimate_is_rounded_up_once_whatever_it_is_made_of(devices: Devices, limit_ms: int) -> None:
    tariff = devices.tariff
    found = estimated(devices, AttemptDuration(limit_s=limit_ms / 1000))
    mib = devices.memory_bytes >> 20
    rate = devices.count * (tariff.gpu_micros_per_hour or 0) + devices.cpus * (tariff.core_micros_per_hour or 0)
    whole = rate + Fraction(mib * (tariff.memory_micros_per_hour or 0), 1024)
    assert found.at_timeout_micros == math.ceil(whole * limit_ms / HOUR_MS)


_PRICES = st.none() | st.integers(0, 10**9)


@given(
    st.builds(Tariff, gpu_micros_per_hour=_PRICES, core_micros_per_hour=_PRICES, memory_micros_per_hour=_PRICES),
    st.sampled_from(["H100", "CPU"]),
    st.integers(1, 8),
    st.integers(0, 64),
    st.integers(0, 1 << 40),
)
def test_what_an_hour_costs_is_what_the_ledger_charges_for_one(
    tariff: Tariff, gpu_type: str, gpus: int, cpus: int, memory_bytes: int
) -> None:
    """Budgets, estimates and the ledger say the same of cores and memory beside devices, of GPUs and CPU slots."""
    slots = gpus if gpu_type == "CPU" else 0
    uuids = tuple(f"{'CPU' if slots else 'GPU'}-{index}" for index in range(gpus))

    def fact(seq: int, kind: FactKind, at_ns: int) -> Fact:
        return Fact(
            attempt="r:1",
            seq=seq,
            kind=kind,
            boot_id="b",
            boottime_ns=at_ns,
            wall_ns=at_ns,
            gpus=uuids,
            cpus=cpus or slots,  # as a node says it
            memory_bytes=memory_bytes,
        )

    facts = [fact(0, FactKind.EXEC, 0), fact(1, FactKind.FREED, HOUR_MS * 1_000_000)]
    charged = charge(facts, gpu_type=gpu_type, tariff=tariff).micros
    assert rate(tariff, gpu_type=gpu_type, gpus=gpus, cpus=cpus, memory_bytes=memory_bytes) == charged
    devices = Devices(gpu_type=gpu_type, count=gpus, cpus=cpus, memory_bytes=memory_bytes, tariff=tariff)
    assert estimated(devices, AttemptDuration()).micros_per_hour == charged


def test_23B9_the_time_of_cpu_slots_is_called_so_before_and_after_a_run() -> None:
    estimate = estimated(Devices(gpu_type="CPU", count=2), AttemptDuration(limit_s=60, expected_s=10))
    assert estimate.text().startswith("about 20.0 CPU slot-seconds, at most 120.0 CPU slot-seconds: ")
    used = AttemptUse(lines=(line(run_ms=500, gpu_ms=500, billed_ms=500),), gpu_type="CPU")
    assert together([used]).rows()["used"] == "0.5 CPU slot-seconds"
