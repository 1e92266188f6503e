"""Row F09 of the failure matrix: a process that cannot be ended, for it waits for a disk that never answers."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu import distributed
from serverless_gpu.model.lifecycle.attempt import FactKind
from serverless_gpu.node.attempt.history import first_facts
from tests.e2e.rows.machines import Machine
from tests.support.golden import golden
from tests.support.local.observe import wait_for

pytestmark = pytest.mark.slow  # a minute passes before nobody waits any more


def touch(hanging: str, where: str, rank: int = -1) -> None:
    """Rank 1 looks at a file of a disk that never answers; rank 0 fails when it has."""
    if rank == 1:
        Path(where, "looking").touch()
        os.stat(f"{hanging}/weights")
    while not Path(where, "looking").exists():
        time.sleep(0.02)
    time.sleep(0.5)  # the look itself cannot be seen from here
    raise ValueError("no such layer")


@pytest.fixture
def hanging(lone_server: Path) -> Iterator[tuple[Machine, str]]:
    """Yield the server's only node, and a directory on it that nobody can look at and be ended."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("a file system that hangs needs root and /dev/fuse")
    root = Path(tempfile.mkdtemp(prefix="sg-hang-", dir="/tmp"))
    (root / "home").mkdir(mode=0o700)
    (root / "disk").mkdir()
    around = [sys.executable, "-m", "tests.e2e.rows.hanging_disk", str(root / "disk")]
    machine = Machine("stuck", root / "home", lone_server, inside=around)
    try:
        yield machine, str(root / "disk")
    finally:
        machine.end()
        shutil.rmtree(root)


def test_F09_a_run_ends_without_its_unkillable_process_and_its_node_takes_nothing_new(
    hanging: tuple[Machine, str], tmp_path: Path
) -> None:
    machine, disk = hanging
    call = distributed(gpus=2, remote=True, env="live", quiet=True, retries=1)(touch)
    run = call.submit(disk, str(tmp_path))
    with pytest.raises(ValueError, match="no such layer"):
        run.results(timeout=110)
    receipt = run.receipt(timeout=50)
    assert (receipt.state, receipt.reason) == ("FAILED", "rank_raised")
    assert any(golden("rows.unkillable.run-cannot-ended") in note for note in receipt.notes)
    assert golden("rows.unkillable.could-ended") in receipt.gate and len(receipt.quarantined) == 2
    assert len(machine.attempts(run.id)) == 1, "no second attempt beside what is left of the first"
    facts = {fact.kind: fact for fact in first_facts(machine.home.attempt(run.id, 1))}
    assert FactKind.FREED not in facts, "the devices are not free"
    used_ns = facts[FactKind.EXITED].boottime_ns - facts[FactKind.EXEC].boottime_ns
    assert used_ns < 30e9, "the time ends with the kill, not a minute later"
    assert receipt.gpu_ms == 2 * (used_ns // 1_000_000)
    wait_for(lambda: (found := machine.view()) is not None and found.state == "DRAINING", "the server knows of it")
    view = machine.view()
    assert view is not None
    assert golden("rows.unkillable.takes-nothing-new") in view.sentence
    after = distributed(gpus=1, remote=True, env="live", quiet=True)(len).submit("abc")
    said = wait_for(after.waiting_for, "it says what it waits for")
    assert golden("rows.unkillable.stuck-takes-nothing") in said, said
    machine.leave()  # the disk is back
    assert after.results(timeout=60) == [3]
    again = machine.view()
    assert again is not None and (again.state, again.sentence) == ("UP", "")
