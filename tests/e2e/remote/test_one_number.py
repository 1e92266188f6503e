"""Whoever is asked what runs have used and cost says the same number, to the millionth: with everything real."""

from __future__ import annotations

import csv
import io
import json
from fractions import Fraction
from pathlib import Path

import pytest
from click.testing import CliRunner

from serverless_gpu import distributed
from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli.program import sgpu
from serverless_gpu.server.db.database import Database
from tests.support.local.observe import wait_for
from tests.support.reckoning import totals, wrongs
from tests.support.remote.server_process import ServerProcess

pytestmark = pytest.mark.slow
PRICE = "12345.678901"


def told(*words: str) -> str:
    """Return what a command prints."""
    result = CliRunner().invoke(sgpu, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def nothing() -> None:
    """Use devices for as long as that takes."""


def test_receipt_cost_report_records_budget_and_ledger_say_the_same(own_server: ServerProcess, home: Path) -> None:
    told("price", "set", "H100", PRICE)
    told("budget", "set", "all", "--everything", "--money", "1000000", "--per", "month")
    told("budget", "set", "project", "--tag", "project=llm", "--gpu-hours", "1000", "--per", "week")
    runs = []
    for gpus, tags in ((1, {"project": "llm"}), (2, {"project": "llm"}), (2, {"project": "vision"})):
        run = distributed(gpus=gpus, gpu_type="H100", remote=True, quiet=True, tags=tags)(nothing).submit()
        run.results(60)
        runs.append(run)
    receipts = [run.receipt(60) for run in runs]
    micros, gpu_ms = [one.micros for one in receipts], [one.gpu_ms for one in receipts]
    assert all(one is not None and one > 0 for one in micros)

    database = Database(f"sqlite:///{home}/server/server.db", clock=SystemClock())
    try:
        wait_for(lambda: wrongs(database.read) == [], "everything is in the ledger", limit_s=60)
        ledger = totals(database.read)
    finally:
        database.close()
    assert ledger == {(): (sum(gpu_ms), sum(one or 0 for one in micros))}
    costs = [run.cost() for run in runs]
    assert [(cost.micros, cost.gpu_ms, cost.is_final) for cost in costs] == [
        (amount, ms, True) for amount, ms in zip(micros, gpu_ms, strict=True)
    ]
    by_run = {row["run"]: row for row in json.loads(told("usage", "--by", "run", "--json"))["report"]}
    reported = [(by_run[run.id]["micros"], by_run[run.id]["gpu_ms"]) for run in runs]
    assert reported == list(zip(micros, gpu_ms, strict=True))

    rows = list(csv.DictReader(io.StringIO(told("usage", "--records", "--csv"))))
    hours = sum(Fraction(row["usage_quantity"]) for row in rows)
    assert round(hours * 3_600_000) == sum(gpu_ms)  # an hour's parts have no end in decimal

    advised = json.loads(told("advise", "--reserved", "1", "--json"))
    assert advised["charged_micros"] == sum(one or 0 for one in micros)
    # Of runs of milliseconds most of the time is environment and start; it is one sum, where each run was rounded up.
    assert 0 <= advised["charged_micros"] - advised["advice"]["none"]["micros"] <= len(runs)

    def stands(name: str) -> tuple[int, int]:
        view = json.loads(told("budget", "show", name, "--json"))
        return view["used"], view["held"]

    wait_for(lambda: stands("all") == (sum(one or 0 for one in micros), 0), "the budget has it, too")
    wait_for(lambda: stands("project") == (gpu_ms[0] + gpu_ms[1], 0), "and the other one")
