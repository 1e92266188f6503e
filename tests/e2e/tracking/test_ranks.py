"""Ranks that use MLflow as users do, against a real server: all of it lands in the job's run."""

from __future__ import annotations

import pytest

from tests.e2e.tracking.bare import BareRanks
from tests.support.local.observe import wait_for
from tests.support.tracking.mlflow_server import MlflowServer

pytestmark = pytest.mark.timeout(300)


def test_every_rank_logs_without_start_run(bare: BareRanks) -> None:
    """Usage 2: all ranks, same keys, same steps; nothing fails, nothing is missing, the run goes on."""
    ended = bare.run("log_without_start", ranks=4)
    assert ended.codes == [0, 0, 0, 0], ended.stderr
    assert ended.values == [{"active": bare.job, "last": bare.job}] * 4
    assert ended.said == []
    steps = {step for step, _ in bare.server.history(bare.job, "loss")}
    assert steps == set(range(20))
    for rank in range(4):
        assert bare.server.history(bare.job, f"loss_{rank}") == [(step, float(step)) for step in range(20)]
    assert bare.server.run(bare.job).status == "RUNNING", "ranks do not end it"
    assert len(bare.server.runs(bare.experiment)) == 1
    assert not any("View run" in out for out in ended.stdout), "the link is ours to say, once"


def test_a_named_run_on_every_rank_is_the_jobs(bare: BareRanks) -> None:
    """Usage 3: start_run with a name, artifacts, and a second start_run after the first has ended."""
    ended = bare.run("start_with_name", ranks=2)
    assert ended.values == [{"first": bare.job, "second": bare.job, "last": bare.job}] * 2, ended.stderr
    run = bare.server.run(bare.job)
    assert (run.name, run.status) == ("fsdp", "RUNNING")
    assert run.params == {"workers": "2"}
    assert {step for step, _ in bare.server.history(bare.job, "second")} == {0, 1}
    assert not [key for key in run.metrics if key.startswith("system/")], "the node measures, not every rank"
    files = bare.server.get("artifacts/list", run_id=bare.job, path="notes")["files"]
    assert [file["path"] for file in files] == ["notes/0.txt", "notes/1.txt"]


def test_last_active_run_is_the_jobs_before_anything_is_logged(bare: BareRanks) -> None:
    """Usage 6: the identifier that a rank returns."""
    assert bare.run("last_before_anything").values == [bare.job]


def test_runs_of_another_experiment_are_the_users(bare: BareRanks) -> None:
    # MLflow activates an experiment in one of two ranks only when both make it at the same moment.
    bare.server.experiment("/tests/of the user's own")
    experiment = bare.server.experiment(bare.experiment)
    ended = bare.run("another_experiment", ranks=2, environ={"TEST_EXPERIMENT": experiment})
    own = [bare.server.run(value["own"]) for value in ended.values]
    assert len({run.run_id for run in own} | {bare.job}) == 3
    assert {(run.name, run.status) for run in own} == {("own-0", "FINISHED"), ("own-1", "FINISHED")}
    assert [value["job"] for value in ended.values] == [bare.job] * 2


def test_another_store_is_the_users(bare: BareRanks) -> None:
    ended = bare.run("another_store")
    assert ended.codes == [0], ended.stderr
    assert ended.values != [bare.job] and (bare.work / "own.db").exists()


def test_runs_below_the_jobs_run(bare: BareRanks) -> None:
    ended = bare.run("nested_and_named")
    assert ended.codes == [0], ended.stderr
    ids = ended.values[0]
    assert ids.pop("job") == bare.job and len(set(ids.values())) == 4
    for name, run_id in ids.items():
        run = bare.server.run(run_id)
        assert run.tags["mlflow.parentRunId"] == bare.job, name
        assert run.status == "FINISHED", name
    assert bare.server.run(ids["inside"]).metrics == {"later": 1.0}
    assert bare.server.run(bare.job).params == {}


def test_unequal_parameters_are_kept_with_the_rank(bare: BareRanks) -> None:
    ended = bare.run("unequal_params", ranks=3)
    assert ended.codes == [0, 0, 0], ended.stderr
    params = bare.server.run(bare.job).params
    assert params.pop("lr") == "0.1" and params.pop("layers") == "12"
    for key, values in (("seed", {"0", "1", "2"}), ("shard", {"part-0", "part-1", "part-2"})):
        kept = {name: value for name, value in params.items() if name.partition(".")[0] == key}
        assert set(kept.values()) == values and key in kept, params
        for name, value in kept.items():
            assert name == key or name == f"{key}.rank{value[-1]}"
    assert {step for step, _ in bare.server.history(bare.job, "after")} == {0, 1, 2}, "nothing else was lost"
    by_rank = [err.count("different values") for err in ended.stderr]
    assert by_rank[0] <= 1 and sum(by_rank[1:]) <= 1 <= sum(by_rank), "the first says it once, and one of the others"


