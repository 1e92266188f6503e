"""What interpreters say about themselves: this one, others, and programs that are none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.environment.scan import interpreter
from serverless_gpu.environment.scan.description import read_description
from serverless_gpu.environment.scan.interpreter import describe, describe_other
from serverless_gpu.errors import EnvironmentUnsupported
from tests.support.environment.wheels import BASE, Venv, describe_in
from tests.support.golden import golden

OLD_PYTHONS = [found for name in ("python3.8", "python3.9", "python3.10") if (found := shutil.which(name))]


def test_this_process_describes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "a-value-of-mine")

    description = read_description(msgspec.json.decode(msgspec.json.encode(describe())))

    assert description.version == ".".join(map(str, sys.version_info[:3]))
    assert description.interpreter.minor == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert description.sys_path == tuple(sys.path)
    assert description.prefix == sys.prefix
    assert os.__file__ in description.loaded
    assert "OMP_NUM_THREADS" in description.variables
    assert "a-value-of-mine" not in str(description)


def test_looking_at_loaded_modules_wakes_no_lazy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"{name} was asked for")

    monkeypatch.setitem(sys.modules, "lazy_one", Lazy("lazy_one"))
    monkeypatch.setitem(sys.modules, "no_module", None)

    assert describe()["loaded"]


@pytest.mark.slow
def test_an_environment_describes_itself_as_it_starts(tmp_path: Path) -> None:
    venv = Venv(tmp_path / "venv")
    (venv.site / "noise.pth").write_text("import sys; print('noise'); print('more', file=sys.stderr)\n")

    description = venv.describe(cwd=tmp_path)

    assert (description.prefix, description.purelib) == (str(venv.prefix), str(venv.site))
    assert Path(description.base_executable).resolve() == BASE
    assert description.search_path()[0] == str(tmp_path)
    assert description.key() != venv.describe(cwd=venv.prefix).key()


@pytest.mark.slow
@pytest.mark.parametrize("python", OLD_PYTHONS)
def test_an_older_python_can_be_asked(python: str) -> None:
    try:
        description = describe_in(Path(python))
    except RuntimeError as error:
        pytest.skip(f"that is no Python that runs: {error}")

    assert description.version.startswith("3.")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("#!/bin/sh\necho hello\n", r"did not describe itself \(exit status 0\): no message"),
        ("#!/bin/sh\necho broken >&2; exit 3\n", r"did not describe itself \(exit status 3\): broken"),
        ("#!/bin/sh\nexec sleep 100\n", r"did not answer within 0.2 s"),
    ],
)
def test_a_program_that_is_no_python_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    monkeypatch.setattr(interpreter, "ANSWER_TIMEOUT_S", 0.2 if "sleep" in script else 60)
    program = tmp_path / "python"
    program.write_text(script)
    program.chmod(0o755)

    with pytest.raises(RuntimeError, match=f"^{program} {said}"):
        describe_other(str(program))
    with pytest.raises(FileNotFoundError):
        describe_other(str(tmp_path / "missing"))


def test_a_description_that_is_none_is_refused() -> None:
    described = describe()
    described["sys_path"] = [1]

    with pytest.raises(EnvironmentUnsupported) as caught:
        read_description(described)

    assert str(caught.value) == golden("environment.description.interpreter-description-itself")


TWO_THREADS = """
import sys, sysconfig, threading
from serverless_gpu.environment.scan.interpreter import describe

sys.setswitchinterval(1e-5)
table = sysconfig._get_sysconfigdata_name()
found = set()
for _ in range(100):
    sysconfig._CONFIG_VARS = None  # as in a process that has just started
    sysconfig._CONFIG_VARS_INITIALIZED = False
    sys.modules.pop(table, None)
    start = threading.Barrier(2)
    threads = [threading.Thread(target=lambda: (start.wait(), found.add(describe()["abi"]))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(sorted(found) == [sysconfig.get_config_var("SOABI")], sorted(found))
"""


def test_two_threads_at_once_get_the_same_answer() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_THREADS], capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout.startswith("True"), done.stdout


def test_what_it_was_built_for_needs_no_table_that_others_may_still_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = describe()["abi"]
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: None)

    assert describe()["abi"] == expected != sys.implementation.cache_tag
