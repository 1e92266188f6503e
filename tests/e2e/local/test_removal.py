"""Removing the package from a machine: what docs/how-to/installing.md says stays, and what does not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from serverless_gpu import distributed
from serverless_gpu.node.base.home import Home
from serverless_gpu.testing import agent_status
from tests.support.local.observe import processes_of, wait_for
from tests.support.paths import REPOSITORY

PAGE = REPOSITORY / "docs" / "how-to" / "installing.md"


@pytest.mark.slow
def test_23B13_what_stays_after_stop_is_what_the_page_lists(home: Path) -> None:
    assert distributed(gpus=1, gpu_type="CPU", quiet=True)(len).distributed("abc") == [3]
    status = agent_status(home)
    assert status is not None
    cgroups = Path(status.cgroups) if status.cgroups else None
    sockets = Home(home).sockets()
    subprocess.run([sys.executable, "-m", "serverless_gpu.cli", "stop"], timeout=60, check=True)
    wait_for(lambda: not processes_of(home), "no process of the home is left")
    if cgroups is not None:
        wait_for(lambda: not cgroups.exists(), "the control groups are gone")

    listed = PAGE.read_text(encoding="utf-8").partition("## Remove the package")[2]
    names = set(re.findall(r"`([a-z]+(?:/|\.\w+)?)`", listed))
    stays = {entry.name + ("/" if entry.is_dir() else "") for entry in home.iterdir()}
    assert stays <= names, f"the page does not list {sorted(stays - names)}"
    assert f"/tmp/serverless_gpu-{os.getuid()}/" == f"{sockets.parent}/"

    subprocess.run([sys.executable, "-m", "serverless_gpu.cli", "clean", "--older-than", "0d"], timeout=60, check=True)
    assert list((home / "runs").iterdir()) == []
    shutil.rmtree(home)
    assert not [path for path in sockets.iterdir() if path.suffix == ".sock"], "no run has a socket"
