"""The wheel: what `pip` installs, with a network and without one."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

CALL = """
from serverless_gpu import distributed


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def rank_squared(rank=0):
    return rank**2


if __name__ == "__main__":
    print(rank_squared.distributed())
"""


@pytest.mark.heavy
def test_23B13_a_wheel_house_is_enough_to_install_and_to_call(home: Path, tmp_path: Path) -> None:
    """Needs a network to fill the wheel house, as a user does; what is installed from it needs none."""
    wheels, prefix = tmp_path / "wheel house", tmp_path / "an empty environment"
    options = ("--quiet", "--disable-pip-version-check")
    pip(sys.executable, "wheel", *options, "--wheel-dir", wheels, "-c", REPOSITORY / "constraints.txt", REPOSITORY)
    venv.create(prefix, with_pip=True)
    python = prefix / "bin" / "python"
    pip(python, "install", *options, "--no-index", "--find-links", wheels, "serverless-gpu")
    done = subprocess.run(
        [prefix / "bin" / "sgpu", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("serverless-gpu, version ")
    (tmp_path / "call.py").write_text(CALL)
    done = subprocess.run([python, tmp_path / "call.py"], capture_output=True, text=True, check=False, timeout=90)
    assert (done.returncode, done.stdout) == (0, "[0, 1]\n"), done.stderr


def pip(python: Path | str, *arguments: Path | str) -> None:
    """Run pip, and show what it wrote when it fails."""
    done = subprocess.run(
        [python, "-m", "pip", *arguments], cwd="/", capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
