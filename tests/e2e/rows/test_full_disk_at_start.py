"""Row F27 of the failure matrix: a node's disk has no room for a run's environment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.model.lifecycle import run_lifecycle
from serverless_gpu.node.devices.nvml import MIB
from tests.e2e.rows.machines import Machine
from tests.support.golden import golden
from tests.support.local.small_environment import SmallEnvironment, with_requirements
from tests.support.small_disks import small_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # calls that move tens of megabytes, on a busy machine

WORK = """
def where():
    import toy
    return [toy.VALUE, toy.__file__]
"""
PROGRAM = """
import work
from serverless_gpu import distributed

run = distributed(gpus=1, gpu_type="H100", remote=True, env="snapshot")(work.where).submit()
print(run.id, flush=True)
try:
    print(run.results())
except Exception as error:
    print(type(error).__name__, getattr(error, "reason", ""), str(error))
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallEnvironment:
    """Return an environment with a project in it."""
    small = SmallEnvironment(tmp_path_factory.mktemp("f27") / "here", *with_requirements("httpx2"))
    small.write("work.py", WORK)
    small.write("program.py", PROGRAM)
    return small


def install(small: SmallEnvironment, value: str, megabytes: int) -> None:
    """Install a package that takes so much room on a disk."""
    data = "".join(f"{number:015x}\n" for number in range(megabytes * MIB // 16))
    small.install("toy", value, {"toy/__init__.py": f"VALUE = {value!r}\n", "toy/weights.txt": data})


@contextlib.contextmanager
def machine(name: str, megabytes: int, served_home: Path) -> Iterator[Machine]:
    """Yield a node of the server with a disk of that size."""
    with small_disk(f"{megabytes}m") as disk:
        made = Machine(name, disk, served_home)
        try:
            yield made
        finally:
            made.end()


def call(small: SmallEnvironment) -> tuple[str, str]:
    """Run the program; return the run's identifier and what it printed last."""
    out, _ = small.run("program.py")
    run_id, said = out.strip().split("\n", 1)
    return run_id, said


@pytest.mark.spot
def test_F27_a_run_goes_to_another_node(lone_server: Path, small: SmallEnvironment) -> None:
    install(small, "large", 40)
    with machine("a-small", 24, lone_server) as first, machine("b-large", 256, lone_server) as second:
        run_id, said = call(small)
        assert "'large'" in said and str(second.home.root) in said, said
        tried = first.attempts(run_id)
        assert [(each.node, each.reason) for each in tried] == [("a-small", "node_disk"), ("b-large", "completed")]
        assert not list((first.home.root / "environments" / "units").iterdir()), "nothing half-unpacked stays"


def test_F27_a_run_fails_when_every_node_is_too_full(
    lone_server: Path, small: SmallEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lifecycle, "INFRA_PAUSES_S", (0.1, 0.1, 0.1))
    install(small, "large", 40)
    with machine("a-small", 24, lone_server) as first:
        run_id, said = call(small)
        assert [each.reason for each in first.attempts(run_id)] == ["node_disk"] * 4
        assert said.startswith("RunError node_disk the node's disk is too full for the environment: The disk at ")
        assert golden("rows.full_disk_at_start.hint-node-small") in said


def test_F27_what_was_not_used_for_longest_goes_first(lone_server: Path, small: SmallEnvironment) -> None:
    with machine("a-small", 72, lone_server) as first:
        for value in ("one", "two", "three"):
            install(small, value, 25)  # two of them fit, and the third one does not
            run_id, said = call(small)
            assert f"'{value}'" in said
            assert [each.reason for each in first.attempts(run_id)] == ["completed"]


def test_22B4_a_server_on_a_full_disk_says_which_disk_and_what_to_do() -> None:
    with small_disk("1m") as disk:
        with contextlib.suppress(OSError), (disk / "filled").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        home = disk / "home"
        done = subprocess.run(
            [sys.executable, "-m", "serverless_gpu.cli", "up", "--no-node", "--port", "0"],
            env={**os.environ, "SERVERLESS_GPU_HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert (
        golden("rows.full_disk_at_start.space-left-server", home=home) in done.stderr
        and golden("rows.full_disk_at_start.hint-free-some") in done.stderr
    ), done.stderr
