"""A control group with little memory, which is the whole machine for the processes in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.processes.process_tree import remove_cgroup
from tests.support.local.observe import wait_for


@contextlib.contextmanager
def small_memory(limit_bytes: int) -> Iterator[Path]:
    """Yield a control group with a limit, v2 or v1; skip the test where none can be made."""
    path = _made(f"sgpu-test-{os.getpid()}", limit_bytes)
    if path is None:
        pytest.skip("no control group with a memory limit can be made here")
    yield path
    wait_for(lambda: not (path / "cgroup.procs").read_text(), "every process of the group has ended")
    assert remove_cgroup(path)


def _made(name: str, limit_bytes: int) -> Path | None:
    for parent, limit in _parents():
        path = parent / name
        try:
            path.mkdir()
            (path / limit).write_text(str(limit_bytes))
        except OSError:
            with contextlib.suppress(OSError):
                path.rmdir()
            continue
        with contextlib.suppress(OSError):  # what would be swapped out would not run out
            (path / "memory.swap.max").write_text("0")
        return path
    return None


def _parents() -> Iterator[tuple[Path, str]]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, place = line.split(":", 2)
        if not controllers:
            for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
                yield Path(mount + place), "memory.max"
        elif "memory" in controllers.split(","):
            yield Path("/sys/fs/cgroup/memory" + place), "memory.limit_in_bytes"
