"""This project's own environment, torch included, captured here and used elsewhere: another path, another user,
and the original out of sight.

    sgpu env capture ─▶ store ─ becomes another user's ─▶ sgpu env restore, as that user ─▶ a tree
                                                                                             │
    an empty directory is mounted over every original ─▶ <tree>/bin/python digits_ddp.py ◀───┘
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

import serverless_gpu
from serverless_gpu.node.inside import namespaces
from tests.support.environment import elsewhere
from tests.support.paths import REPOSITORY

OTHER = 65534
LIMIT_S = 600

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.heavy, pytest.mark.timeout(LIMIT_S)]

WHO = """
import json, os, sys
import sklearn, torch, serverless_gpu
print(json.dumps({
    "uid": os.getuid(),
    "files": [module.__file__ for module in (sklearn, torch, serverless_gpu)],
    "seen": [name for directory in sys.argv[1:] for name in os.listdir(directory)],
}))
"""


@pytest.fixture
def there() -> Iterator[Path]:
    """Yield a directory that another user has, with a path as short as those of homes have to be."""
    directory = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    (directory / "empty").mkdir()
    (directory / "home").mkdir(mode=0o700)
    directory.chmod(0o755)
    hand_over(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def hand_over(directory: Path) -> None:
    """Give a directory and all that is in it to the other user, where that is possible."""
    if os.geteuid() == 0:
        for path in (directory, *directory.rglob("*")):
            os.chown(path, OTHER, OTHER, follow_symlinks=False)


def reachable_python(there: Path) -> Path:
    """Return an interpreter like this one that another user can start: this one's, the system's, or a copy."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    if all(parent.stat().st_mode & 0o001 for parent in base.parents):
        return base
    ask = "import sysconfig; print(sysconfig.get_config_var('SOABI'))"
    for directory in ("/usr/bin", "/usr/local/bin"):
        python = Path(directory) / version
        if python.exists():
            said = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False).stdout.strip()
            if said == sysconfig.get_config_var("SOABI"):
                return python
    shutil.copytree(sys.base_prefix, there / "python", symlinks=True, ignore=shutil.ignore_patterns("site-packages"))
    return there / "python" / "bin" / version


def carry_over(there: Path) -> Path:
    """Copy our package and what it needs to where the other user can read it; return the directory."""
    ours = there / "ours"
    shutil.copytree(Path(serverless_gpu.__file__).parent, ours / "serverless_gpu")
    for requirement in importlib.metadata.requires("serverless-gpu") or ():
        if "extra ==" in requirement:
            continue
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # for another Python
            distribution = importlib.metadata.distribution(re.split(r"[^\w.-]", requirement)[0])
            for file in distribution.files or ():
                if ".." not in file.parts and file.suffix != ".pyc":
                    (ours / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(str(file.locate()), ours / file)
    return ours


def run(command: list[str], there: Path, **more: str) -> str:
    """Run a command with few variables; return its stdout."""
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(there), "SERVERLESS_GPU_HOME": str(there / "home"), **more}
    done = subprocess.run(
        command, env=environ, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S / 2, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_this_project_runs_from_its_restored_environment_as_another_user_with_the_original_hidden(
    home: Path, there: Path
) -> None:
    if problem := namespaces.probe_mounts():
        pytest.skip(f"nothing can be hidden here: {problem}")
    sgpu = [sys.executable, "-m", "serverless_gpu.cli", "env"]
    store = str(there / "store")
    captured = json.loads(run([*sgpu, "capture", "--store", store, "--json"], there, SERVERLESS_GPU_HOME=str(home)))
    assert captured["size_bytes"] > 10**9
    address = captured["address"]
    shown = json.loads(run([*sgpu, "show", address, "--store", store, "--json"], there, SERVERLESS_GPU_HOME=str(home)))
    ours, python = carry_over(there), reachable_python(there)
    hand_over(there)

    tree = there / "tree"
    restore = ["-m", "serverless_gpu.cli", "env", "restore", address, str(tree), "--store", store]
    told = run([*as_other(there), str(python), *restore, "--python", str(python)], there, PYTHONPATH=str(ours))
    assert told.endswith(f"use it: {tree}/bin/python\n")
    shutil.rmtree(store)
    shutil.rmtree(ours)

    originals = {root["directory"] for root in shown["roots"]} | {sys.prefix, str(REPOSITORY)}
    hidden = outermost(path for path in originals if os.path.isdir(path))
    unseen = [*as_other(there, hidden), str(tree / "bin" / "python")]

    who = json.loads(run([*unseen, "-c", WHO, *hidden], there))
    assert (who["uid"], who["seen"]) == (OTHER, [])
    assert [file for file in who["files"] if not file.startswith(f"{tree}/")] == []

    (example,) = tree.glob("code/*/examples/digits_ddp.py")
    try:
        told = run([*unseen, str(example)], there, SERVERLESS_GPU_FAKE="CPU:2", CUDA_VISIBLE_DEVICES="")
    finally:
        run([*unseen, "-m", "serverless_gpu.cli", "stop"], there)
    assert "test accuracy" in told


def outermost(directories: Iterable[str]) -> list[str]:
    """Return directories that lie in none of the others."""
    found: list[str] = []
    for directory in sorted(directories):
        if not any(directory.startswith(f"{outer}/") for outer in found):
            found.append(directory)
    return found


def as_other(there: Path, hidden: Sequence[str] = ()) -> list[str]:
    """Return the beginning of a command that another user runs, who does not see some directories."""
    plan = {"hidden": hidden, "empty": str(there / "empty"), "uid": OTHER}
    return [sys.executable, elsewhere.__file__, json.dumps(plan)]
