"""Which run directories are deleted, and deleting them: nothing else is touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.node.base.home import Home
from tests.support.node.retention import make_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return an empty directory of runs."""
    path = tmp_path / "runs"
    path.mkdir()
    return path


def run_main(home: Path, queued: str) -> subprocess.CompletedProcess[str]:
    program = (
        "import os, sys; from serverless_gpu.node.attempt.retention import main\n"
        "fd = os.memfd_create('q'); os.write(fd, sys.argv[2].encode()); main(sys.argv[1], fd)"
    )
    command = [sys.executable, "-c", program, str(home), queued]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_process_deletes_by_the_configuration(runs: Path) -> None:
    home = Home(runs.parent)
    (home.root / "config.toml").write_text("[retention]\ndays = 1\n")
    old, waiting = make_run(runs), make_run(runs, ended=False)
    (runs / waiting / "1" / "supervisor.lock").unlink()
    done = run_main(home.root, waiting)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("retention: deleted 1 run, ")
    assert not (runs / old).exists() and (runs / waiting).exists()


def test_with_a_configuration_that_cannot_be_read_nothing_is_deleted(runs: Path) -> None:
    (runs.parent / "config.toml").write_text("[retention\n")
    old = make_run(runs, age_ns=1_000 * DAY_NS)
    done = run_main(runs.parent, "")
    assert done.returncode == 1
    assert done.stdout.startswith("retention: no run was deleted")
    assert (runs / old).exists()
