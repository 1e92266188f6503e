"""`make test` shows where each part is, keeps each part's output whole, and fails when a part fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.golden import golden
from tests.support.paths import REPOSITORY
from tests.support.progress import Progress, from_variables

FOLDERS = ("chaos", "docs", "local", "notebook", "stores", "uplink", "remote", "unit")
SUITE = {
    "local/test_first.py": "def test_one() -> None:\n    pass\n\n\ndef test_two() -> None:\n    pass\n",
    "remote/test_second.py": "def test_three() -> None:\n    assert False, 'as planned'\n",
    "unit/test_third.py": "import os\n\n\ndef test_four() -> None:\n    assert 'TEST_PROGRESS_FD' not in os.environ\n",
}


@pytest.mark.slow
def test_23B5_make_test_shows_progress_and_fails_with_a_part(tmp_path: Path) -> None:
    """In a copy of the Makefile with a suite of four tests, in a path as long as the suite's own may be."""
    root = tmp_path / ("a path with spaces " * 6) / "serverless gpu"
    for folder in FOLDERS:
        (root / "tests" / folder).mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tests/conftest.py", "tests/support/homes.py"):
        shutil.copy(REPOSITORY / name, root / name)
    for name in ("tests/__init__.py", "tests/support/progress.py"):
        shutil.copy(REPOSITORY / name, root / name)
    for name, text in SUITE.items():
        (root / "tests" / name).write_text(text)
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (root / ".venv" / ".installed").touch()

    names = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TEST_PART", "TEST_PROGRESS_FD")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        ["make", "test"],
        cwd=root,
        env={**environ, "TEST_PROGRESS_S": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode != 0, done.stdout
    lines = done.stdout.splitlines()
    assert "[local] 2 tests" in lines
    assert golden("common.progress.local-50-tests") in lines
    assert "[remote] FAILED tests/e2e/remote/test_second.py::test_three" in lines
    assert golden("common.progress.remote-100-ended") in lines
    assert golden("common.progress.others-100-ended") in lines

    held_back = [line for line in lines if not line.startswith("[")]
    summaries = [line for line in held_back if re.search(r"\d (passed|failed).* in ", line)]
    assert len(summaries) == 3 and sum("failed" in line for line in summaries) == 1
    starts = [number for number, line in enumerate(held_back) if "test session starts" in line]
    ends = [held_back.index(summary) for summary in summaries]
    assert len(starts) == 3 and all(a < b for a, b in zip(starts, sorted(ends), strict=True))
    assert sorted(ends)[0] < starts[1] and sorted(ends)[1] < starts[2], "the output of one part is in one piece"


def test_23B5_lines_are_an_interval_apart_and_a_failure_comes_at_once() -> None:
    seconds = 0.0
    lines: list[str] = []
    progress = Progress("local", lines.append, interval_s=15, now=lambda: seconds)
    progress._total = 4
    for name in ("a", "b", "c"):
        progress.pytest_runtest_logstart(f"tests/e2e/local/test_{name}.py::test_it")
        seconds += 9
        progress.pytest_runtest_logfinish(f"tests/e2e/local/test_{name}.py::test_it")
    assert lines == [golden("common.progress.local-50-tests-local")]
    seconds = 65
    failed = pytest.TestReport("tests/e2e/local/test_d.py::test_it", ("", 0, ""), {}, "failed", None, "call")
    progress.pytest_runtest_logreport(failed)
    progress.pytest_runtest_logreport(failed)
    progress.pytest_runtest_logfinish(failed.nodeid)
    assert lines[1:] == ["[local] FAILED tests/e2e/local/test_d.py::test_it\n"]
    progress.pytest_sessionfinish()
    assert lines[2:] == [golden("common.progress.local-100-ended")]


@pytest.mark.parametrize("descriptor", ["", "nine", "4095"])
def test_23B5_without_a_descriptor_no_lines_are_written(descriptor: str) -> None:
    environ = {"TEST_PROGRESS_FD": descriptor, "TEST_PART": "local", "PATH": "/bin"}
    assert from_variables(environ) is None
    assert environ == {"PATH": "/bin"}
