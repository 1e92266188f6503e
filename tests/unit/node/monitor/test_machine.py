"""Sampling a node: host, ranks with their children, GPUs through a fake NVML, fakes, CPU slots."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from serverless_gpu.errors import InvalidOption
from serverless_gpu.model.hardware import Device, DeviceKind, cpu_slots, parse_fake
from serverless_gpu.model.telemetry import SECOND_NS, THROTTLED, GpuSample, RankSample
from serverless_gpu.node.gpus import FAKE_STATE_FILE, NvmlProvider
from serverless_gpu.node.monitor import devices, ranks
from serverless_gpu.node.monitor.devices import NvmlSampler
from serverless_gpu.node.monitor.host import Host
from serverless_gpu.node.monitor.machine import ThisMachine
from serverless_gpu.node.monitor.ranks import RankLook, RankProcesses
from serverless_gpu.node.monitor.sampling import Wanted
from serverless_gpu.testing import FakeClock, FakeGpus
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.node.gpus import GIB, LOST, Card, FakeNvml, FakeNvmlError

KEY = ("run:1", 0)

# A parent with a child; both allocate, and the child works until its standard input ends.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys\\nx = bytearray(30_000_000)\\nprint('up', flush=True)\\n"
                          "sys.stdin.readline()\\nfor _ in range(3_000_000): pass\\nprint('done', flush=True)\\n"
                          "sys.stdin.read()"])
child.wait()
sys.stdin.read()
"""


@pytest.fixture
def family() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "up\n"
    with process:
        yield process
        process.stdin.close()


# --- ranks ---


def test_a_rank_is_its_process_and_everything_it_started(family: subprocess.Popen[str]) -> None:
    processes = RankProcesses()
    first = processes.look(1 * SECOND_NS, {family.pid: KEY})[KEY]
    assert len(first.pids) == 2
    assert first.cpu_percent is None  # there is nothing to compare with
    assert first.memory_bytes > 30_000_000
    assert family.stdin is not None
    assert family.stdout is not None
    family.stdin.write("go\n")
    family.stdin.flush()
    assert family.stdout.readline() == "done\n"
    second = processes.look(2 * SECOND_NS, {family.pid: KEY})[KEY]
    assert second.cpu_percent is not None
    assert second.cpu_percent > 0
    assert processes.look(3 * SECOND_NS, {}) == {}


def test_a_child_that_was_there_before_its_rank_was_known_is_found(family: subprocess.Popen[str]) -> None:
    processes = RankProcesses()
    assert set(processes.look(1, {os.getpid(): ("other:1", 0)})) == {("other:1", 0)}
    looks = processes.look(2, {os.getpid(): ("other:1", 0), family.pid: KEY})
    assert len(looks[KEY].pids) == 2
    assert not set(looks[KEY].pids) & set(looks["other:1", 0].pids)


def test_a_rank_that_is_gone_is_not_there() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert RankProcesses().look(1, {process.pid: KEY}) == {}


def test_a_child_whose_parent_ended_stays_its_ranks(family: subprocess.Popen[str]) -> None:
    processes = RankProcesses()
    (child,) = set(processes.look(1, {family.pid: KEY})[KEY].pids) - {family.pid}
    os.kill(family.pid, 9)
    wait_for(lambda: psutil.Process(family.pid).status() == psutil.STATUS_ZOMBIE, "the parent to end")
    assert child in processes.look(2, {family.pid: KEY})[KEY].pids
    os.kill(child, 9)


def test_processes_of_others_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    stat = ranks._stat

    def counting(pid: int) -> Any:
        asked.append(pid)
        return stat(pid)

    monkeypatch.setattr(ranks, "_stat", counting)
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        processes = RankProcesses()
        processes.look(1, {process.pid: KEY})
        assert os.getpid() in asked
        asked.clear()
        processes.look(2, {process.pid: KEY})
        assert os.getpid() not in asked
        assert process.pid in asked
    finally:
        process.communicate()


# --- the host ---

Times = namedtuple("Times", "user idle iowait guest guest_nice")


def test_the_host_is_sampled(tmp_path: Path) -> None:
    host = Host(tmp_path)
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
    host = Host(tmp_path)
    assert [host.sample(at).cpu_percent for at in (1, 2, 3)] == [None, 50.0, None]


def test_traffic_is_counted_once_and_not_on_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {
        name: SimpleNamespace(bytes_recv=1, bytes_sent=2) for name in ("lo", "eth0", "eth1", "bond0", "docker0")
    }
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: counters)
    assert Host(tmp_path, tmp_path).sample(1).network_receive_bytes == 4  # a container: no cards at all
    for card in ("eth0", "eth1"):
        (tmp_path / card / "device").mkdir(parents=True)
    sampled = Host(tmp_path, tmp_path).sample(1)
    assert (sampled.network_receive_bytes, sampled.network_transmit_bytes) == (2, 4)


