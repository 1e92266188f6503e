"""Row F28 of the failure matrix: a node's disk fills up while a run goes on."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu import distributed
from serverless_gpu.model.lifecycle.attempt import FactKind
from serverless_gpu.node.attempt.history import first_facts, read_ending, read_receipt
from serverless_gpu.node.attempt.usage_account import FACTS_BYTES, RESERVE, RESERVE_SIZES
from tests.e2e.rows.machines import Machine
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.small_disks import fill, small_disk

pytestmark = pytest.mark.slow


@pytest.fixture
def machine(lone_server: Path) -> Iterator[Machine]:
    """Yield the server's only node, on a disk of 48 MB."""
    with small_disk("48m") as disk:
        machine = Machine("small", disk, lone_server)
        try:
            yield machine
        finally:
            (disk / "filler").unlink(missing_ok=True)
            machine.end()


def use_up(disk: str, where: str, *, then: str) -> str:
    """Write until the disk is full, print on, and do `then` when the test says so."""
    print("before", flush=True)
    filler = fill(Path(disk))
    print("x" * 100_000, flush=True)
    Path(where, "full").touch()
    while not Path(where, "go").exists():
        time.sleep(0.02)
    if then == "raise":
        with Path(disk, "model.pt").open("wb", buffering=0) as file:
            file.write(b"weights")
    filler.unlink()
    print("after", flush=True)
    return "done"


def test_F28_the_user_gets_the_error_and_the_server_the_end_while_the_disk_is_full(
    machine: Machine, tmp_path: Path
) -> None:
    disk = machine.home.root
    run = distributed(gpus=1, remote=True, env="live")(use_up).submit(str(disk), str(tmp_path), then="raise")
    wait_for((tmp_path / "full").exists, "the disk is full")
    assert os.statvfs(disk).f_bavail == 0
    seen = machine.view()
    assert seen is not None

    def heard_twice() -> bool:
        view = machine.view()
        return view is not None and view.seen_ns > seen.seen_ns + 6_000_000_000 and view.state == "UP"

    wait_for(heard_twice, "the node goes on with its signs of life")
    assert run.status() == "RUNNING"
    (tmp_path / "go").touch()
    with pytest.raises(OSError, match=re.escape(golden("rows.full_disk_mid_run.space-left-device"))) as caught:
        run.results(timeout=60)
    assert caught.value.errno == errno.ENOSPC
    receipt = run.receipt(timeout=60)
    free = os.statvfs(disk)
    assert free.f_bavail * free.f_frsize <= sum(RESERVE_SIZES) + FACTS_BYTES, "nothing is free but what was not needed"
    assert (receipt.state, receipt.reason) == ("FAILED", "rank_raised")
    assert any(golden("local.output.rank-output-kept") in note for note in receipt.notes), receipt.notes
    attempt = machine.home.attempt(run.id, 1)
    ending, kept = read_ending(attempt), read_receipt(attempt)
    assert ending is not None and ending.state == "FAILED", "what was said is on the disk, too"
    assert kept is not None and kept.gpu_ms == receipt.gpu_ms > 0
    kinds = [fact.kind for fact in first_facts(attempt) if fact.kind is not FactKind.ALIVE]
    assert kinds[-4:] == [FactKind.EXEC, FactKind.STOPPING, FactKind.EXITED, FactKind.FREED]
    wait_for(lambda: not (attempt / RESERVE).exists(), "what of the reserve was not needed is given back")
    (disk / "filler").unlink()
    assert distributed(gpus=1, remote=True, env="live", quiet=True)(len).distributed("abc") == [3]


def test_F28_output_says_what_is_missing_once_there_is_room_again(machine: Machine, tmp_path: Path) -> None:
    disk = machine.home.root
    call = distributed(gpus=1, remote=True, env="live", quiet=True)(use_up)
    run = call.submit(str(disk), str(tmp_path), then="go on")
    wait_for((tmp_path / "full").exists, "the disk is full")
    (tmp_path / "go").touch()
    assert run.results(timeout=60) == ["done"]
    run.receipt(timeout=60)
    said = (machine.home.attempt(run.id, 1) / "logs" / "0.stdout").read_text()
    assert said.startswith("before\n") and said.endswith("after\n")
    assert "dropped until" in said and golden("rows.full_disk_mid_run.space-left-device") in said
