"""Two usage policies and a hard budget, with everything real: a run is stopped, and what it had saved is there.

What a soft budget does is in `tests/integration/server/budgets/test_budgets.py`.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from serverless_gpu import distributed
from serverless_gpu import runtime as rt
from serverless_gpu.cli.program import sgpu
from serverless_gpu.errors import BudgetExhausted, PolicyViolation
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.remote.server_process import ServerProcess

# A run holds its next 60 s: with 62 s of it left, one is stopped after 2 s.
PRICE, HELD_S, LEFT_S = 100_000, 60, 62
PER_SECOND = 2 * PRICE / 3600
OPTIONS: dict[str, Any] = {"gpus": 2, "gpu_type": "H100", "remote": True, "quiet": True, "resume": True, "grace": 30}


def told(*words: str) -> str:
    """Return what a command prints."""
    result = CliRunner().invoke(sgpu, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def used_of(budget: str) -> int:
    """Return what of a budget is used."""
    used: int = json.loads(told("budget", "show", budget, "--json"))["used"]
    return used


def count(limit: int, raised: str = "", rank: int = 0) -> int:
    """Count up to a limit; asked to stop, save the number, and take the time for it until a file is there."""
    rt.should_stop()  # from here on SIGTERM ends nothing
    print(f"rank {rank} counts", flush=True)
    reached = 0
    while reached < limit and not rt.should_stop():
        reached += 1
        time.sleep(0.005)
    if rt.should_stop():
        (rt.checkpoint_dir() / f"{rank}.json").write_text(json.dumps({"count": reached, "why": rt.stop_reason()}))
        while not Path(raised).exists():
            time.sleep(0.01)
    return reached


@pytest.mark.long
@pytest.mark.slow
def test_F71_F72_two_policies_and_a_hard_budget_stop_a_run_that_has_saved_and_raising_it_takes_nothing_back(
    own_server: ServerProcess, home: Path, tmp_path: Path
) -> None:
    me = json.loads(told("whoami", "--json"))["name"]
    told("price", "set", "H100", str(PRICE))
    told("policy", "set", "search", "--require-tag", "team=search,vision", "--gpus-per-run", "2", "--max-run", "1h")
    told("policy", "set", "nightly", "--default-tag", "team=night", "--gpus-per-run", "1")
    for name in ("search", "nightly"):
        told("policy", "attach", name, "--user", me)

    with pytest.raises(PolicyViolation, match="2 usage policies") as several:
        distributed(**OPTIONS)(count).submit(limit=1)
    assert "nightly, search" in str(several.value)
    with pytest.raises(PolicyViolation, match=re.escape(golden("remote.spending.search-does-accept"))):
        distributed(**OPTIONS, policy="search")(count).submit(limit=1)
    with pytest.raises(PolicyViolation, match=re.escape(golden("remote.spending.nightly-does-accept"))):
        distributed(**OPTIONS, policy="nightly")(count).submit(limit=1)

    raised = tmp_path / "raised"
    call = distributed(**OPTIONS, policy="search", tags={"team": "search"})(count)
    run = call.submit(limit=1_000_000, raised=str(raised))
    wait_for(lambda: "counts" in run.logs(0) and "counts" in run.logs(1), "it counts", limit_s=60)
    so_far = run.cost().micros
    assert so_far is not None
    budget = so_far / 1e6 + PER_SECOND * LEFT_S
    llm = ("budget", "set", "llm", "--tag", "team=search", "--per", "month", "--hard")
    assert "the server stops runs" in told(*llm, "--money", f"{budget:.2f}")
    kept = [home / "checkpoints" / run.id / "1" / f"{rank}.json" for rank in (0, 1)]
    wait_for(lambda: all(path.exists() for path in kept), "its checkpoint is saved", limit_s=60)
    told(*llm, "--money", f"{100 * budget:.2f}")
    wait_for(lambda: run.status() == "STOPPING", "its node has said that it stops")
    raised.touch()
    with pytest.raises(BudgetExhausted, match=re.escape(golden("remote.spending.budget-llm-month"))) as stopped:
        run.results(60)
    assert (stopped.value.reason, run.status()) == ("budget", "BUDGET_STOPPED")
    for path in kept:
        saved = json.loads(path.read_text())
        assert saved["why"] == "budget" and saved["count"] > 0
    assert not (home / "runs" / run.id / "2").exists()  # with resume, too: the money is gone

    assert told("show", run.id).count("does not cover the run's next minute") == 1

    receipt = run.receipt()
    assert (receipt.state, receipt.policy, receipt.tags) == ("BUDGET_STOPPED", "search", {"team": "search"})
    assert "BUDGET_STOPPED" in receipt.text() and "search" in receipt.text()
    # It was stopped when what it would hold went over the budget, so what it used stays within.
    assert receipt.micros is not None and budget - PER_SECOND * HELD_S - 1 < receipt.micros / 1e6 <= budget

    wait_for(lambda: run.cost().is_final, "it is charged")
    assert run.cost().micros == receipt.micros
    wait_for(lambda: used_of("llm") == receipt.micros, "the budget has what the receipt says")
    told(*llm, "--money", "1")
    with pytest.raises(BudgetExhausted, match="llm"):
        call.submit(limit=1)
    assert distributed(**{**OPTIONS, "gpus": 1}, policy="nightly")(count).submit(limit=1).results(60) == [1]

    advice = json.loads(told("advise", "--json", "--reserved", str(PRICE // 2), "--last", "1d"))
    assert advice["gpu_type"] == "H100" and advice["charged_micros"] >= receipt.micros
    assert advice["advice"]["on_demand_micros_per_hour"] == PRICE * 1_000_000