def test_a_home_that_is_gone_has_no_disk(tmp_path: Path) -> None:
    assert Host(tmp_path / "gone").sample(1).disk_bytes is None


def test_the_disk_is_asked_every_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    statvfs = os.statvfs

    def counting(path: Path) -> os.statvfs_result:
        asked.append(path)
        return statvfs(path)

    monkeypatch.setattr(os, "statvfs", counting)
    host = Host(tmp_path)
    for second in range(25):
        assert host.sample(second * SECOND_NS).disk_bytes
    assert len(asked) == 3


# --- NVML ---


class SampledCard(Card):
    """A card with everything a sample asks for."""

    watts = 345_600
    throttle = 0x4
    temperature = 61
    kib = 1000
    link_error = 0
    pcie = 50


class SampledNvml(FakeNvml):
    """A driver that also answers what a sample asks; `unknown` are functions this driver does not have."""

    def __init__(self, *cards: Card) -> None:
        super().__init__(*cards)
        self.unknown: set[str] = set()
        self.pcie_asked: list[str] = []

    def nvmlDeviceGetUtilizationRates(self, handle: object, /) -> SimpleNamespace:
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle: SampledCard, /) -> int:
        if "power" in self.unknown:
            raise FakeNvmlError(3, "Not Supported")
        return handle.watts

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: object, /) -> int:
        return 700_000

    def nvmlDeviceGetTemperature(self, handle: SampledCard, sensor: int, /) -> int:
        assert sensor == 0
        return handle.temperature

    def nvmlDeviceGetClockInfo(self, handle: object, clock: int, /) -> int:
        return {1: 1980, 2: 2619}[clock]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: SampledCard, /) -> int:
        return handle.throttle

    def nvmlDeviceGetFieldValues(self, handle: SampledCard, fields: list[tuple[int, int]], /) -> list[SimpleNamespace]:
        assert fields[0][1] == 0xFFFFFFFF
        kib = handle.kib * (2 if fields[0][0] == 138 else 1)
        return [SimpleNamespace(nvmlReturn=handle.link_error, value=SimpleNamespace(ullVal=kib))]

    def nvmlDeviceGetPcieThroughput(self, handle: SampledCard, way: int, /) -> int:
        self.pcie_asked.append(handle.uuid)
        return handle.pcie * (2 if way == 0 else 1)

    # Not here, as in a binding of another version: nvmlDeviceGetTotalEccErrors.


