"""Cgroups and memory counters: on the real cgroup v2 where it can be written to, and on files that look like one."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.inside.linux import descendants
from serverless_gpu.node.processes.process_tree import (
    CgroupRoot,
    CpuLimit,
    MemoryWatch,
    cgroup_empty,
    find_cgroup_root,
    kill_cgroup,
    remove_cgroup,
)
from tests.support.golden import golden

# Detaches itself twice, says so, waits for ever: what only a cgroup ends.
DAEMON = """
import os, signal, sys
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        signal.pause()
    os._exit(0)
os.wait()
"""


@pytest.fixture
def real() -> Iterator[CgroupRoot]:
    name = f"serverless_gpu-test-{os.getpid()}"
    root = find_cgroup_root(name, {"SERVERLESS_GPU_TASKS_MAX": "200"})
    try:
        if root.path is None:
            pytest.skip(f"no cgroup v2 to write to: {root.problem}")
        yield root
    finally:
        for directory in {*Path("/sys/fs/cgroup").glob(f"*/{name}"), *([] if root.path is None else [root.path])}:
            assert remove_cgroup(directory)


@pytest.fixture
def cgroup(real: CgroupRoot) -> Iterator[Path]:
    path = real.make()[0]
    yield path
    kill_cgroup(path)


def test_F10_whatever_detached_itself_ends_with_its_cgroup(cgroup: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", DAEMON, str(cgroup)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    daemon = os.pidfd_open(int(process.stdout.readline()))
    process.wait()
    assert not cgroup_empty(cgroup)
    assert not remove_cgroup(cgroup)
    kill_cgroup(cgroup)
    assert select.select([daemon], [], [], 60)[0]
    wait_until_empty(cgroup)
    os.close(daemon)
    process.stdout.close()
    assert remove_cgroup(cgroup)


def wait_until_empty(cgroup: Path) -> None:
    """The kernel announces a change of cgroup.events; a process that ended is gone from it only a moment later."""
    with (cgroup / "cgroup.events").open() as events:
        poll = select.poll()
        poll.register(events, select.POLLPRI)
        for _ in range(100):
            if cgroup_empty(cgroup):
                return
            poll.poll(100)
            events.read()
    raise AssertionError("the cgroup did not become empty")


def test_F02_a_limit_is_enforced_or_the_user_is_told() -> None:
    """On whatever memory controller this machine has; the process that grows is one of ours."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read(); bytearray(2**28)"], stdin=-1)
    watch = MemoryWatch(None, process.pid, 64 << 20)
    process.communicate()
    if watch.note:
        assert watch.note == golden("node.processes.memory-enforced-memory")
        assert process.returncode == 0
        pytest.skip(watch.note)
    assert process.returncode == -signal.SIGKILL
    assert watch.out_of_memory()
    peak = watch.peak_bytes()
    assert peak is not None and 0 < peak <= 64 << 20
    watch.close()


def test_27_a_limit_of_cores_applies_to_a_stem_and_its_ranks(cgroup: Path) -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"]) as stem:
        limit = CpuLimit(cgroup, stem.pid, 2)
        try:
            if limit.note:
                pytest.skip(limit.note)
            if (cgroup / "cpu.max").exists():
                assert (cgroup / "cpu.max").read_text() == "200000 100000\n"
                return
            [path] = Path("/sys/fs/cgroup").glob(f"cpu*/**/serverless_gpu-{stem.pid}")
            assert (path / "cpu.cfs_quota_us").read_text() == "200000\n"
            assert str(stem.pid) in (path / "cgroup.procs").read_text().split()
        finally:
            for pid in (*descendants(stem.pid), stem.pid):
                os.kill(pid, signal.SIGKILL)
    limit.close()
    assert not path.exists()