def test_a_rank_that_contradicts_itself_is_told_by_mlflow(bare: BareRanks) -> None:
    ended = bare.run("contradict")
    assert ended.values == [["INVALID_PARAMETER_VALUE"]], ended.stderr
    assert bare.server.run(bare.job).params == {"lr": "1", "lr.rank0": "2", "lr.rank0.2": "3"}


def test_the_last_point_before_a_failure_arrives(bare: BareRanks) -> None:
    ended = bare.run("fail_inside")
    assert ended.codes == [1] and "diverged" in ended.stderr[0]
    assert "loss" in bare.server.run(bare.job).metrics
    assert bare.server.run(bare.job).status == "RUNNING", "how it ended is the node's to say"


def test_the_run_is_waited_for_while_it_is_made(bare: BareRanks) -> None:
    bare.say("pending")
    processes = bare.start("last_before_anything")
    wait_for(lambda: _has_mlflow(processes[0].pid), "the rank imports MLflow", limit_s=60)
    bare.say("ready")
    out, err = processes[0].communicate(timeout=60)
    assert f'"{bare.job}"' in out, err


def _has_mlflow(pid: int) -> bool:
    """Return whether a process has begun to import MLflow: it maps a library of its dependencies."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        return "/mlflow/lib/" in file.read()


def test_a_run_that_never_comes_is_said_once(bare: BareRanks) -> None:
    bare.say("failed", sentence="MLflow at http://127.0.0.1:1 refused")
    ended = bare.run("last_before_anything", ranks=2)
    assert ended.values == ["", ""]
    assert [len([line for line in err.splitlines() if "refused" in line]) for err in ended.stderr] == [1, 1]


def test_runs_of_the_ranks_own_are_whole_where_the_jobs_is_not_known(bare: BareRanks) -> None:
    """Asynchronous logging is our default: what is logged in the last second before the end is not lost."""
    bare.say("failed", sentence="it refused")
    experiment = f"{bare.experiment} (own)"
    known = {"MLFLOW_TRACKING_URI": bare.server.uri, "MLFLOW_EXPERIMENT_NAME": experiment}
    ended = bare.run("log_without_start", environ=known)
    own = ended.values[0]["active"]
    assert own != bare.job and len(bare.server.history(own, "loss")) == 20
    assert [run.status for run in bare.server.runs(experiment)] == ["FINISHED"]


def test_nothing_happens_without_mlflow(bare: BareRanks) -> None:
    bare.say("pending")
    ended = bare.run("nothing", ranks=2)
    assert ended.values == [[], []] and ended.said == []


def test_autolog_lands_in_the_jobs_run(bare: BareRanks) -> None:
    ended = bare.run("sklearn_autolog")
    assert ended.values == [bare.job], ended.stderr
    run = bare.server.run(bare.job)
    assert run.params["max_iter"] == "200" and run.status == "RUNNING"
    assert len(bare.server.runs(bare.experiment)) == 1


def test_a_variable_of_the_callers_names_the_run(bare: BareRanks, mlflow_server: MlflowServer) -> None:
    """The supervisor knew it in time, or the caller has said which: no file is needed."""
    (bare.attempt / "tracking.json").unlink()
    ended = bare.run("log_without_start", environ=bare.environ())
    assert ended.values == [{"active": bare.job, "last": bare.job}], ended.stderr
    assert "loss" in mlflow_server.run(bare.job).metrics


def test_what_child_processes_of_a_rank_log_arrives_although_nobody_waits_for_it(bare: BareRanks) -> None:
    ended = bare.run("log_in_children")
    assert ended.codes == [0], ended.stderr
    assert set(bare.server.run(bare.job).metrics) == {"parent", "forked", "started"}


def test_what_ranks_log_is_on_its_way_without_them_unless_they_want_it_otherwise(bare: BareRanks) -> None:
    assert bare.run("is_asynchronous").values == [True]
    assert bare.run("is_asynchronous", environ={"MLFLOW_ENABLE_ASYNC_LOGGING": "false"}).values == [False]
