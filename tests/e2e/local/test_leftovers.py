"""Nothing of a run outlives it, and a GPU is free only when proven free. Rows F10, F11 and F12."""

from __future__ import annotations

import errno
import os
import re
import resource
import threading
from pathlib import Path

import pytest

from serverless_gpu import distributed
from serverless_gpu.errors import RankCrashed
from serverless_gpu.testing import FakeGpus, agent_status
from tests.support.golden import golden
from tests.support.local.observe import Process, announced, nothing_of_a_run, wait_for
from tests.support.local.ranks import CHILDREN, leave_children, stay

MIB = 1 << 20


def children_of(where: str) -> list[Process]:
    """Return the children that `leave_children` left."""
    return [announced(Path(where), name)[0] for name in CHILDREN]


@pytest.fixture(params=["cgroups", "sub-reaper"])
def reclaiming(request: pytest.FixtureRequest, own: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home whose runs are ended in one of the two ways."""
    if request.param == "sub-reaper":
        monkeypatch.setenv("SERVERLESS_GPU_CGROUPS", "0")
    assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2]
    status = agent_status(own)
    assert status is not None
    if request.param == "sub-reaper":
        assert status.cgroups == ""
    elif not status.cgroups:
        pytest.skip(f"cgroup v2 cannot be used here: {status.cgroups_problem}")
    return own


def test_F10_what_ranks_leave_behind_ends_with_a_run_that_succeeds(reclaiming: Path, where: str) -> None:
    run = distributed(gpus=1, quiet=True)(leave_children).submit(where)
    children = children_of(where)
    assert run.results(timeout=50) == ["left them"]
    for child in children:
        child.wait_gone()
    assert run.receipt(timeout=50).quarantined == ()


@pytest.mark.parametrize("end", ["cancel", "crash"])
def test_F10_what_ranks_leave_behind_ends_with_a_run_that_fails(reclaiming: Path, where: str, end: str) -> None:
    def train(where: str) -> None:
        leave_children(where)
        stay(where)
        os.abort()

    run = distributed(gpus=1, quiet=True)(train).submit(where)
    children = children_of(where)
    announced(Path(where), "rank0")
    if end == "cancel":
        run.cancel()
    else:
        Path(where, "go").touch()
    assert run.wait(50)
    for child in children:
        child.wait_gone()
    assert run.receipt(timeout=50).state == ("CANCELLED" if end == "cancel" else "FAILED")


def test_F10_a_child_that_holds_stdout_does_not_hold_up_the_result(warm: Path, where: str) -> None:
    def train(where: str, rank: int = -1) -> object:
        return rank or leave_children(where)

    run = distributed(gpus=2, quiet=True)(train).submit(where)
    assert run.results(timeout=50) == ["left them", 1]


def test_F10_children_of_children_of_a_failing_peer_go_too(warm: Path, where: str) -> None:
    def train(where: str, rank: int = -1) -> None:
        if rank == 0:
            leave_children(where)
            raise ValueError("after leaving children")
        threading.Event().wait(60)

    run = distributed(gpus=2, quiet=True)(train).submit(where)
    children = children_of(where)
    with pytest.raises(ValueError, match="after leaving children"):
        run.results(timeout=50)
    for child in children:
        child.wait_gone()


# --- F11: the gate ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_F11_a_gpu_that_is_not_clean_is_quarantined_until_it_is(own: Path, where: str) -> None:
    gpus = FakeGpus(own)
    run = distributed(gpus=2)(stay).submit(where)
    announced(Path(where), "rank1")
    gpus.set("FAKE-H100-1", memory_used_bytes=2048 * MIB, processes={4321: 2048 * MIB})
    Path(where, "go").touch()
    assert run.results(timeout=50) == [0, 1], "the results are there before the gate has decided"
    receipt = run.receipt(timeout=50)
    assert receipt.quarantined == ("FAKE-H100-1",)
    assert golden("local.leftovers.pid-4321-still") in receipt.gate and "FAKE-H100-1" in receipt.text()
    assert receipt.segments.gate_ms is not None and receipt.segments.gate_ms >= 9_000, "three looks, 5 s apart"

    taken = distributed(gpus=7, quiet=True)(len).submit("a")
    assert taken.results(timeout=50) == [1] * 7
    assert "FAKE-H100-1" not in taken.receipt(timeout=50).gpus

    everything = distributed(gpus=8, quiet=True)(len).submit("a")
    assert not everything.wait(0.5) and everything.status() == "QUEUED"
    gpus.clear("FAKE-H100-1")
    assert everything.results(timeout=50) == [1] * 8
    assert "FAKE-H100-1" in everything.receipt(timeout=50).gpus


@pytest.mark.slow
def test_F11_a_gpu_that_cannot_be_asked_is_not_taken_for_clean(own: Path, where: str) -> None:
    run = distributed(gpus=1, quiet=True)(stay).submit(where)
    announced(Path(where), "rank0")
    (own / "fake_gpus.json").write_text("not JSON")
    Path(where, "go").touch()
    receipt = run.receipt(timeout=50)
    assert receipt.quarantined == ("FAKE-H100-0",) and "cannot be read" in receipt.gate


def test_F11_a_gpu_that_gets_clean_in_time_is_given_back(own: Path, where: str) -> None:
    gpus = FakeGpus(own)
    run = distributed(gpus=1, quiet=True)(stay).submit(where)
    announced(Path(where), "rank0")
    gpus.set("FAKE-H100-0", memory_used_bytes=2048 * MIB)
    Path(where, "go").touch()
    assert run.wait(50)
    gpus.clear("FAKE-H100-0")
    receipt = run.receipt(timeout=50)
    assert receipt.quarantined == () and "1 GPU verified free" in receipt.gate


# --- F12: exhaustion --------------------------------------------------------------------------------------------------


def test_F12_a_rank_out_of_descriptors_gets_its_own_error(warm: Path) -> None:
    def exhaust() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        held = []
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))

    with pytest.raises(OSError, match=re.escape(golden("local.leftovers.too-many-open"))) as caught:
        distributed(gpus=1, quiet=True)(exhaust).distributed()
    assert caught.value.errno == errno.EMFILE
    assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2], "the next run does not notice"


def test_F12_a_fork_bomb_meets_its_bound_and_neighbours_do_not_notice(
    own: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_TASKS_MAX", "60")

    def explode() -> int:
        children = 0
        for _ in range(2_000):
            if os.fork() == 0:
                threading.Event().wait(60)
                os._exit(0)
            children += 1
        return children

    neighbour = distributed(gpus=1, quiet=True)(stay).submit(where)
    rank, _ = announced(Path(where), "rank0")
    bomb = distributed(gpus=1, quiet=True)(explode).submit()
    try:
        count = bomb.results(timeout=60)[0]
    except BlockingIOError as error:
        assert error.errno == errno.EAGAIN
    else:
        notes = bomb.receipt(timeout=50).notes
        if not any("not enforced" in note or "bound" in note for note in notes):
            raise AssertionError(f"{count} processes were made")
        pytest.skip(f"no pids controller can be written to here: {notes}")
    assert bomb.receipt(timeout=60).state == "FAILED"
    assert rank.alive()
    Path(where, "go").touch()
    assert neighbour.results(timeout=50) == [0]
    assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2]
    wait_for(lambda: nothing_of_a_run(own), "everything of the bomb is gone")


def test_F12_a_rank_out_of_threads_gets_its_own_error(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_TASKS_MAX", "60")

    def exhaust() -> int:
        done = threading.Event()
        threads = [threading.Thread(target=done.wait, daemon=True) for _ in range(1_000)]
        try:
            for thread in threads:
                thread.start()
        finally:
            done.set()
        return len(threads)

    run = distributed(gpus=1, quiet=True)(exhaust).submit()
    try:
        count = run.results(timeout=60)[0]
    except (RuntimeError, RankCrashed) as error:
        assert "start new thread" in str(error), str(error)
    else:
        notes = run.receipt(timeout=50).notes
        if not any("not enforced" in note or "bound" in note for note in notes):
            raise AssertionError(f"{count} threads were made")
        pytest.skip(f"no pids controller can be written to here: {notes}")
