"""How a rank starts the job's MLflow run; MLflow itself is not needed."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serverless_gpu.node.inside.mlflow import hook
from serverless_gpu.node.inside.mlflow.job import MlflowJob


@pytest.mark.parametrize(("rank", "name"), [(0, "mine"), (1, None)])
def test_of_the_names_that_ranks_give_the_jobs_run_that_of_the_first_rank_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, name: str | None
) -> None:
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    job = MlflowJob(str(tmp_path), rank)
    job.run_id = "r1"
    attached: Any = SimpleNamespace(
        job=job,
        writes=SimpleNamespace(begin=lambda: None),
        _means_job=lambda asked: not asked.get("parent_run_id"),
        _experiment_id=lambda: "7",
        _without_variables=contextlib.nullcontext,
        patiently=lambda start: start(),
    )

    def started(
        run_id: str | None = None,
        experiment_id: str | None = None,
        run_name: str | None = None,
        nested: bool = False,
        parent_run_id: str | None = None,
        tags: object = None,
        **_others: object,
    ) -> tuple[object, ...]:
        del experiment_id, nested, parent_run_id
        return run_id, run_name, tags

    start = functools.partial(hook.MlflowHook.start_run, attached, started)
    assert start(run_name="mine", tags={"a": "b"}) == ("r1", name, {"a": "b"})
    assert start(None, None, "mine", False, None, {"a": "b"}) == ("r1", name, {"a": "b"}), "by position"
    assert start(None, None) == ("r1", None, None)
    assert start(run_name="child", nested=True) == (None, "child", None), "runs below it are each rank's own"
    assert start(run_name="child", parent_run_id="r1") == (None, "child", None)
