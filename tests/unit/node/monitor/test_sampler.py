"""Sampling a node: host, ranks with their children, GPUs through a fake NVML, fakes, CPU slots."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from serverless_gpu.errors import InvalidOption
from serverless_gpu.model.hardware import DeviceKind, cpu_slots, parse_fake
from serverless_gpu.model.telemetry import SECOND_NS, THROTTLED, GpuSample, HostSample, RankSample
from serverless_gpu.node.devices.inventory import FAKE_STATE_FILE, NvmlProvider
from serverless_gpu.node.monitor.sampler import (
    CLOCK_MEMORY,
    CLOCK_SM,
    NVLINK_RECEIVE,
    NVLINK_TRANSMIT,
    PCIE_RECEIVE,
    PCIE_TRANSMIT,
    SINCE_DRIVER_LOADED,
    TEMPERATURE_GPU,
    UNCORRECTED,
    HostSampler,
    MachineSampler,
    NodeSample,
    NvmlSampler,
    RankSampler,
    RankUsage,
    SampleRequest,
    SamplerThread,
)
from serverless_gpu.testing import FakeClock, FakeGpus
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.node.gpus import GIB, LOST, FakeNvml, FakeNvmlError
from tests.support.node.machine import SampledCard, SampledNvml, sampler, wanted

# --- ranks ---


# --- the host ---

Times = namedtuple("Times", "user idle iowait guest guest_nice")


def test_the_host_is_sampled(tmp_path: Path) -> None:
    host = HostSampler(tmp_path)
    first = host.sample(1)
    assert first.cpu_percent is None
    assert 0 < (first.memory_bytes or 0) < (first.memory_total_bytes or 0)
    assert 0 < (first.disk_bytes or 0) < (first.disk_total_bytes or 0)
    assert first.network_receive_bytes is not None


def test_cpu_is_the_share_between_two_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(
        [Times(10.0, 100.0, 10.0, 5.0, 0.0), Times(15.0, 103.0, 12.0, 5.0, 0.0), Times(1.0, 1.0, 1.0, 0.0, 0.0)]
    )
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(times))
    host = HostSampler(tmp_path)
    assert [host.sample(at).cpu_percent for at in (1, 2, 3)] == [None, 50.0, None]


def test_traffic_is_counted_once_and_not_on_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {
        name: SimpleNamespace(bytes_recv=1, bytes_sent=2) for name in ("lo", "eth0", "eth1", "bond0", "docker0")
    }
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: counters)
    assert HostSampler(tmp_path, tmp_path).sample(1).network_receive_bytes == 4  # a container: no cards at all
    for card in ("eth0", "eth1"):
        (tmp_path / card / "device").mkdir(parents=True)
    sampled = HostSampler(tmp_path, tmp_path).sample(1)
    assert (sampled.network_receive_bytes, sampled.network_transmit_bytes) == (2, 4)


def test_a_home_that_is_gone_has_no_disk(tmp_path: Path) -> None:
    assert HostSampler(tmp_path / "gone").sample(1).disk_bytes is None


def test_the_disk_is_asked_every_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    statvfs = os.statvfs

    def counting(path: Path) -> os.statvfs_result:
        asked.append(path)
        return statvfs(path)

    monkeypatch.setattr(os, "statvfs", counting)
    host = HostSampler(tmp_path)
    for second in range(25):
        assert host.sample(second * SECOND_NS).disk_bytes
    assert len(asked) == 3


# --- NVML ---


# Not here, as in a binding of another version: nvmlDeviceGetTotalEccErrors.


class Door(threading.Event):
    """Holds who waits for it, and says that somebody does."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.reached.set()
        return super().wait(timeout)


