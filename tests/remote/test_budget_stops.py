"""Budgets of a real server: a hard one stops a real run with its checkpoint saved, a soft one lets it finish."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu import distributed
from serverless_gpu import runtime as rt
from serverless_gpu.errors import BudgetExhausted
from tests.local.observe import wait_for
from tests.remote.test_commands import sgpu

pytestmark = pytest.mark.slow


@pytest.fixture
def priced(served: Path) -> Iterator[Path]:
    """Yield a home whose server takes a dollar for each second of a GPU, and has the budgets of the test."""
    assert sgpu("price", "set", "H100", "3600").exit_code == 0
    yield served
    with contextlib.closing(sqlite3.connect(served / "server" / "server.db", timeout=30)) as database, database:
        database.execute("DELETE FROM prices")
    for each in json.loads(sgpu("budget", "list", "--json").stdout)["budgets"]:
        sgpu("budget", "delete", each["name"])


def save_when_asked(raised: str) -> str | None:
    """Work until asked to stop, then save, and take the time for it that a file says."""
    while not rt.should_stop():
        time.sleep(0.01)
    (rt.checkpoint_dir() / "saved.json").write_text(json.dumps({"why": rt.stop_reason()}))
    wait_for(Path(raised).exists, "the budget was raised", limit_s=20)
    return rt.stop_reason()


def test_F71_F72_a_hard_budget_stops_a_run_with_its_checkpoint_saved_and_raising_it_takes_nothing_back(
    priced: Path, tmp_path: Path
) -> None:
    assert "runs are stopped" in sgpu("budget", "set", "llm", "--tag", "project=llm", "--usd", "62", "--hard").stdout
    raised = tmp_path / "raised"
    call = distributed(gpus=1, gpu_type="H100", remote=True, env="live", grace=30, tags={"project": "llm"})
    run = call(save_when_asked).submit(str(raised))
    saved = priced / "checkpoints" / run.id / "1" / "saved.json"
    wait_for(saved.exists, "the checkpoint is saved", limit_s=40)
    assert sgpu("budget", "set", "llm", "--tag", "project=llm", "--usd", "6200", "--hard").exit_code == 0
    assert run.status() == "STOPPING"
    raised.touch()
    with pytest.raises(BudgetExhausted, match="budget 'llm' this month does not pay for") as caught:
        run.results(40)
    assert caught.value.reason == "budget" and json.loads(saved.read_text()) == {"why": "budget"}
    receipt = run.receipt(30)
    assert (run.status(), receipt.reason) == ("BUDGET_STOPPED", "budget")
    assert receipt.micros is not None and 2_000_000 <= receipt.micros <= 62_000_000
    view = json.loads(sgpu("budget", "show", "llm", "--json").stdout)
    wait_for(lambda: _used("llm") == receipt.micros, "the budget has what the receipt says", limit_s=20)
    assert view["hard"] and view["kind"] == "tag"


def test_F71_a_soft_budget_says_so_lets_the_run_finish_and_refuses_the_next(priced: Path, tmp_path: Path) -> None:
    sgpu("budget", "set", "mine", "--tag", "project=soft", "--money", "1.50", "--per", "day")
    done = tmp_path / "done"
    tags = {"project": "soft"}
    call = distributed(gpus=1, gpu_type="H100", remote=True, env="live", timeout=60, tags=tags)(until)
    run = call.submit(str(done))
    said = ("RUNNING", "budget 'mine' is used up today; nothing new starts")
    wait_for(lambda: said in _events(priced, run.id), "the run is told", limit_s=40)
    with pytest.raises(BudgetExhausted, match="budget 'mine' is used up today") as caught:
        call.submit(str(done))
    assert "an operator can raise it: sgpu budget set mine" in caught.value.hint
    done.touch()
    assert run.results(40) == ["done"]


def until(path: str) -> str:
    """Wait until it may end."""
    wait_for(Path(path).exists, "the test is over", limit_s=60)
    return "done"


def _events(home: Path, run_id: str) -> list[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(home / "server" / "server.db", timeout=30)) as database:
        return database.execute(
            "SELECT state, sentence FROM events WHERE run_id = ? ORDER BY seq", (run_id,)
        ).fetchall()


def _used(name: str) -> int:
    used: int = json.loads(sgpu("budget", "show", name, "--json").stdout)["used"]
    return used