class Door(threading.Event):
    """Holds who waits for it, and says that somebody does."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.reached.set()
        return super().wait(timeout)


def sampler(*cards: Card, clock: FakeClock | None = None, pids_visible: bool = True) -> tuple[NvmlSampler, SampledNvml]:
    nvml = SampledNvml(*cards)
    return NvmlSampler(nvml=nvml, clock=clock or FakeClock(), wait_s=20, pids_visible=pids_visible), nvml


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
    assert reading.problem == golden("unit.machine.gpu-cannot-asked")


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
    nvml, driver = sampler(SampledCard("GPU-a", 1), clock=clock)
    nvml._wait_s = 0.0
    wait_for(lambda: nvml.sample(["GPU-a"]).gpus["GPU-a"].busy_percent == 87.0, "a reading")
    release = driver.stuck = Door()
    wait_for(lambda: (nvml.sample(["GPU-a"]), release.reached.is_set())[1], "the driver to hang")
    assert nvml.sample(["GPU-a"]).gpus["GPU-a"].busy_percent == 87.0  # the reading before
    clock.advance(6)
    silent = nvml.sample(["GPU-a"])
    assert silent.gpus == {"GPU-a": GpuSample()}
    assert silent.problem == golden("unit.machine.nvml-does-answer")
    assert sum(thread.name == "sgpu-nvml-samples" and thread is nvml._thread for thread in threading.enumerate()) == 1
    driver.stuck = None
    release.set()
    wait_for(lambda: nvml.sample(["GPU-a"]).gpus["GPU-a"].busy_percent == 87.0, "a reading again")
    assert nvml.sample(["GPU-a"]).problem == ""


def test_a_driver_that_does_not_work_is_said() -> None:
    nvml, driver = sampler(SampledCard("GPU-a", 1))
    driver.init_error = FakeNvmlError(18, "Driver/library version mismatch")
    assert "Driver/library version mismatch" in nvml.sample(["GPU-a"]).problem
    driver.init_error = FakeNvmlError(FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED, "")
    assert nvml.sample(["GPU-a"]).problem == golden("unit.gpus.nvidia-driver-ask")


def test_the_real_binding_has_every_name_and_number_that_is_used() -> None:
    pynvml = pytest.importorskip("pynvml")
    used = [name for name in vars(SampledNvml) if name.startswith("nvml")]
    assert [name for name in (*used, "nvmlDeviceGetTotalEccErrors") if not hasattr(pynvml, name)] == []
    numbers = {
        "NVML_TEMPERATURE_GPU": devices._TEMPERATURE_GPU,
        "NVML_CLOCK_SM": devices._CLOCK_SM,
        "NVML_CLOCK_MEM": devices._CLOCK_MEMORY,
        "NVML_PCIE_UTIL_TX_BYTES": devices._PCIE_TRANSMIT,
        "NVML_PCIE_UTIL_RX_BYTES": devices._PCIE_RECEIVE,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": devices._UNCORRECTED,
        "NVML_VOLATILE_ECC": devices._SINCE_DRIVER_LOADED,
        "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX": devices._NVLINK_TRANSMIT,
        "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX": devices._NVLINK_RECEIVE,
    }
    assert {name: getattr(pynvml, name) for name in numbers} == numbers
    throttled = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
    assert sum(getattr(pynvml, f"nvmlClocksEventReason{name}") for name in throttled) == THROTTLED
    with_or_without_a_driver = NvmlSampler(wait_s=20).sample(["GPU-no-such"])
    assert with_or_without_a_driver.gpus == {"GPU-no-such": GpuSample()}
    assert with_or_without_a_driver.problem


# --- all of it ---


def real_device(uuid: str) -> Device:
    return Device(uuid=uuid, index=0, type="H100", memory_bytes=80 * GIB, kind=DeviceKind.GPU)


def wanted(attempts: Mapping[str, tuple[Sequence[Device], Mapping[int, int]]], fakes: str | None = None) -> Wanted:
    """Return what a monitor asks about these attempts: their devices, and pids by rank."""
    used_by = {
        device.uuid: (key, rank)
        for key, (devices, pids) in attempts.items()
        for device, rank in zip(devices, list(pids) * (len(devices) if len(pids) == 1 else 1), strict=False)
    }
    return Wanted(
        devices=tuple(device for devices, _ in attempts.values() for device in devices),
        ranks={key: pids for key, (_, pids) in attempts.items()},
        used_by=used_by,
        fakes=fakes,
    )


@pytest.mark.parametrize(("pids_visible", "expected"), [(True, 7 * GIB), (False, None)])
def test_gpu_memory_of_a_rank_is_that_of_all_its_processes(
    tmp_path: Path, family: subprocess.Popen[str], pids_visible: bool, expected: int | None
) -> None:
    card = SampledCard("GPU-a", 1)
    nvml, _ = sampler(card, pids_visible=pids_visible)
    machine = ThisMachine(tmp_path, nvml=nvml, clock=FakeClock())
    child = psutil.Process(family.pid).children()[0].pid
    card.compute = [(family.pid, 4 * GIB), (child, 3 * GIB), (1, 9 * GIB), (2, None)]
    attempts = {"run:1": ([real_device("GPU-a")], {5: family.pid}), "cpu:1": (cpu_slots(1), {0: os.getpid()})}
    look = machine.look(wanted(attempts), 77)
    assert look.at_ns == 77
    assert look.ranks["cpu:1"][0].gpu_memory_bytes is None
    assert [(rank.rank, rank.gpu_memory_bytes) for rank in look.ranks["run:1"]] == [(5, expected)]
    assert look.gpus["GPU-a"].busy_percent == 87.0


def test_who_looks_sees_every_device_of_the_node(tmp_path: Path) -> None:
    fakes = parse_fake("H100:4")
    machine = ThisMachine(tmp_path)
    attempts = {"a:1": (fakes[2:3], {0: os.getpid()}), "b:1": (fakes[:2], {})}
    look = machine.look(wanted(attempts, "H100:4"), 1)
    assert look.devices == fakes
    assert (look.gpus[fakes[2].uuid].memory_bytes or 0) > 1_000_000
    assert look.gpus[fakes[3].uuid] == GpuSample(0.0, 0, fakes[3].memory_bytes)
    assert [rank.rank for rank in look.ranks["a:1"]] == [0]
    assert look.ranks["b:1"] == ()
    unwatched = machine.look(wanted(attempts), 1)
    assert {device.uuid for device in unwatched.devices} == {device.uuid for device in fakes[:3]}
    assert machine.look(wanted({}, "A10:1"), 1).devices == parse_fake("A10:1")


def test_a_node_that_cannot_be_listed_says_why(tmp_path: Path) -> None:
    machine = ThisMachine(tmp_path, clock=(clock := FakeClock()))
    look = machine.look(wanted({}, "nonsense"), 1)
    assert look.devices == ()
    assert golden("unit.machine.serverless-gpu-fake") in look.problems[0]
    (tmp_path / "config.toml").write_text("not toml")
    assert machine.look(wanted({}, "H100:1"), 1).problems
    (tmp_path / "config.toml").unlink()
    assert machine.look(wanted({}, "H100:1"), 1).problems  # the list is made every half minute
    clock.advance(31)
    assert machine.look(wanted({}, "H100:1"), 1).problems == ()


def test_a_node_without_gpus_has_slots_of_its_cpu(tmp_path: Path) -> None:
    if NvmlProvider().devices():
        pytest.skip("this machine has GPUs")
    assert {device.kind for device in ThisMachine(tmp_path).look(wanted({}, ""), 1).devices} == {DeviceKind.CPU}


def test_fakes_do_what_the_file_says_and_else_what_their_rank_does(tmp_path: Path) -> None:
    fakes = parse_fake("H100:3")
    state = FakeGpus(tmp_path)
    state.shows(fakes[0].uuid, busy_percent=93, memory_bytes=5, power_watts=600.5, throttle=4)
    state.set(fakes[1].uuid, memory_used_bytes=7)
    machine = ThisMachine(tmp_path)
    total = fakes[0].memory_bytes
    gpus = machine.look(wanted({"a:1": (fakes, {})}), 1).gpus
    assert gpus[fakes[0].uuid] == GpuSample(93, 5, total, 600.5, throttle=4)
    assert isinstance(gpus[fakes[0].uuid].throttle, int)
    assert gpus[fakes[1].uuid] == GpuSample(0.0, 7, total)
    assert gpus[fakes[2].uuid] == GpuSample(0.0, 0, total)
    gpus = machine.look(wanted({"a:1": (fakes[2:], {0: os.getpid()})}), 1).gpus
    assert (gpus[fakes[2].uuid].memory_bytes or 0) > 1_000_000
    with pytest.raises(InvalidOption, match=re.escape(golden("unit.machine.telemetry-figure-busy"))):
        state.shows(fakes[0].uuid, busy=1)


def test_a_state_file_that_cannot_be_read_and_a_fake_with_a_problem_are_no_errors(tmp_path: Path) -> None:
    (fake,) = parse_fake("H100:1")
    machine = ThisMachine(tmp_path)

    def seen(state: str) -> GpuSample:
        (tmp_path / FAKE_STATE_FILE).write_text(state)
        return machine.look(wanted({"a:1": ([fake], {})}), 1).gpus[fake.uuid]

    assert seen(json.dumps({fake.uuid: {"problem": "lost", "other": [1]}})) == GpuSample()
    assert seen(json.dumps({fake.uuid: {"sampled": {"throttle": 0.5, "other": 1}}})).throttle is None
    assert seen("{").memory_bytes == 0


def test_cpu_slots_are_what_their_ranks_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slots = cpu_slots(2)
    machine = ThisMachine(tmp_path)
    looks = {("a:1", 0): RankLook(250.0, 10, (1,)), ("a:1", 1): RankLook(30.0, 20, (2,))}
    monkeypatch.setattr(machine._processes, "look", lambda at_ns, roots: looks)
    look = machine.look(wanted({"a:1": (slots, {0: 1, 1: 2})}), 1)
    assert look.gpus == {"CPU-0": GpuSample(100.0, 10), "CPU-1": GpuSample(30.0, 20)}
    assert look.ranks["a:1"][0] == RankSample(0, 250.0, 10)
    # One process for a node has all of its devices.
    looks.pop(("a:1", 1))
    look = machine.look(wanted({"a:1": (slots, {0: 1})}), 1)
    assert look.gpus == dict.fromkeys(("CPU-0", "CPU-1"), GpuSample(100.0, 5))


def test_a_rank_that_ended_has_an_entry_without_figures(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    look = ThisMachine(tmp_path).look(wanted({"a:1": (cpu_slots(1), {0: process.pid})}), 1)
    assert look.ranks["a:1"] == (RankSample(0),)
    assert look.gpus["CPU-0"] == GpuSample()


def test_a_binding_that_fails_in_its_own_way_is_said_and_asked_again() -> None:
    card = SampledCard("GPU-a", 1, broken=ValueError("no such structure"))
    nvml, _ = sampler(card)
    reading = nvml.sample(["GPU-a"])
    assert reading.gpus == {"GPU-a": GpuSample()}
    assert reading.problem == golden("unit.machine.nvml-cannot-asked")
    card.broken = None
    assert nvml.sample(["GPU-a"]).gpus["GPU-a"].memory_total_bytes == 80 * GIB
