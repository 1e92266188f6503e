"""What a run of a server costs: asked beforehand, while it goes on, and when its ledger has it."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import serverless_gpu
from serverless_gpu import distributed
from serverless_gpu.errors import NodeLost, NotFound, ServerProblem
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.units import micros_for
from tests.support.golden import golden
from tests.support.local.observe import kill_own_supervisor, used_ms, wait_for
from tests.support.remote.commands import sgpu
from tests.support.remote.fake_server import FakeServer

_MICROS = 3_600_000_000  # 3,600 USD an hour: one for each GPU-second


def test_a_server_of_an_earlier_version_cannot_say(fake: FakeServer) -> None:
    fake.script().say(State.RUNNING)
    run = endless.submit("done")
    with pytest.raises(ServerProblem, match=re.escape(golden("remote.costs.earlier-version-cannot"))):
        run.cost()
    fake.runs.clear()
    with pytest.raises(NotFound, match="no run"):
        run.cost()


@pytest.fixture
def priced(served: Path) -> Iterator[Path]:
    """Yield a home whose server has a price for H100, for as long as the test takes."""
    with contextlib.closing(sqlite3.connect(served / "server" / "server.db", timeout=30)) as database:
        row = ("H100", "", 0, _MICROS, 0, 0)
        columns = "resource, pool, from_ns, micros_per_hour, dbu_micros_per_hour, set_ns"
        with database:
            database.execute(f"INSERT INTO prices ({columns}) VALUES (?, ?, ?, ?, ?, ?)", row)
        yield served
        with database:
            database.execute("DELETE FROM prices")


@distributed(gpus=2, gpu_type="H100", remote=True, env="live", quiet=True, timeout=300)
def endless(done: str) -> None:
    """Wait until it may end."""
    wait_for(Path(done).exists, "the test is over", limit_s=300)


@pytest.mark.slow
def test_a_run_of_a_server_says_what_it_costs_before_meanwhile_and_afterwards(priced: Path, tmp_path: Path) -> None:
    before = endless.estimate(str(tmp_path))
    assert before.cost is not None and before.cost.at_timeout_micros == 600_000_000
    assert str(before).splitlines()[1].startswith("at most 600.00 USD: 2 H100 × 3,600.00 USD = 7,200.00 USD an hour; ")
    done = tmp_path / "done"
    run = endless.submit(str(done))
    try:
        wait_for(lambda: run.cost().gpu_ms > 0, "it has used something", limit_s=60)
        meanwhile = run.cost()
        assert not meanwhile.is_final and meanwhile.micros == micros_for(meanwhile.billed_ms, _MICROS)
        rows = [line for line in sgpu("runs").stdout.splitlines() if line.startswith(run.id)]
        assert len(rows) == 1 and rows[0].endswith(" USD so far")
    finally:
        done.touch()
    receipt = run.receipt(60)
    wait_for(lambda: serverless_gpu.attach(run.id).cost().is_final, "the ledger has it", limit_s=60)
    cost = run.cost()
    assert (cost.micros, cost.gpu_ms, cost.billed_ms) == (receipt.micros, receipt.gpu_ms, receipt.gpu_ms)
    assert cost.micros is not None and cost.micros >= (meanwhile.micros or 0)
    assert f"cost: {cost}" in sgpu("show", run.id).stdout.splitlines()
    told = json.loads(sgpu("show", "--json", run.id).stdout)
    assert (told["cost"]["micros"], told["micros"], told["cost"]["is_final"]) == (cost.micros, cost.micros, True)


@distributed(gpus=2, gpu_type="H100", remote=True, env="live", quiet=True, tags={"of": "the-last-act"})
def work_then_end_its_supervisor(home: str) -> None:
    """Use two GPUs for half a second, write down when that was over, and kill the process that would say so."""
    time.sleep(0.5)
    Path(home, "used").write_text(str(time.clock_gettime_ns(time.CLOCK_BOOTTIME)))
    kill_own_supervisor(home)


@pytest.mark.slow
def test_22A8_a_run_that_kills_its_own_supervisor_pays_and_its_budget_sees_it(priced: Path) -> None:
    sgpu("budget", "set", "last-act", "--tag", "of=the-last-act", "--per", "month", "--money", "1000000")
    try:
        run = work_then_end_its_supervisor.submit(str(priced))
        with pytest.raises(NodeLost) as caught:
            run.results(60)
        assert caught.value.reason == "supervisor_killed"
        wait_for(lambda: run.cost().is_final, "the ledger has it", limit_s=60)
        cost, receipt = run.cost(), run.receipt(60)
        assert cost.gpu_ms == cost.billed_ms == receipt.gpu_ms >= 2 * used_ms(priced, run.id) >= 2 * 500
        assert cost.micros == micros_for(cost.billed_ms, _MICROS)

        def used() -> object:
            return json.loads(sgpu("budget", "show", "last-act", "--json").stdout)["used"]

        wait_for(lambda: used() == cost.micros, "the budget has the same")
    finally:
        sgpu("budget", "delete", "last-act")
