"""Rows F23 to F25 of the failure matrix: GPUs that fail under a run of this machine, told by the driver's log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu import Run, distributed, session
from serverless_gpu.errors import RunError
from serverless_gpu.model.lifecycle.attempt import FactKind
from serverless_gpu.model.xid import XidKind
from serverless_gpu.node.attempt.history import first_facts
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.devices.locks import DeviceLocks
from serverless_gpu.node.supervisor.gpu_faults import read_hits
from serverless_gpu.testing import FakeGpus, stop_agent
from tests.support.golden import golden
from tests.support.local.observe import cancel_all, wait_for

pytestmark = pytest.mark.slow


def train(where: str, rank: int = -1) -> int:
    """Say that it runs, with what; end as a file asks it to."""
    Path(where, f"runs{rank}").touch()
    while True:
        if Path(where, "fail").exists() and rank == 0:
            raise RuntimeError("CUDA error: unspecified launch failure")
        if Path(where, "return").exists():
            return rank
        time.sleep(0.02)


@pytest.fixture
def gpus(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpus]:
    """Yield three GPUs of a home of its own."""
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", "H100:3")
    yield FakeGpus(home)
    cancel_all(home)


def begun(count: int, where: Path) -> tuple[Run[int], tuple[str, ...]]:
    """Return a run whose ranks run, and the GPUs that it has."""
    run = distributed(gpus=count, quiet=True)(train).submit(str(where))
    wait_for(lambda: all((where / f"runs{rank}").exists() for rank in range(count)), "every rank runs")
    return run, first_facts(run.directory)[-1].gpus


def quarantined(home: Path) -> dict[str, str]:
    return {uuid: note.reason for uuid, note in DeviceLocks(Home(home).root / "locks").quarantined().items()}


def test_F23_a_gpu_that_fell_off_the_bus_is_what_the_run_failed_of(home: Path, gpus: FakeGpus, tmp_path: Path) -> None:
    run, used = begun(2, tmp_path)
    gpus.xid(used[1], 79, "GPU has fallen off the bus")
    wait_for(lambda: used[1] in quarantined(home), "it is in quarantine while the run still goes on")
    xid_at_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    time.sleep(1.0)  # time that is not to be paid for
    assert run.status() == "RUNNING", "the rank has not noticed yet"
    (tmp_path / "fail").touch()
    with pytest.raises(RunError, match=f"{used[1]}: Xid 79") as caught:
        run.results(timeout=50)
    assert caught.value.reason == "gpu_lost"
    assert any("RuntimeError" in note for note in caught.value.__notes__)
    receipt = run.receipt(timeout=50)
    assert (receipt.state, receipt.reason, receipt.quarantined) == ("FAILED", "gpu_lost", (used[1],))
    facts = {fact.kind: fact for fact in first_facts(run.directory)}
    assert FactKind.FREED not in facts
    assert facts[FactKind.EXITED].boottime_ns <= xid_at_ns
    used_ms = (facts[FactKind.EXITED].boottime_ns - facts[FactKind.EXEC].boottime_ns) // 1_000_000
    assert receipt.gpu_ms == 2 * used_ms
    assert any("Xid 79" in note for note in receipt.notes)

    stop_agent(home)  # what is known of a GPU is not in the agent's memory
    assert distributed(gpus=2, quiet=True)(len).distributed("abc") == [3, 3]
    assert used[1] in quarantined(home), "it answers, and no look at it is proof enough"
    waiting = distributed(gpus=3, quiet=True)(len).submit("abc")
    assert "Xid 79" in wait_for(waiting.waiting_for, "it says what it waits for")
    waiting.cancel()


@pytest.mark.spot
def test_F24_a_contained_error_ends_only_its_run(home: Path, gpus: FakeGpus, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other, _ = begun(1, tmp_path / "other")
    run, used = begun(1, tmp_path)
    gpus.xid(used[0], 94)
    (tmp_path / "fail").touch()
    with pytest.raises(RunError, match="Xid 94"):
        run.results(timeout=50)
    receipt = run.receipt(timeout=50)
    assert (receipt.reason, receipt.quarantined) == ("gpu_lost", ())
    assert quarantined(home) == {}
    (tmp_path / "other" / "return").touch()
    assert other.results(timeout=50) == [0]


def test_F24_memory_that_waits_for_a_reset_is_lent_to_nobody_after_the_run(
    home: Path, gpus: FakeGpus, tmp_path: Path
) -> None:
    run, used = begun(1, tmp_path)
    gpus.xid(used[0], 63)
    wait_for(lambda: used[0] in quarantined(home), "it is noted")
    (tmp_path / "return").touch()
    assert run.results(timeout=50) == [0]
    receipt = run.receipt(timeout=50)
    assert (receipt.state, receipt.quarantined) == ("SUCCEEDED", used)
    assert FactKind.FREED in {fact.kind for fact in first_facts(run.directory)}, "what was used is paid for"


def test_F25_an_illegal_memory_access_is_the_users_own_failure(home: Path, gpus: FakeGpus, tmp_path: Path) -> None:
    run, used = begun(1, tmp_path)
    gpus.xid(used[0], 31, "Ch 00000008, intr 10000000. MMU Fault")
    (tmp_path / "fail").touch()
    with pytest.raises(RuntimeError, match="unspecified launch failure") as caught:
        run.results(timeout=50)
    assert any(
        "Xid 31" in note and golden("rows.failing_gpus.illegal-memory-access") in note
        for note in caught.value.__notes__
    )
    receipt = run.receipt(timeout=50)
    assert (receipt.reason, receipt.quarantined) == ("rank_raised", ())
    assert FactKind.FREED in {fact.kind for fact in first_facts(run.directory)}, "it is billed"
    assert quarantined(home) == {}
    hits = read_hits(home / "locks", used)
    assert [hit.number for hit in hits[used[0]]] == [31]


def test_F23_a_session_lends_no_gpu_that_failed_while_nobody_had_it(home: Path, gpus: FakeGpus) -> None:
    with session(gpus=2, gpu_type="H100", quiet=True) as held:
        assert held.distributed(len, "abc") == [3, 3]
        DeviceLocks(home / "locks").quarantine("FAKE-H100-0", "Xid 79", fault=XidKind.LOST)
        waiting = held.submit(len, "abc")
        assert "FAKE-H100-0 in quarantine" in wait_for(waiting.waiting_for, "it says what it waits for")
        waiting.cancel()
        assert held.distributed(distributed(gpus=1, gpu_type="H100", quiet=True)(len), "abc") == [3]
