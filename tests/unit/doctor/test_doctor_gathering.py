"""Looking: bounded, each look by itself, and truthful about what it could not see."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest

from serverless_gpu.doctor.facts import GpuFacts, Health, Imported, InterpreterFacts, Unknown
from serverless_gpu.doctor.gathering import nvml
from serverless_gpu.doctor.gathering.bounded import side_by_side
from serverless_gpu.doctor.gathering.children import Ended, look
from serverless_gpu.doctor.gathering.environment import look_at_imports, look_at_packages, read_imports
from serverless_gpu.doctor.gathering.machine import (
    _ports,
    _sockets_used,
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
        {"hangs": lambda: str(release.wait(30)), "raises": lambda: str(1 / 0), "works": lambda: "x"}, 1.5
    )
    release.set()
    assert time.monotonic() - started < 20
    assert seen == {
        "hangs": Unknown("there was no answer within 1.5 s"),
        "raises": Unknown("ZeroDivisionError: division by zero"),
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
    assert _ports("32768\t60999\n") == 28_232
    assert _ports("") == 0
    assert _sockets_used("sockets: used 5\nTCP: inuse 7 orphan 0 tw 3 alloc 9 mem 1\nUDP: inuse 4\n") == 10
    assert _sockets_used("") == 0


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
    assert facts.hint == golden("unit.doctor_gathering.set-serverless-gpu")


def test_a_home_that_takes_no_bytes_is_found_by_writing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))  # the kernel's own way to refuse a write in the middle
    try:
        facts = look_at_home({"SERVERLESS_GPU_HOME": str(tmp_path)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert facts.problem == golden("unit.doctor_gathering.cannot-write-file", tmp_path=tmp_path)
    assert facts.hint == golden("unit.doctor_gathering.set-serverless-gpu")


def test_a_configuration_with_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[prices]\nH100 = "much"\n')
    facts = look_at_home({"SERVERLESS_GPU_HOME": str(tmp_path)})
    assert facts.configuration_problem == golden(
        "unit.doctor_gathering.table-prices-expected", value=tmp_path / "config.toml"
    )


def test_runs_and_limits(tmp_path: Path) -> None:
    runs = look_at_runs({"SERVERLESS_GPU_HOME": str(tmp_path)})
    assert (runs.count, runs.days, runs.last_run) == (0, 30.0, "")
    assert look_at_limits().descriptors is not None


# --- processes of their own ------------------------------------------------------------------------------------------


def child(program: str, limit_s: float = 30.0) -> Ended:
    """Look by running a program that finds its descriptor in argv."""

    def start(fd: int, log: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", program, str(fd)]
        return subprocess.Popen(command, pass_fds=(fd,), stdout=log, stderr=log, start_new_session=True)

    return look(start, limit_s)


def test_a_look_that_answers() -> None:
    ended = child("import os, sys; print('said'); os.write(int(sys.argv[1]), b'answer')")
    assert (ended.answer, ended.written, ended.code) == (b"answer", "said\n", 0)
    assert ended.why == golden("unit.doctor_gathering.process-ended-code")


def test_a_look_that_crashes() -> None:
    ended = child("import os; os.kill(os.getpid(), 11)")
    assert (ended.answer, ended.code) == (b"", -signal.SIGSEGV)
    assert ended.why == golden("unit.doctor_gathering.process-ended-sigsegv")


def test_a_look_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = (
        "import os, pathlib, subprocess, sys, time; "
        f"p = subprocess.Popen(['sleep', '600']); pathlib.Path({str(note)!r}).write_text(str(p.pid)); "
        "os.write(int(sys.argv[1]), b'begun'); time.sleep(600)"
    )
    ended = child(program, limit_s=6.0)
    assert (ended.answer, ended.code, ended.why) == (b"begun", None, golden("unit.doctor_gathering.took-too-long"))
    stat = Path(f"/proc/{note.read_text()}/stat")
    for _ in range(500):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.01)
    raise AssertionError("what it started still runs")


def test_an_importing_process_that_ends_early_leaves_its_last_word() -> None:
    records: list[tuple[object, ...]] = [("begin", "a"), ("end", "a", "ok", "", ""), ("begin", "b")]
    crashed = read_imports(records, Ended(b"", "boom", -11))
    assert crashed.modules == {
        "a": Imported(outcome="ok"),
        "b": Imported(outcome="crashed", error="the process was ended by SIGSEGV", written="boom"),
    }
    assert read_imports(records, Ended(b"", "", None)).modules["b"].outcome == "hung"


def test_a_torch_that_hangs_on_cuda_keeps_its_version() -> None:
    records: list[tuple[object, ...]] = [
        ("torch", {"version": "2.9.0", "cuda": "12.8", "hip": ""}),
        ("begin", "torch.cuda"),
    ]
    torch = read_imports(records, Ended(b"", "", None)).torch
    assert torch is not None
    assert (torch.version, torch.devices, torch.problem) == (
        "2.9.0",
        None,
        golden("unit.doctor_gathering.took-too-long"),
    )


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory in PYTHONPATH, found before what is installed, and stand beside it."""
    place = tmp_path / "packages"
    (tmp_path / "cwd").mkdir()
    place.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(place))
    monkeypatch.chdir(tmp_path / "cwd")
    return place


