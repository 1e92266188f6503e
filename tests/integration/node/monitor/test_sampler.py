"""Sampling a node: host, ranks with their children, GPUs through a fake NVML, fakes, CPU slots."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from serverless_gpu.model.hardware import Device, DeviceKind, cpu_slots
from serverless_gpu.model.telemetry import SECOND_NS, GpuSample, RankSample
from serverless_gpu.node.monitor.sampler import MachineSampler, RankSampler, read_stat
from serverless_gpu.testing import FakeClock
from tests.support.local.observe import wait_for
from tests.support.node.gpus import GIB
from tests.support.node.machine import SampledCard, sampler, wanted

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


def test_a_rank_is_its_process_and_everything_it_started(family: subprocess.Popen[str]) -> None:
    processes = RankSampler()
    first = processes.sample(1 * SECOND_NS, {family.pid: KEY})[KEY]
    assert len(first.pids) == 2
    assert first.cpu_percent is None  # there is nothing to compare with
    assert first.memory_bytes > 30_000_000
    assert family.stdin is not None
    assert family.stdout is not None
    family.stdin.write("go\n")
    family.stdin.flush()
    assert family.stdout.readline() == "done\n"
    second = processes.sample(2 * SECOND_NS, {family.pid: KEY})[KEY]
    assert second.cpu_percent is not None
    assert second.cpu_percent > 0
    assert processes.sample(3 * SECOND_NS, {}) == {}


def test_a_child_that_was_there_before_its_rank_was_known_is_found(family: subprocess.Popen[str]) -> None:
    processes = RankSampler()
    assert set(processes.sample(1, {os.getpid(): ("other:1", 0)})) == {("other:1", 0)}
    looks = processes.sample(2, {os.getpid(): ("other:1", 0), family.pid: KEY})
    assert len(looks[KEY].pids) == 2
    assert not set(looks[KEY].pids) & set(looks["other:1", 0].pids)


def test_a_rank_that_is_gone_is_not_there() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert RankSampler().sample(1, {process.pid: KEY}) == {}


def test_a_child_whose_parent_ended_stays_its_ranks(family: subprocess.Popen[str]) -> None:
    processes = RankSampler()
    (child,) = set(processes.sample(1, {family.pid: KEY})[KEY].pids) - {family.pid}
    os.kill(family.pid, 9)
    wait_for(lambda: psutil.Process(family.pid).status() == psutil.STATUS_ZOMBIE, "the parent to end")
    assert child in processes.sample(2, {family.pid: KEY})[KEY].pids
    os.kill(child, 9)


def test_processes_of_others_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    stat = read_stat

    def counting(pid: int) -> Any:
        asked.append(pid)
        return stat(pid)

    monkeypatch.setattr("serverless_gpu.node.monitor.sampler.read_stat", counting)
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        processes = RankSampler()
        processes.sample(1, {process.pid: KEY})
        assert os.getpid() in asked
        asked.clear()
        processes.sample(2, {process.pid: KEY})
        assert os.getpid() not in asked
        assert process.pid in asked
    finally:
        process.communicate()


def real_device(uuid: str) -> Device:
    return Device(uuid=uuid, index=0, type="H100", memory_bytes=80 * GIB, kind=DeviceKind.GPU)


@pytest.mark.parametrize(("pids_visible", "expected"), [(True, 7 * GIB), (False, None)])
def test_gpu_memory_of_a_rank_is_that_of_all_its_processes(
    tmp_path: Path, family: subprocess.Popen[str], pids_visible: bool, expected: int | None
) -> None:
    card = SampledCard("GPU-a", 1)
    nvml, _ = sampler(card, pids_visible=pids_visible)
    machine = MachineSampler(tmp_path, nvml=nvml, clock=FakeClock())
    child = psutil.Process(family.pid).children()[0].pid
    card.compute = [(family.pid, 4 * GIB), (child, 3 * GIB), (1, 9 * GIB), (2, None)]
    attempts = {"run:1": ([real_device("GPU-a")], {5: family.pid}), "cpu:1": (cpu_slots(1), {0: os.getpid()})}
    look = machine.sample(wanted(attempts), 77)
    assert look.at_ns == 77
    assert look.ranks["cpu:1"][0].gpu_memory_bytes is None
    assert [(rank.rank, rank.gpu_memory_bytes) for rank in look.ranks["run:1"]] == [(5, expected)]
    assert look.gpus["GPU-a"].busy_percent == 87.0


def test_a_rank_that_ended_has_an_entry_without_figures(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    look = MachineSampler(tmp_path).sample(wanted({"a:1": (cpu_slots(1), {0: process.pid})}), 1)
    assert look.ranks["a:1"] == (RankSample(0),)
    assert look.gpus["CPU-0"] == GpuSample()
