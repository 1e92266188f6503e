"""Looking: bounded, each look by itself, and truthful about what it could not see."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serverless_gpu.doctor.facts import Imported, InterpreterFacts
from serverless_gpu.doctor.probes.bounded_calls import ChildEnded, look
from serverless_gpu.doctor.probes.environment import look_at_imports, look_at_packages
from tests.support.golden import golden


def child(program: str, limit_s: float = 30.0) -> ChildEnded:
    """Look by running a program that finds its descriptor in argv."""

    def start(fd: int, log: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", program, str(fd)]
        return subprocess.Popen(command, pass_fds=(fd,), stdout=log, stderr=log, start_new_session=True)

    return look(start, limit_s)


def test_a_look_that_answers() -> None:
    ended = child("import os, sys; print('said'); os.write(int(sys.argv[1]), b'answer')")
    assert (ended.answer, ended.written, ended.code) == (b"answer", "said\n", 0)
    assert ended.why == golden("doctor.doctor_gathering.process-ended-code")


def test_a_look_that_crashes() -> None:
    ended = child("import os; os.kill(os.getpid(), 11)")
    assert (ended.answer, ended.code) == (b"", -signal.SIGSEGV)
    assert ended.why == golden("doctor.doctor_gathering.process-ended-sigsegv")


def test_a_look_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    # A shell, which has begun long before the limit on any machine; it answers and is silent.
    program = 'sleep 600 & printf %s $! > "$1"; printf begun > /proc/self/fd/$2; wait'

    def start(fd: int, log: int) -> subprocess.Popen[bytes]:
        command = ["sh", "-c", program, "sh", str(note), str(fd)]
        return subprocess.Popen(command, pass_fds=(fd,), stdout=log, stderr=log, start_new_session=True)

    ended = look(start, 1.0)
    assert (ended.answer, ended.code, ended.why) == (b"begun", None, golden("doctor.doctor_gathering.took-too-long"))
    stat = Path(f"/proc/{note.read_text()}/stat")
    for _ in range(500):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.01)
    raise AssertionError("what it started still runs")


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
        golden("doctor.doctor_gathering.process-ended-sigsegv"),
    )
    assert seen["torchaudio"] == Imported(outcome="ok", written="A module that was compiled using NumPy 1.x\n")
    assert seen["numpy"].error == golden("doctor.doctor_gathering.modulenotfounderror-module-named")
    assert seen["scipy"] == Imported(outcome="raised", error="SystemExit: gone")


@pytest.mark.slow
def test_an_import_that_hangs_costs_its_family_only(packages: Path) -> None:
    (packages / "torch.py").write_text("import time; time.sleep(600)")
    for name in ("numpy", "scipy", "sklearn"):
        (packages / f"{name}.py").write_text("")
    seen = look_at_imports(3.0).modules
    assert seen["torch"] == Imported(outcome="hung", error="the process took too long")
    assert seen["torchvision"] == Imported(
        outcome="untried", error="the probe reached its time limit of 3 s before the import"
    )
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