@pytest.mark.slow
def test_imports_that_raise_crash_and_write(packages: Path) -> None:
    (packages / "torch.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (packages / "torchvision.py").write_text("import os; os.kill(os.getpid(), 11)")
    (packages / "torchaudio.py").write_text(
        "import sys; print('A module that was compiled using NumPy 1.x', file=sys.stderr)"
    )
    (packages / "numpy.py").write_text("import a_module_that_is_missing")
    (packages / "scipy.py").write_text("import sys; sys.exit('gone')")
    seen = look_at_imports(30.0).modules
    assert seen["torch"] == Imported(outcome="raised", error="RuntimeError: operator torchvision::nms does not exist")
    assert (seen["torchvision"].outcome, seen["torchvision"].error) == (
        "crashed",
        golden("unit.doctor_gathering.process-ended-sigsegv"),
    )
    assert seen["torchaudio"] == Imported(outcome="ok", written="A module that was compiled using NumPy 1.x\n")
    assert seen["numpy"].error == golden("unit.doctor_gathering.modulenotfounderror-module-named")
    assert seen["scipy"] == Imported(outcome="raised", error="SystemExit: gone")


@pytest.mark.slow
def test_an_import_that_hangs_costs_its_family_only(packages: Path) -> None:
    (packages / "torch.py").write_text("import time; time.sleep(600)")
    for name in ("numpy", "scipy", "sklearn"):
        (packages / f"{name}.py").write_text("")
    seen = look_at_imports(3.0).modules
    assert seen["torch"] == Imported(outcome="hung", error="it took too long")
    assert seen["torchvision"] == Imported(outcome="untried", error="no time was left of 3 s")
    assert seen["numpy"].outcome == "ok"


def test_files_of_the_caller_are_named_and_not_run(packages: Path) -> None:
    cwd = Path.cwd()
    for name in ("random", "msgspec", "os", "mine", "test"):
        (cwd / f"{name}.py").write_text(f"open({str(cwd / 'was_run')!r}, 'w')")
    (packages / "click").mkdir()
    (packages / "click" / "__init__.py").touch()
    (cwd / "pytest").mkdir()  # without __init__.py: what is installed comes first
    facts = look_at_packages(30.0)
    assert isinstance(facts, InterpreterFacts)
    assert [(shadow.name, shadow.file, shadow.is_stdlib) for shadow in facts.shadows] == [
        ("msgspec", str(cwd / "msgspec.py"), False),
        ("random", str(cwd / "random.py"), True),
        ("click", str(packages / "click" / "__init__.py"), False),
    ]
    assert not (cwd / "was_run").exists()


def test_requirements_that_are_not_met(packages: Path) -> None:
    metadata = packages / "torchvision-0.20.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.20.0\nRequires-Dist: msgspec==0.0.1\n"
        'Requires-Dist: a-package-that-is-missing>=2\nRequires-Dist: never; python_version < "3"\n'
        'Requires-Dist: extra-only; extra == "scipy"\nRequires-Dist: click\n'
    )
    facts = look_at_packages(30.0)
    assert isinstance(facts, InterpreterFacts)
    mine = [broken for broken in facts.broken if broken.package == "torchvision"]
    assert [(broken.requirement, bool(broken.found)) for broken in mine] == [
        ("msgspec==0.0.1", True),
        ("a-package-that-is-missing>=2", False),
    ]
    assert facts.executable == sys.executable and facts.packages["torchvision"] == "0.20.0"


def test_what_nvml_does_not_say_is_none() -> None:
    class Silent:
        """NVML that knows one card by name and nothing about it."""

        class NVMLError(Exception):
            """Whatever it is asked."""

        NVMLLibraryMismatchError = NVMLError
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0

        def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
            return uuid

        def __getattr__(self, name: str) -> object:
            raise self.NVMLError(name)

    assert nvml._health(Silent(), "GPU-0") == Health()


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


def test_what_a_driver_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", cast(ModuleType, Driver(Card("GPU-a", 1), Card("GPU-b", 2))))
    facts = nvml.ask(str(tmp_path))
    assert (facts.driver, facts.cuda) == ("570.124.06", (12, 8))
    assert [device.uuid for device in facts.devices] == ["GPU-a", "GPU-b"]
    assert facts.health["GPU-b"] == Health(
        capability=(9, 0), uncorrected_errors=2, remap_pending=True, remap_failed=False
    )
    assert sorted(facts.usage) == ["GPU-a", "GPU-b"]


def test_a_driver_without_cards_still_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", cast(ModuleType, Driver()))
    assert nvml.ask("").driver == "570.124.06"


def test_a_driver_of_another_version_than_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.init_error = FakeNvmlError(18, "Driver/library version mismatch")
    monkeypatch.setitem(sys.modules, "pynvml", cast(ModuleType, driver))
    (entry,) = nvml.ask("").unavailable
    assert entry.name == "NVML" and "Driver/library version mismatch" in entry.reason


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="for machines without a driver")
def test_without_a_driver_there_are_no_gpus(tmp_path: Path) -> None:
    assert nvml.ask(str(tmp_path)) == GpuFacts()