def test_everything_a_card_says() -> None:
    card, clock = SampledCard("GPU-a", 1, used=61 * GIB), FakeClock()
    nvml, _ = sampler(card, clock=clock)
    first = nvml.sample(["GPU-a"]).gpus["GPU-a"]
    assert first == GpuSample(
        busy_percent=87.0,
        memory_bytes=61 * GIB,
        memory_total_bytes=80 * GIB,
        power_watts=345.6,
        power_limit_watts=700.0,
        temperature_celsius=61,
        sm_megahertz=1980,
        memory_megahertz=2619,
        throttle=4,
    )
    card.kib = 3000
    clock.advance(2)
    second = nvml.sample(["GPU-a"]).gpus["GPU-a"]
    assert (second.nvlink_receive_bytes_s, second.nvlink_transmit_bytes_s) == (1_024_000, 2_048_000)
    assert (second.pcie_receive_bytes_s, second.pcie_transmit_bytes_s) == (51_200.0, 102_400.0)
    card.kib = 10  # the driver was reset, and counts anew
    clock.advance(1)
    assert nvml.sample(["GPU-a"]).gpus["GPU-a"].nvlink_receive_bytes_s is None


def test_a_figure_a_card_does_not_have_is_unknown_and_the_others_are_not() -> None:
    card = SampledCard("GPU-a", 1)
    card.link_error = 3
    nvml, driver = sampler(card)
    driver.unknown.add("power")
    reading = nvml.sample(["GPU-a"])
    assert reading.gpus["GPU-a"].power_watts is None
    assert reading.gpus["GPU-a"].busy_percent == 87.0
    assert reading.problem == ""


def test_a_lost_card_is_an_empty_sample_and_its_neighbour_is_not() -> None:
    nvml, _ = sampler(SampledCard("GPU-a", 1, broken=LOST), SampledCard("GPU-b", 2))
    reading = nvml.sample(["GPU-a", "GPU-b"])
    assert reading.gpus["GPU-a"] == GpuSample()
    assert reading.gpus["GPU-b"].busy_percent == 87.0
    assert reading.problem == golden("node.machine.gpu-cannot-asked")


def test_pcie_is_measured_two_cards_at_a_time() -> None:
    clock = FakeClock()
    nvml, driver = sampler(*(SampledCard(f"GPU-{number}", number) for number in range(5)), clock=clock)
    uuids = [f"GPU-{number}" for number in range(5)]
    for _ in range(5):
        clock.advance(1)
        before = len(driver.pcie_asked)
        nvml.sample(uuids)
        assert len(driver.pcie_asked) - before == 4  # two cards, both ways
    assert {uuid: driver.pcie_asked.count(uuid) for uuid in uuids} == dict.fromkeys(uuids, 4)


def test_F44_a_driver_that_hangs_costs_samples_of_gpus_only_and_comes_back() -> None:
    clock = FakeClock()
    others = set(threading.enumerate())
    nvml, driver = sampler(SampledCard("GPU-a", 1), clock=clock, wait_s=0.0)
    wait_for(lambda: nvml.sample(["GPU-a"]).gpus["GPU-a"].busy_percent == 87.0, "a reading")
    release = driver.stuck = Door()
    wait_for(lambda: (nvml.sample(["GPU-a"]), release.reached.is_set())[1], "the driver to hang")
    assert nvml.sample(["GPU-a"]).gpus["GPU-a"].busy_percent == 87.0  # the reading before
    clock.advance(6)
    silent = nvml.sample(["GPU-a"])
    assert silent.gpus == {"GPU-a": GpuSample()}
    assert silent.problem == golden("node.machine.nvml-does-answer")
    assert [thread.name for thread in threading.enumerate() if thread not in others] == ["sgpu-nvml-samples"]
    driver.stuck = None
    release.set()
    wait_for(lambda: nvml.sample(["GPU-a"]).gpus["GPU-a"].busy_percent == 87.0, "a reading again")
    assert nvml.sample(["GPU-a"]).problem == ""


def test_a_driver_that_does_not_work_is_said() -> None:
    nvml, driver = sampler(SampledCard("GPU-a", 1))
    driver.init_error = FakeNvmlError(18, "Driver/library version mismatch")
    assert "Driver/library version mismatch" in nvml.sample(["GPU-a"]).problem
    driver.init_error = FakeNvmlError(FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED, "")
    assert nvml.sample(["GPU-a"]).problem == golden("node.gpus.nvidia-driver-ask")


