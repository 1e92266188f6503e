"""Row F26 of the failure matrix: the driver hangs; what runs goes on, nothing new is lent, and it ends by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu import distributed
from serverless_gpu.errors import RunError
from serverless_gpu.node.attempt.history import first_facts
from serverless_gpu.testing import FakeGpus, agent_status
from tests.e2e.rows.machines import Machine
from tests.support.golden import golden
from tests.support.local.observe import cancel_all, wait_for

pytestmark = pytest.mark.slow


def stay(where: str, rank: int = -1) -> int:
    """Say that it runs, and return when a file says so."""
    Path(where, f"runs{rank}").touch()
    while not Path(where, "return").exists():
        if Path(where, "raise").exists():
            raise RuntimeError("CUDA error: unspecified launch failure")
        time.sleep(0.02)
    return rank


def test_F26_what_runs_goes_on_and_who_comes_waits(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", "H100:3")
    gpus = FakeGpus(home)
    run = distributed(gpus=1, quiet=True)(stay).submit(str(tmp_path))
    try:
        wait_for(lambda: (tmp_path / "runs0").exists(), "it runs")
        gpus.hangs()
        waiting = distributed(gpus=1, quiet=True)(len).submit("abc")
        said = wait_for(waiting.waiting_for, "it says what it waits for")
        assert golden("rows.hanging_driver.nvml-did-answer") in said
        status = agent_status(home)
        assert status is not None and len(status.attempts) == 2, "the agent answers"
        (tmp_path / "return").touch()
        assert run.results(timeout=50) == [0]
        gpus.hangs(False)
        assert waiting.results(timeout=50) == [3]
        assert run.receipt(timeout=50).state == "SUCCEEDED"
    finally:
        cancel_all(home)


@pytest.fixture
def node(lone_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Yield the server's only node."""
    root = tmp_path_factory.mktemp("n", numbered=True)
    machine = Machine("n1", root, lone_server)
    try:
        yield machine
    finally:
        machine.end()


def test_F26_F23_a_node_is_degraded_while_its_driver_hangs_and_drained_when_a_gpu_is_lost(
    node: Machine, tmp_path: Path
) -> None:
    gpus = FakeGpus(node.home.root)
    call = distributed(gpus=1, remote=True, env="live", quiet=True, retry_on_infra=True)(stay)
    run = call.submit(str(tmp_path))
    wait_for(lambda: (tmp_path / "runs0").exists(), "it runs")

    gpus.hangs()
    assert golden("rows.hanging_driver.nvml-did-answer") in told(node, "DEGRADED")
    after = distributed(gpus=1, remote=True, env="live", quiet=True)(len).submit("abc")
    assert "is degraded" in wait_for(after.waiting_for, "it says what it waits for")
    assert run.status() == "RUNNING"
    gpus.hangs(False)
    assert after.results(timeout=60) == [3]
    view = node.view()
    assert view is not None and (view.state, view.sentence) == ("UP", "")

    (used,) = first_facts(node.home.attempt(run.id, 1))[-1].gpus
    gpus.xid(used, 79)
    assert golden("rows.hanging_driver.takes-nothing-new", used=used) in told(node, "DRAINING")
    (tmp_path / "raise").touch()
    wait_for(lambda: run.status() == "QUEUED", "it waits for another node")
    (over,) = node.attempts(run.id)
    assert (over.state, over.reason) == ("FAILED", "gpu_lost")
    run.cancel()
    with pytest.raises(RunError):
        run.results(timeout=50)


def told(node: Machine, state: str) -> str:
    """Return what is said of a node once it is in a state."""
    wait_for(lambda: (view := node.view()) is not None and view.state == state, f"it is {state}")
    view = node.view()
    assert view is not None
    return view.sentence
