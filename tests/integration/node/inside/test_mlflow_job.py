"""How a rank learns of the job's MLflow run, and what it may write there; MLflow itself is not needed."""

from __future__ import annotations

import os

import pytest

from serverless_gpu.node.inside.mlflow import writes
from tests.support.node.mlflow_job import VARIABLES


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start from, and come back to, an environment without MLflow's variables."""
    for name in (*VARIABLES, "_MLFLOW_SERVER_ARTIFACT_ROOT"):
        monkeypatch.setenv(name, "")  # so that it is restored, also where the test sets it by itself
        monkeypatch.delenv(name)


def test_what_a_rank_holds_is_not_sent_again_by_a_process_it_forks() -> None:
    held = writes.HeldWrites(lambda: None, again_s=1_000.0)
    held.keep(writes.Batch(1, lambda: True))
    pid = os.fork()
    if not pid:
        os._exit(0 if held.wait(0.0) and not held.is_away and not held.lost else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert held.is_away
    held.give_up()
    assert held.wait(30.0)