def test_the_real_binding_has_every_name_and_number_that_is_used() -> None:
    pynvml = pytest.importorskip("pynvml")
    used = [name for name in vars(SampledNvml) if name.startswith("nvml")]
    assert [name for name in (*used, "nvmlDeviceGetTotalEccErrors") if not hasattr(pynvml, name)] == []
    numbers = {
        "NVML_TEMPERATURE_GPU": TEMPERATURE_GPU,
        "NVML_CLOCK_SM": CLOCK_SM,
        "NVML_CLOCK_MEM": CLOCK_MEMORY,
        "NVML_PCIE_UTIL_TX_BYTES": PCIE_TRANSMIT,
        "NVML_PCIE_UTIL_RX_BYTES": PCIE_RECEIVE,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": UNCORRECTED,
        "NVML_VOLATILE_ECC": SINCE_DRIVER_LOADED,
        "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX": NVLINK_TRANSMIT,
        "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX": NVLINK_RECEIVE,
    }
    assert {name: getattr(pynvml, name) for name in numbers} == numbers
    throttled = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
    assert sum(getattr(pynvml, f"nvmlClocksEventReason{name}") for name in throttled) == THROTTLED
    with_or_without_a_driver = NvmlSampler(wait_s=20).sample(["GPU-no-such"])
    assert with_or_without_a_driver.gpus == {"GPU-no-such": GpuSample()}
    assert with_or_without_a_driver.problem


# --- all of it ---


def test_who_looks_sees_every_device_of_the_node(tmp_path: Path) -> None:
    fakes = parse_fake("H100:4")
    machine = MachineSampler(tmp_path)
    attempts = {"a:1": (fakes[2:3], {0: os.getpid()}), "b:1": (fakes[:2], {})}
    look = machine.sample(wanted(attempts, "H100:4"), 1)
    assert look.devices == fakes
    assert (look.gpus[fakes[2].uuid].memory_bytes or 0) > 1_000_000
    assert look.gpus[fakes[3].uuid] == GpuSample(0.0, 0, fakes[3].memory_bytes)
    assert [rank.rank for rank in look.ranks["a:1"]] == [0]
    assert look.ranks["b:1"] == ()
    unwatched = machine.sample(wanted(attempts), 1)
    assert {device.uuid for device in unwatched.devices} == {device.uuid for device in fakes[:3]}
    assert machine.sample(wanted({}, "A10:1"), 1).devices == parse_fake("A10:1")


def test_a_node_that_cannot_be_listed_says_why(tmp_path: Path) -> None:
    machine = MachineSampler(tmp_path, clock=(clock := FakeClock()))
    look = machine.sample(wanted({}, "nonsense"), 1)
    assert look.devices == ()
    assert golden("node.machine.serverless-gpu-fake") in look.problems[0]
    (tmp_path / "config.toml").write_text("not toml")
    assert machine.sample(wanted({}, "H100:1"), 1).problems
    (tmp_path / "config.toml").unlink()
    assert machine.sample(wanted({}, "H100:1"), 1).problems  # the list is made every half minute
    clock.advance(31)
    assert machine.sample(wanted({}, "H100:1"), 1).problems == ()


def test_a_node_without_gpus_has_slots_of_its_cpu(tmp_path: Path) -> None:
    if NvmlProvider().devices():
        pytest.skip("this machine has GPUs")
    assert {device.kind for device in MachineSampler(tmp_path).sample(wanted({}, ""), 1).devices} == {DeviceKind.CPU}


