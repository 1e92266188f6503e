"""Looking: bounded, each look by itself, and truthful about what it could not see."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest

from serverless_gpu.doctor.facts import GpuFacts, GpuHealth, Imported, UnknownFact
from serverless_gpu.doctor.probes import gpus
from serverless_gpu.doctor.probes.bounded_calls import ChildEnded, side_by_side
from serverless_gpu.doctor.probes.environment import read_imports
from serverless_gpu.doctor.probes.machine import (
    count_ports,
    count_sockets,
    filesystem_of,
    look_at_home,
    look_at_limits,
    look_at_runs,
)
from tests.support.golden import golden
from tests.support.node.gpus import Card, FakeNvml, FakeNvmlError

MOUNTS = """\
21 1 8:1 / / rw,relatime - ext4 /dev/sda rw
30 21 0:30 / /home rw - nfs4 server:/home rw
31 30 0:31 / /home/me/my\\040disk rw - xfs /dev/sdb rw
40 21 0:40 / /tmp rw - tmpfs tmpfs rw
41 21 0:41 / /tmp rw - overlay overlay rw
half a line
"""


def test_looks_do_not_wait_for_each_other() -> None:
    release = threading.Event()
    started = time.monotonic()
    seen = side_by_side(
        {"hangs": lambda: str(release.wait(30)), "raises": lambda: str(1 / 0), "works": lambda: "x"}, 0.5
    )
    release.set()
    assert time.monotonic() - started < 20
    assert seen == {
        "hangs": UnknownFact("no answer within 0.5 s"),
        "raises": UnknownFact("ZeroDivisionError: division by zero"),
        "works": "x",
    }


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/x", "ext4"),
        ("/home/me", "nfs4"),
        ("/homes", "ext4"),
        ("/home/me/my disk/h", "xfs"),
        ("/tmp/x", "overlay"),
        ("/", "ext4"),
    ],
)
def test_the_file_system_of_a_path(path: str, kind: str) -> None:
    assert filesystem_of(path, MOUNTS) == kind


def test_numbers_of_the_kernel() -> None:
    assert count_ports("32768\t60999\n") == 28_232
    assert count_ports("") == 0
    assert count_sockets("sockets: used 5\nTCP: inuse 7 orphan 0 tw 3 alloc 9 mem 1\nUDP: inuse 4\n") == 10
    assert count_sockets("") == 0


def test_a_home(tmp_path: Path) -> None:
    facts = look_at_home({"SERVERLESS_GPU_HOME": str(tmp_path)})
    assert (facts.root, facts.problem, facts.note) == (str(tmp_path), "", "")
    assert facts.filesystem and facts.disks and facts.sockets
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "locks", "runs"]


def test_no_home_to_be_had(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "home")
    facts = look_at_home({"SERVERLESS_GPU_HOME": place, "TMPDIR": str(tmp_path / "file")})
    assert facts.root == ""
    assert facts.problem.startswith(f"neither {place} (Not a directory) nor ")
    assert facts.hint == golden("doctor.doctor_gathering.set-serverless-gpu")


def test_a_home_that_takes_no_bytes_is_found_by_writing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))  # the kernel's own way to refuse a write in the middle
    try:
        facts = look_at_home({"SERVERLESS_GPU_HOME": str(tmp_path)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert facts.problem == golden("doctor.doctor_gathering.cannot-write-file", tmp_path=tmp_path)
    assert facts.hint == golden("doctor.doctor_gathering.set-serverless-gpu")


def test_a_configuration_with_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[prices]\nH100 = "much"\n')
    facts = look_at_home({"SERVERLESS_GPU_HOME": str(tmp_path)})
    assert facts.configuration_problem == golden(
        "doctor.doctor_gathering.table-prices-expected", value=tmp_path / "config.toml"
    )


def test_runs_and_limits(tmp_path: Path) -> None:
    runs = look_at_runs({"SERVERLESS_GPU_HOME": str(tmp_path)})
    assert (runs.count, runs.days, runs.last_run) == (0, 30.0, "")
    assert look_at_limits().descriptors is not None


# --- processes of their own ------------------------------------------------------------------------------------------


def test_an_importing_process_that_ends_early_leaves_its_last_word() -> None:
    records: list[tuple[object, ...]] = [("begin", "a"), ("end", "a", "ok", "", ""), ("begin", "b")]
    crashed = read_imports(records, ChildEnded(b"", "boom", -11))
    assert crashed.modules == {
        "a": Imported(outcome="ok"),
        "b": Imported(outcome="crashed", error="SIGSEGV ended the process", written="boom"),
    }
    assert read_imports(records, ChildEnded(b"", "", None)).modules["b"].outcome == "hung"


def test_a_torch_that_hangs_on_cuda_keeps_its_version() -> None:
    records: list[tuple[object, ...]] = [
        ("torch", {"version": "2.9.0", "cuda": "12.8", "hip": ""}),
        ("begin", "torch.cuda"),
    ]
    torch = read_imports(records, ChildEnded(b"", "", None)).torch
    assert torch is not None
    assert (torch.version, torch.devices, torch.problem) == (
        "2.9.0",
        None,
        golden("doctor.doctor_gathering.took-too-long"),
    )


class Driver(FakeNvml):
    """A driver that also says what the doctor asks."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.124.06"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080

    def nvmlDeviceGetCudaComputeCapability(self, handle: object) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetTotalEccErrors(self, handle: object, kind: int, counter: int) -> int:
        return 2

    def nvmlDeviceGetRemappedRows(self, handle: object) -> tuple[int, int, bool, bool]:
        return (0, 1, True, False)


class Silent(Driver):
    """A driver that answers no question about the health of a card."""

    def nvmlDeviceGetCudaComputeCapability(self, handle: object) -> tuple[int, int]:
        raise FakeNvmlError(3, "not supported")

    def nvmlDeviceGetTotalEccErrors(self, handle: object, kind: int, counter: int) -> int:
        raise FakeNvmlError(3, "not supported")

    def nvmlDeviceGetRemappedRows(self, handle: object) -> tuple[int, int, bool, bool]:
        raise FakeNvmlError(3, "not supported")


def test_what_nvml_does_not_say_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", cast(ModuleType, Silent(Card("GPU-a", 1))))
    assert gpus.ask_nvml("").health == {"GPU-a": GpuHealth()}


def test_what_a_driver_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", cast(ModuleType, Driver(Card("GPU-a", 1), Card("GPU-b", 2))))
    facts = gpus.ask_nvml(str(tmp_path))
    assert (facts.driver, facts.cuda) == ("570.124.06", (12, 8))
    assert [device.uuid for device in facts.devices] == ["GPU-a", "GPU-b"]
    assert facts.health["GPU-b"] == GpuHealth(
        capability=(9, 0), uncorrected_errors=2, remap_pending=True, remap_failed=False
    )
    assert sorted(facts.usage) == ["GPU-a", "GPU-b"]


def test_a_driver_without_cards_still_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", cast(ModuleType, Driver()))
    assert gpus.ask_nvml("").driver == "570.124.06"


def test_a_driver_of_another_version_than_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.init_error = FakeNvmlError(18, "Driver/library version mismatch")
    monkeypatch.setitem(sys.modules, "pynvml", cast(ModuleType, driver))
    (entry,) = gpus.ask_nvml("").unavailable
    assert entry.name == "NVML" and "Driver/library version mismatch" in entry.reason


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="for machines without a driver")
def test_without_a_driver_there_are_no_gpus(tmp_path: Path) -> None:
    assert gpus.ask_nvml(str(tmp_path)) == GpuFacts()
