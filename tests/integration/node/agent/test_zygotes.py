"""What a zygote leaves, and what happens to it: killed with the zygote, stems spared until they have left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.agent.zygotes import LEAVING_S, Containment
from serverless_gpu.node.processes.process_tree import ZYGOTE, CgroupRoot, find_cgroup_root, look_at
from tests.support.local.observe import wait_for

SECOND_NS = 10**9
CHILD = "import subprocess, sys; subprocess.Popen(['sleep', '600']); print('', flush=True); sys.stdin.read()"


@pytest.fixture
def root() -> Iterator[CgroupRoot]:
    """Yield a place for cgroups."""
    found = find_cgroup_root(f"serverless_gpu-test-{os.getpid()}", {})
    if found.path is None:
        pytest.skip(found.problem)
    yield found
    found.close()
    assert not found.path.exists()


def sleeper(paths: tuple[Path, ...]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["sleep", "600"])
    for path in paths:
        (path / "cgroup.procs").write_text(str(process.pid))
    return process


def test_22A11_all_that_is_left_is_killed_but_a_stem_may_leave(root: CgroupRoot) -> None:
    containment = Containment(root.make(ZYGOTE))
    stem, daemon = sleeper(containment.paths), sleeper(containment.paths)
    containment.note_stem_cgroups(own := root.make())
    containment.note_stem(stem.pid)
    assert not containment.end(SECOND_NS), "the stem has not left"
    assert daemon.wait(10) == -9 and stem.poll() is None
    for path in own:
        (path / "cgroup.procs").write_text(str(stem.pid))
    assert containment.end(2 * SECOND_NS) and stem.poll() is None
    stem.kill()
    stem.wait()


def test_22A11_what_says_that_it_is_a_stem_and_never_leaves_is_killed(root: CgroupRoot) -> None:
    containment = Containment(root.make(ZYGOTE))
    stem = sleeper(containment.paths)
    containment.note_stem(stem.pid)
    assert not containment.end(SECOND_NS) and stem.poll() is None
    containment.end(SECOND_NS + round((LEAVING_S + 1) * SECOND_NS))
    assert stem.wait(10) == -9
    assert containment.end(2 * SECOND_NS)


def test_22A11_a_stem_without_cgroups_stays_and_is_spared(root: CgroupRoot) -> None:
    containment = Containment(root.make(ZYGOTE))
    stem = sleeper(containment.paths)
    containment.note_stem_cgroups(())
    containment.note_stem(stem.pid)
    assert not containment.end(1) and not containment.end(60 * SECOND_NS) and stem.poll() is None
    stem.kill()
    stem.wait()
    assert containment.end(61 * SECOND_NS)


def test_22A11_without_cgroups_descendants_are_killed() -> None:
    zygote = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert zygote.stdout is not None and zygote.stdout.readline()
    (daemon,) = map(int, Path(f"/proc/{zygote.pid}/task/{zygote.pid}/children").read_text().split())
    containment = Containment(())
    containment.hold(zygote.pid)
    assert containment.end(1)
    wait_for(lambda: look_at(daemon) is None, "the daemon was killed")
    with zygote:
        zygote.kill()


def test_22A11_a_new_agent_kills_what_zygotes_of_one_that_is_gone_have_left(root: CgroupRoot) -> None:
    paths = root.make(ZYGOTE)
    daemon = sleeper(paths)
    (running,) = {path.name for path in root.make()}
    root.sweep()
    assert daemon.wait(10) == -9, "this process, which made it, is no agent"
    assert not any(path.exists() for path in paths) and running