def test_fakes_do_what_the_file_says_and_else_what_their_rank_does(tmp_path: Path) -> None:
    fakes = parse_fake("H100:3")
    state = FakeGpus(tmp_path)
    state.shows(fakes[0].uuid, busy_percent=93, memory_bytes=5, power_watts=600.5, throttle=4)
    state.set(fakes[1].uuid, memory_used_bytes=7)
    machine = MachineSampler(tmp_path)
    total = fakes[0].memory_bytes
    gpus = machine.sample(wanted({"a:1": (fakes, {})}), 1).gpus
    assert gpus[fakes[0].uuid] == GpuSample(93, 5, total, 600.5, throttle=4)
    assert isinstance(gpus[fakes[0].uuid].throttle, int)
    assert gpus[fakes[1].uuid] == GpuSample(0.0, 7, total)
    assert gpus[fakes[2].uuid] == GpuSample(0.0, 0, total)
    gpus = machine.sample(wanted({"a:1": (fakes[2:], {0: os.getpid()})}), 1).gpus
    assert (gpus[fakes[2].uuid].memory_bytes or 0) > 1_000_000
    with pytest.raises(InvalidOption, match=re.escape(golden("node.machine.telemetry-figure-busy"))):
        state.shows(fakes[0].uuid, busy=1)


def test_a_state_file_that_cannot_be_read_and_a_fake_with_a_problem_are_no_errors(tmp_path: Path) -> None:
    (fake,) = parse_fake("H100:1")
    machine = MachineSampler(tmp_path)

    def seen(state: str) -> GpuSample:
        (tmp_path / FAKE_STATE_FILE).write_text(state)
        return machine.sample(wanted({"a:1": ([fake], {})}), 1).gpus[fake.uuid]

    assert seen(json.dumps({fake.uuid: {"problem": "lost", "other": [1]}})) == GpuSample()
    assert seen(json.dumps({fake.uuid: {"sampled": {"throttle": 0.5, "other": 1}}})).throttle is None
    assert seen("{").memory_bytes == 0


def test_cpu_slots_are_what_their_ranks_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slots = cpu_slots(2)
    machine = MachineSampler(tmp_path)
    looks = {("a:1", 0): RankUsage(250.0, 10, (1,)), ("a:1", 1): RankUsage(30.0, 20, (2,))}
    monkeypatch.setattr(RankSampler, "sample", lambda _processes, at_ns, roots: looks)
    look = machine.sample(wanted({"a:1": (slots, {0: 1, 1: 2})}), 1)
    assert look.gpus == {"CPU-0": GpuSample(100.0, 10), "CPU-1": GpuSample(30.0, 20)}
    assert look.ranks["a:1"][0] == RankSample(0, 250.0, 10)
    # One process for a node has all of its devices.
    looks.pop(("a:1", 1))
    look = machine.sample(wanted({"a:1": (slots, {0: 1})}), 1)
    assert look.gpus == dict.fromkeys(("CPU-0", "CPU-1"), GpuSample(100.0, 5))


def test_a_binding_that_fails_in_its_own_way_is_said_and_asked_again() -> None:
    card = SampledCard("GPU-a", 1, broken=ValueError("no such structure"))
    nvml, _ = sampler(card)
    reading = nvml.sample(["GPU-a"])
    assert reading.gpus == {"GPU-a": GpuSample()}
    assert reading.problem == golden("node.machine.nvml-cannot-asked")
    card.broken = None
    assert nvml.sample(["GPU-a"]).gpus["GPU-a"].memory_total_bytes == 80 * GIB


class Failing:
    """A machine that cannot be looked at twice, and is made at the second try."""

    made = 0

    def __init__(self) -> None:
        Failing.made += 1
        self.looks = 0
        if Failing.made == 1:
            raise OSError("too many open files")

    def sample(self, wanted: SampleRequest, at_ns: int) -> NodeSample:
        self.looks += 1
        if self.looks < 3:
            raise MemoryError("none left")
        return NodeSample(at_ns=at_ns, devices=(), host=HostSample(), gpus={}, ranks={})


def test_a_look_that_fails_is_left_out_and_logged_once_and_the_next_one_succeeds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rung = threading.Semaphore(0)
    thread = SamplerThread(Failing, FakeClock(), rung.release)
    for _ in range(3):
        assert thread.ask(SampleRequest())
        assert rung.acquire(timeout=60)
        assert thread.take() is None
    assert thread.ask(SampleRequest())
    assert rung.acquire(timeout=60)
    assert thread.take() is not None
    logged = capsys.readouterr().err
    assert (logged.count("OSError: too many open files"), logged.count("MemoryError: none left")) == (1, 1)
