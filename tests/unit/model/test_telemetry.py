"""Telemetry, the pure half: how often, names, sums, lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.receipt import DeviceUse
from serverless_gpu.model.telemetry import (
    SECOND_NS,
    DeviceTotals,
    GpuSample,
    Header,
    HostSample,
    Line,
    RankSample,
    Sample,
    add,
    decode,
    encode,
    interval_ns,
    merged,
    series,
    step,
    throttle_words,
    works,
)
from tests.support.node.sampled import GB, ORIGIN_NS, gpu, header, sample

# --- how often ---


def test_a_row_a_second_in_the_first_hour_and_fewer_than_30_000_in_ten_days() -> None:
    assert {interval_ns(rows) for rows in range(3600)} == {SECOND_NS}
    assert interval_ns(3600) == 2 * SECOND_NS
    rows, elapsed_ns = 0, 0
    while elapsed_ns < 10 * 86_400 * SECOND_NS:
        elapsed_ns += interval_ns(rows)
        rows += 1
    assert rows < 30_000
    assert interval_ns(10**9) == 256 * SECOND_NS


def test_several_samples_become_one_that_hides_no_peak() -> None:
    first = sample(1, replace(gpu(0.0, memory=60 * GB, watts=100.0), throttle=0x4), received=5)
    last = sample(2, replace(gpu(100.0, memory=20 * GB, watts=None), throttle=0x40, ecc_errors=2), received=9)
    whole = merged([first, last])
    assert whole.at_ns == last.at_ns
    assert whole.host.network_receive_bytes == 9
    assert whole.gpus[0] == replace(
        last.gpus[0], busy_percent=50.0, memory_bytes=60 * GB, power_watts=100.0, throttle=0x44
    )
    assert merged([last]) is last


def test_devices_and_ranks_that_appear_in_between_do_not_mix_with_others() -> None:
    early = sample(1, ranks=(RankSample(0, 50.0, 5),))
    late = sample(2, gpu(10.0), gpu(20.0), ranks=(RankSample(1, 10.0, 3), RankSample(0, 100.0, 4)))
    whole = merged([early, late])
    assert whole.gpus == late.gpus
    assert whole.ranks == (RankSample(1, 10.0, 3), RankSample(0, 75.0, 5))


def test_what_is_never_known_stays_unknown() -> None:
    assert merged([sample(1, GpuSample()), sample(2, GpuSample())]).gpus == (GpuSample(),)


# --- names ---


def test_series_have_the_names_and_units_of_mlflow() -> None:
    rank = RankSample(3, 150.0, 2 * GB, 9 * GB)
    card = replace(
        gpu(87.0, memory=61 * GB, watts=350.0), temperature_celsius=60, pcie_receive_bytes_s=2e6, ecc_errors=0
    )
    values = series(header(devices=1, node_rank=1), sample(1, card, received=3_000_000, ranks=(rank,)))
    assert values == {
        "system/node_1/cpu_utilization_percentage": 10.0,
        "system/node_1/system_memory_usage_megabytes": 4000.0,
        "system/node_1/system_memory_usage_percentage": 25.0,
        "system/node_1/disk_usage_megabytes": 30_000.0,
        "system/node_1/disk_usage_percentage": 30.0,
        "system/node_1/disk_available_megabytes": 70_000.0,
        "system/node_1/network_receive_megabytes": 3.0,
        "system/node_1/network_transmit_megabytes": 3.0,
        "system/node_1/gpu_0_utilization_percentage": 87.0,
        "system/node_1/gpu_0_memory_usage_megabytes": 61_000.0,
        "system/node_1/gpu_0_memory_usage_percentage": 76.25,
        "system/node_1/gpu_0_power_usage_watts": 350.0,
        "system/node_1/gpu_0_power_usage_percentage": 50.0,
        "system/node_1/gpu_0_temperature_celsius": 60.0,
        "system/node_1/gpu_0_pcie_receive_megabytes_per_second": 2.0,
        "system/node_1/gpu_0_throttle_reasons": 0.0,
        "system/node_1/gpu_0_ecc_errors": 0.0,
        "system/node_1/rank_3_cpu_utilization_percentage": 150.0,
        "system/node_1/rank_3_memory_usage_megabytes": 2000.0,
        "system/node_1/rank_3_gpu_memory_usage_megabytes": 9000.0,
    }
    assert all(type(value) is float for value in values.values())


def test_what_is_not_known_has_no_series_and_a_slot_of_a_cpu_is_no_gpu() -> None:
    assert series(header(devices=1), Sample(ORIGIN_NS, HostSample(), (GpuSample(),))) == {}
    assert not [name for name in series(header(kind=DeviceKind.CPU), sample(1, gpu(), gpu())) if "gpu" in name]
    assert [name for name in series(header(kind=DeviceKind.FAKE), sample(1, gpu(), gpu())) if "gpu_1" in name]


def test_steps_count_whole_seconds_since_the_call_over_all_attempts() -> None:
    assert step(header(), sample(61.9)) == 61
    assert step(header(fence=2), sample(3600)) == 3600
    assert step(header(), sample(-3)) == 0


# --- sums ---


def test_a_use_is_mean_peak_energy_and_throttled_seconds() -> None:
    uses = add({}, header(devices=1), sample(0, gpu(0.0, memory=1 * GB, watts=100.0)))
    uses = add(uses, header(devices=1), sample(1, gpu(100.0, memory=61 * GB, watts=300.0)))
    uses = add(uses, header(devices=1), sample(3, replace(gpu(100.0, memory=2 * GB, watts=300.0), throttle=0x40)))
    assert uses["GPU-0"].result() == DeviceUse(
        uuid="GPU-0",
        samples=3,
        busy_percent=75.0,  # of the second before the first sample, one, and two more
        peak_memory_bytes=61 * GB,
        energy_joules=200.0 + 600.0,
        throttled_s=2.0,
    )


def test_a_use_of_what_cannot_be_asked_is_unknown_and_not_zero() -> None:
    use = DeviceTotals(uuid="GPU-0").plus(1, GpuSample()).plus(2, GpuSample())
    assert use.result() == DeviceUse(uuid="GPU-0", samples=2)


def test_a_gap_in_the_samples_costs_no_energy_for_hours() -> None:
    use = DeviceTotals(uuid="GPU-0").plus(0, gpu(watts=100.0)).plus(7200 * SECOND_NS, gpu(watts=100.0))
    assert use.result().energy_joules == 100.0 * 600
    back = DeviceTotals(uuid="GPU-0").plus(7200 * SECOND_NS, gpu(watts=100.0)).plus(0, gpu(watts=100.0))
    assert back.result().energy_joules == 0.0


def test_idle_clocks_and_clocks_somebody_set_are_no_throttling() -> None:
    use = DeviceTotals(uuid="GPU-0").plus(0, replace(gpu(), throttle=0x1)).plus(SECOND_NS, replace(gpu(), throttle=0x2))
    assert use.result().throttled_s == 0.0
    assert throttle_words(0x1) == throttle_words(None) == ()
    assert throttle_words(0x4 | 0x20) == ("power cap", "heat")


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ((gpu(4.9), gpu(0.0)), False),
        ((gpu(0.0), gpu(5.0)), True),
        ((gpu(0.0), GpuSample()), True),
        ((), True),
    ],
)
def test_work_worth_the_name(gpus: tuple[GpuSample, ...], expected: bool) -> None:
    assert works(sample(1, *gpus)) is expected


# --- lines ---


def test_lines_read_as_they_were_written() -> None:
    lines: list[Line] = [
        header(),
        sample(1, gpu(), gpu()),
        header(devices=3),
        sample(2, ranks=(RankSample(0, 1.0, 2, 3),)),
    ]
    data = b"".join(encode(line) for line in lines)
    assert data.count(b"\n") == 4
    assert decode(data) == (lines, len(data))


def test_a_torn_line_is_left_out_and_half_a_line_waits() -> None:
    first, second, third = (encode(sample(second, gpu())) for second in (1, 2, 3))
    data = encode(header()) + first + second[:40] + b"\n" + third
    lines, used = decode(data + second[:40])
    assert lines == [header(), sample(1, gpu()), sample(3, gpu())]
    assert used == len(data)
    assert decode(second[:40]) == ([], 0)


def test_lines_of_older_and_newer_versions_are_read() -> None:
    assert decode(b"[5,[1.0]]\n")[0] == [Sample(5, HostSample(1.0))]
    longer = encode(sample(1, gpu())).rstrip()[:-1] + b',"new"]\n'
    assert decode(longer)[0] == [sample(1, gpu())]
    assert isinstance(decode(encode(header()).replace(b"{", b'{"new":1,', 1))[0][0], Header)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    lines, used = decode(data)
    assert 0 <= used <= len(data)
    assert len(lines) <= data.count(b"\n") + data.count(b"\r")
