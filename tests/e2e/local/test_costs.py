"""What a run costs: while it goes on, and when it has ended, as its receipt says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import serverless_gpu
from serverless_gpu import distributed
from serverless_gpu.errors import NodeLost
from serverless_gpu.units import micros_for
from tests.support.local.observe import kill_own_supervisor, used_ms, wait_for


@distributed(gpus=2, gpu_type="H100", quiet=True)
def endless(done: str) -> None:
    """Wait until it may end."""
    wait_for(Path(done).exists, "the test is over", limit_s=60)


@pytest.mark.slow
def test_a_run_says_what_it_costs_by_now_and_in_the_end_what_its_receipt_says(own: Path, tmp_path: Path) -> None:
    (own / "config.toml").write_text("[prices]\nH100 = 2.99\n")
    done = tmp_path / "done"
    run = endless.submit(str(done))
    wait_for(lambda: run.status() == "RUNNING", "it runs")
    first = run.cost()
    wait_for(lambda: run.cost().gpu_ms > first.gpu_ms, "time passes")
    elsewhere = serverless_gpu.attach(run.id).cost()
    assert not elsewhere.is_final and elsewhere.gpu_ms > first.gpu_ms and elsewhere.currency == "USD"
    # The price was fixed when the devices were taken.
    (own / "config.toml").write_text("[prices]\nH100 = 5000\n")
    done.touch()
    receipt, cost = run.receipt(50), run.cost()
    assert (cost.gpu_ms, cost.micros, cost.is_final) == (receipt.gpu_ms, receipt.micros, True)
    assert cost.micros == micros_for(cost.billed_ms, 2_990_000) and cost.billed_ms == cost.gpu_ms
    assert str(cost).startswith("0.0") and cost.attempts == 1 and cost.gpu_type == "H100"


@distributed(gpus=2, gpu_type="H100", quiet=True)
def work_then_end_its_supervisor(home: str) -> None:
    """Use two GPUs for half a second, write down when that was over, and kill the process that would say so."""
    time.sleep(0.5)
    Path(home, "used").write_text(str(time.clock_gettime_ns(time.CLOCK_BOOTTIME)))
    kill_own_supervisor(home)


@pytest.mark.slow
def test_22A8_a_run_of_this_machine_that_kills_its_own_supervisor_has_a_receipt_and_costs_its_time(own: Path) -> None:
    (own / "config.toml").write_text("[prices]\nH100 = 2.99\n")
    run = work_then_end_its_supervisor.submit(str(own))
    with pytest.raises(NodeLost) as caught:
        run.results(50)
    assert caught.value.reason == "supervisor_killed"
    receipt, cost = run.receipt(50), run.cost()
    assert receipt.gpu_ms == cost.gpu_ms == cost.billed_ms >= 2 * used_ms(own, run.id) >= 2 * 500
    assert receipt.micros == cost.micros == micros_for(cost.billed_ms, 2_990_000)
