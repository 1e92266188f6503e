"""Commands over run directories made by hand: which run is meant, what is shown, what is deleted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from serverless_gpu import attach
from tests.support.cli.cli import FIRST, SECOND, SPEC, make, sgpu


@pytest.fixture
def runs(home: Path) -> Path:
    """Return the directory of runs of a fresh home, with one failed run in it."""
    path = home / "runs"
    make(path, FIRST)
    return path


def test_a_run_of_another_version_is_found_by_attach_as_by_show(runs: Path) -> None:
    directory = make(runs, SECOND)
    (directory / "spec.json").write_text(json.dumps(SPEC | {"version": "9.9", "spec": {"resources": "many"}}))
    assert f"run {SECOND} · FAILED" in sgpu("show", SECOND).output
    assert attach(SECOND).status() == "FAILED"


def test_ctrl_c_while_the_command_is_loaded_is_one_line() -> None:
    code = """
import sys

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "serverless_gpu.cli.program":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from serverless_gpu.cli import main

main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "sgpu: interrupted\n")
