"""Frameworks that make MLflow runs by themselves: in a rank they use the job's. And what happens when MLflow hangs."""

from __future__ import annotations

import pytest

from tests.e2e.tracking.bare import BareRanks
from tests.e2e.tracking.hanging import way_to
from tests.support.golden import golden
from tests.support.local.observe import wait_for

pytestmark = [pytest.mark.timeout(300), pytest.mark.torch]


def test_trainer_uses_the_jobs_run(bare: BareRanks) -> None:
    ended = bare.run("trainer")
    assert ended.values == [bare.job], ended.stderr
    run = bare.server.run(bare.job)
    assert (run.name, run.status, run.params["max_steps"]) == ("my trainer", "RUNNING", "4")
    assert [step for step, _ in bare.server.history(bare.job, "loss")] == [1, 2, 3, 4]
    assert len(bare.server.runs(bare.experiment)) == 1


def test_lightnings_logger_uses_the_jobs_run_unless_told_otherwise(bare: BareRanks) -> None:
    ended = bare.run("lightning_logger")
    assert ended.codes == [0], ended.stderr
    assert ended.values[0]["job"] == bare.job != ended.values[0]["own"]
    run = bare.server.run(bare.job)
    assert (run.name, run.status, run.tags["team"]) == ("my lightning", "RUNNING", "vision")
    assert [step for step, _ in bare.server.history(bare.job, "train_loss")] == [0, 1, 2, 3]
    assert bare.server.run(ended.values[0]["own"]).status == "FINISHED"


def test_lightnings_autolog_uses_the_jobs_run(bare: BareRanks) -> None:
    ended = bare.run("lightning_autolog")
    assert ended.values == [bare.job], ended.stderr
    run = bare.server.run(bare.job)
    assert "train_loss" in run.metrics and run.params["optimizer_name"] == "SGD"
    assert len(bare.server.runs(bare.experiment)) == 1


def test_a_model_is_registered_and_loaded_back(bare: BareRanks) -> None:
    ended = bare.run("register", environ={"TEST_MODEL": "linear"})
    assert ended.values == [0.0], ended.stderr
    versions = bare.server.get("model-versions/get", name="linear", version="1")["model_version"]
    assert versions["run_id"] == bare.job


def test_F44_calls_of_the_users_own_to_a_server_that_hangs_are_bounded(bare: BareRanks) -> None:
    """A thousand points while nothing is answered: the rank goes on, ends, and says what was lost."""
    with way_to(bare.server.uri) as (uri, cut):
        bare.uri = uri
        bare.say("ready")
        processes = bare.start("log_for_a_while")
        wait_for(lambda: (bare.work / "started").exists() or processes[0].poll() is not None, "started", limit_s=120)
        cut.set()
        (bare.work / "go").touch()
        out, err = processes[0].communicate(timeout=120)
    assert processes[0].returncode == 0, err
    assert "slowest" in out
    assert err.count("serverless-gpu: MLflow does not answer") == 1
    assert golden("tracking.frameworks.000-points-values") in err
