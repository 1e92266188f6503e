"""`make test` shows where each part is, keeps each part's output whole, and fails when a part fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.support.golden import golden
from tests.support.paths import REPOSITORY
from tests.support.progress import Progress, from_variables

SUITE = {
    "tests/e2e/local/test_first.py": "def test_one() -> None:\n    pass\n\n\ndef test_two() -> None:\n    pass\n",
    "tests/e2e/notebook/__init__.py": "",
    "tests/e2e/remote/test_second.py": "def test_three() -> None:\n    assert False, 'as planned'\n",
    "tests/integration/server/budgets/test_third.py": "def test_four() -> None:\n    pass\n",
    "tests/integration/server/web/__init__.py": "",
    "tests/integration/node/__init__.py": "",
    "tests/unit/server/budgets/test_fourth.py": """import os


def test_five() -> None:
    assert 'TEST_PROGRESS_FD' not in os.environ
""",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a copy of the Makefile with a suite of five tests, in a path as long as the suite's own may be."""
    root = tmp_path / ("a path with spaces " * 6) / "serverless gpu"
    support = [f"tests/support/{name}.py" for name in ("homes", "progress")]
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tests/__init__.py", "tests/conftest.py", *support):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, root / name)
    for name, text in SUITE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (root / ".venv" / ".installed").touch()
    return root


def make(checkout: Path, *arguments: str) -> tuple[int, list[str]]:
    """Run make and return its exit status and its lines."""
    names = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PKG", "PYTEST_ADDOPTS", "TEST_PART", "TEST_PROGRESS_FD")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        ["make", *arguments],
        cwd=checkout,
        env={**environ, "TEST_PROGRESS_S": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_23B5_make_test_shows_progress_and_fails_with_a_part(checkout: Path) -> None:
    status, lines = make(checkout, "test")
    assert status != 0, lines
    assert "[local] 2 tests" in lines
    assert golden("support.progress.local-50-tests") in lines
    assert "[remote] FAILED tests/e2e/remote/test_second.py::test_three" in lines
    assert golden("support.progress.remote-100-ended") in lines
    assert golden("support.progress.others-100-ended") in lines

    held_back = [line for line in lines if not line.startswith("[")]
    starts = [number for number, line in enumerate(held_back) if "test session starts" in line]
    ends = [number for number, line in enumerate(held_back) if re.search(r"\d (passed|failed).* in ", line)]
    assert sum("failed" in held_back[number] for number in ends) == 1
    edges = [edge for part in zip(starts, ends, strict=True) for edge in part]
    assert len(edges) == 8 and edges == sorted(edges), "the output of one part is in one piece"


@pytest.mark.slow
def test_24_2_make_test_quick_runs_unit_tests_in_two_workers(checkout: Path) -> None:
    status, lines = make(checkout, "test-quick")
    assert (status, lines[-1].partition(" in ")[0]) == (0, "1 passed"), lines
    assert any("bringing up nodes" in line for line in lines)


@pytest.mark.slow
def test_24_2_make_test_with_a_package_runs_its_unit_and_integration_tests(checkout: Path) -> None:
    status, lines = make(checkout, "test", "PKG=server/budgets")
    assert status == 0 and "2 passed" in lines[-1], lines


def test_24_2_a_package_without_tests_is_an_error(checkout: Path) -> None:
    status, lines = make(checkout, "test", "PKG=server/budget")
    assert status != 0 and lines[0] == golden("support.progress.no-package")


def test_23B5_lines_are_an_interval_apart_and_a_failure_comes_at_once() -> None:
    seconds = 0.0
    lines: list[str] = []
    progress = Progress("local", lines.append, interval_s=15, now=lambda: seconds)
    progress.pytest_collection_finish(cast(pytest.Session, SimpleNamespace(items=[None] * 4)))
    lines.clear()
    for name in ("a", "b", "c"):
        progress.pytest_runtest_logstart(f"tests/e2e/local/test_{name}.py::test_it")
        seconds += 9
        progress.pytest_runtest_logfinish(f"tests/e2e/local/test_{name}.py::test_it")
    assert lines == [golden("support.progress.local-50-tests-local")]
    seconds = 65
    failed = pytest.TestReport("tests/e2e/local/test_d.py::test_it", ("", 0, ""), {}, "failed", None, "call")
    progress.pytest_runtest_logreport(failed)
    progress.pytest_runtest_logreport(failed)
    progress.pytest_runtest_logfinish(failed.nodeid)
    assert lines[1:] == ["[local] FAILED tests/e2e/local/test_d.py::test_it\n"]
    progress.pytest_sessionfinish()
    assert lines[2:] == [golden("support.progress.local-100-ended")]


@pytest.mark.parametrize("descriptor", ["", "nine", "4095"])
def test_23B5_without_a_descriptor_no_lines_are_written(descriptor: str) -> None:
    environ = {"TEST_PROGRESS_FD": descriptor, "TEST_PART": "local", "PATH": "/bin"}
    assert from_variables(environ) is None
    assert environ == {"PATH": "/bin"}
