"""The filter of devices on a real cgroup."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.isolation.device_filter import limit_devices
from serverless_gpu.node.processes.process_tree import find_cgroup_root, remove_cgroup

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can limit the devices of a cgroup")

OPEN = """
import os, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write("0")
for path in sys.argv[2:]:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NOCTTY))
        print("open")
    except OSError as error:
        print(error.strerror)
try:
    os.mknod(sys.argv[1] + "-node", 0o20666, os.makedev(1, 3))
    print("made")
except OSError as error:
    print(error.strerror)
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    root = find_cgroup_root(f"serverless_gpu-test-{os.getpid()}", {})
    if root.path is None:
        pytest.skip(f"no cgroup v2 to write to: {root.problem}")
    made = root.make()
    yield made[0]
    for path in (*made, *(each.parent for each in made)):
        assert remove_cgroup(path)


def opened(cgroup: Path, *paths: str) -> list[str]:
    argv = [sys.executable, "-I", "-S", "-c", OPEN, str(cgroup), *paths]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()


def test_27_processes_of_a_cgroup_open_basic_devices_and_given_ones_only(cgroup: Path) -> None:
    others = [path for path in ("/dev/fuse", "/dev/kvm", "/dev/loop-control") if os.path.exists(path)]
    if not others:
        pytest.skip("this machine has no device to refuse")
    assert "another owner" in limit_devices(cgroup, others[:1], os.geteuid() + 1)
    note = limit_devices(cgroup, others[:1], os.geteuid())
    if note:
        pytest.skip(note)
    found = opened(cgroup, "/dev/null", "/dev/urandom", "/dev/ptmx", *others)
    assert found[:4] == ["open"] * 3 + [found[3]]
    assert "not permitted" not in found[3] and set(found[4:]) == {"Operation not permitted"}
