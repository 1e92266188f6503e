"""What a delivery writes into MLflow when nothing is wrong: one run, whole, in order, by all who have a part in it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.testing.mlflow import FakeMlflow
from tests.support.tracking.deliveries import (
    BUSY,
    CPU,
    RUN_ID,
    attempt,
    delivered,
    delivering,
    job,
    record,
    tracking,
    until,
)


def test_a_run_is_delivered_whole(tmp_path: Path) -> None:
    directory = attempt(tmp_path)
    record(directory, range(1, 26))
    what = job(tracking(uri="http://x", params={"lr": "0.1"}, tags={"mlflow.user": "ada"}))
    with FakeMlflow() as mlflow, delivering(directory, mlflow, what) as (delivery, heard):
        until(delivery, lambda: mlflow.runs and len(mlflow.runs[0].series(CPU)) == 3, "three points")
        delivery.ending(State.SUCCEEDED, Reason.COMPLETED, "every rank returned")
        until(delivery, lambda: mlflow.runs[0].end_time, "its end")
        before = delivery.over
        (directory / "receipt.json").write_text("{}")
        delivery.settled()
        delivered(delivery)
        run = mlflow.run_of(RUN_ID)
        uri = mlflow.uri
    assert (before, delivery.over) == ("", "delivered")
    assert (run.status, run.name) == ("FINISHED", f"jobTaskRun-{RUN_ID}")
    assert mlflow.store.experiments[run.experiment_id] == "/Users/ada/digits"
    assert run.start_time == 1_800_000_000_000
    assert run.params == {"sgpu.name": "train", "sgpu.gpus": "1", "sgpu.environment": "live", "lr": "0.1"}
    assert run.tags["team"] == "search"
    assert run.tags["mlflow.user"] == "ada"
    assert run.tags["sgpu.state"] == "SUCCEEDED"
    assert sorted(run.files) == ["sgpu/_air.py", "sgpu/environment.json", "sgpu/receipt.json", "sgpu/spec.json"]
    # The first sample at once, then the means of ten seconds each, then what was left at the end.
    assert run.series(CPU) == [(1, 1.0), (11, 6.5), (21, 16.5), (25, 23.5)]
    assert run.series(BUSY) == [(1, 50.0), (11, 50.0), (21, 50.0), (25, 50.0)]
    assert [tracked.url for tracked in heard.runs] == [f"{uri}/#/experiments/1/runs/{run.run_id}"]
    assert (heard.problems, heard.sentences) == ([], [])


def test_a_failed_run_has_its_failures_and_the_logs_of_the_ranks_that_failed(tmp_path: Path) -> None:
    directory = attempt(tmp_path)
    (directory / "failures" / "3.json").write_text(
        json.dumps({"type": "ValueError", "message": "no", "traceback": "Traceback …\nValueError: no"})
    )
    (directory / "failures" / "2.stack").write_text("File train.py, line 3 in train\n")
    (directory / "failures" / "1.stack").write_text("")
    for rank in range(5):
        (directory / "logs" / f"{rank}.stderr").write_text(f"rank {rank} was here\n")
    (directory / "logs" / "3.stdout").write_text("x" * 100 + "\n" + "y" * 70_000 + "\nlast line\n")
    (directory / "stopped.json").write_text(json.dumps({"cause": {"rank": 3, "reason": "rank_raised"}}))
    with FakeMlflow() as mlflow, delivering(directory, mlflow) as (delivery, _):
        delivery.ending(State.FAILED, Reason.RANK_RAISED, "rank 3 raised ValueError")
        delivery.settled()
        delivered(delivery)
        run = mlflow.run_of(RUN_ID)
    assert run.status == "FAILED"
    assert run.tags["sgpu.sentence"] == "rank 3 raised ValueError"
    assert {name for name in run.files if name.startswith(("sgpu/failures", "sgpu/logs"))} == {
        "sgpu/failures/2.txt",
        "sgpu/failures/3.txt",
        "sgpu/logs/2.stderr.txt",
        "sgpu/logs/3.stderr.txt",
        "sgpu/logs/3.stdout.txt",
    }
    assert run.files["sgpu/failures/3.txt"] == "Traceback …\nValueError: no".encode()
    assert run.files["sgpu/logs/3.stdout.txt"] == b"last line\n"


def test_all_nodes_and_attempts_of_a_run_write_to_one_mlflow_run(tmp_path: Path) -> None:
    first, other, second = attempt(tmp_path / "a"), attempt(tmp_path / "b"), attempt(tmp_path / "a", 2)
    record(first, range(1, 4))
    record(other, range(1, 4), node_rank=1)
    with FakeMlflow() as mlflow:
        with delivering(other, mlflow, job(node_rank=1, num_nodes=2)) as (late, heard):
            mlflow.wait(lambda fake: len(fake.requests) >= 2)
            assert (heard.runs, heard.problems) == ([], [])  # MLflow is there; the first node has not been yet
            with delivering(first, mlflow, job(num_nodes=2)) as (delivery, _):
                until(delivery, lambda: mlflow.runs, "the run")
                for one in (delivery, late):
                    one.ending(State.CANCELLED, Reason.PREEMPTED, "")
                    one.settled()
                    delivered(one)
        assert mlflow.run_of(RUN_ID).status == "KILLED"
        with delivering(second, mlflow, job(fence=2)) as (delivery, _):
            until(delivery, lambda: mlflow.run_of(RUN_ID).status == "RUNNING", "the second attempt")
            delivery.ending(State.SUCCEEDED, Reason.COMPLETED)
            delivery.settled()
            delivered(delivery)
        run = mlflow.run_of(RUN_ID)
    assert run.status == "FINISHED"
    assert run.series("system/node_1/cpu_utilization_percentage")
    assert run.series(CPU)
    assert "sgpu/attempt_2/spec.json" in run.files
    assert run.tags["sgpu.attempt"] == "2"


def test_a_run_that_its_driver_had_ended_already_is_ended_again_after_ranks_opened_it(tmp_path: Path) -> None:
    directory = attempt(tmp_path)
    with FakeMlflow() as mlflow:
        mlflow.store.do("POST", "runs/create", {"run_name": "mine", "tags": []})
        mine = mlflow.runs[0]
        mlflow.store.do("POST", "runs/update", {"run_id": mine.run_id, "status": "FINISHED", "end_time": 1})
        what = job(tracking(uri="http://x", run_id=mine.run_id))
        with delivering(directory, mlflow, what) as (delivery, heard):
            until(delivery, lambda: heard.runs, "the run is known")
            mlflow.store.do("POST", "runs/update", {"run_id": mine.run_id, "status": "RUNNING"})
            delivery.ending(State.SUCCEEDED, Reason.COMPLETED, "")
            (directory / "receipt.json").write_bytes(b"{}")
            delivery.settled()
            delivered(delivery)
        assert mine.status == "FINISHED"


def test_a_run_of_the_drivers_is_written_to_and_never_ended(tmp_path: Path) -> None:
    directory = attempt(tmp_path)
    with FakeMlflow() as mlflow:
        mlflow.store.do(
            "POST", "runs/create", {"run_name": "mine", "tags": [{"key": "mlflow.runName", "value": "mine"}]}
        )
        mine = mlflow.runs[0]
        mine.params["sgpu.gpus"] = "8"
        what = job(tracking(uri="http://x", run_id=mine.run_id, run_name="ignored", parent_id="ignored"))
        with delivering(directory, mlflow, what) as (delivery, heard):
            delivery.ending(State.FAILED, Reason.RANK_RAISED, "no")
            (directory / "receipt.json").write_bytes(b"{}")
            delivery.settled()
            delivered(delivery)
        assert mlflow.runs == [mine]
    assert [tracked.run_id for tracked in heard.runs] == [mine.run_id]
    assert (mine.status, mine.end_time, mine.name) == ("RUNNING", None, "mine")
    assert mine.tags["mlflow.runName"] == "mine"
    assert "mlflow.parentRunId" not in mine.tags
    assert "sgpu.state" not in mine.tags
    # A parameter that has another value already becomes a tag; the others are parameters.
    assert (mine.params["sgpu.gpus"], mine.params["sgpu.name"], mine.tags["sgpu.param.sgpu.gpus"]) == (
        "8",
        "train",
        "1",
    )
    assert f"sgpu/{RUN_ID}/spec.json" in mine.files


def test_a_process_that_ended_is_followed_by_another_which_does_nothing_twice(tmp_path: Path) -> None:
    directory = attempt(tmp_path)
    record(directory, range(1, 16))
    with FakeMlflow() as mlflow:
        with delivering(directory, mlflow) as (delivery, _):
            until(delivery, lambda: mlflow.runs and len(mlflow.runs[0].series(CPU)) == 2, "two points")
            until(delivery, lambda: '"sent_ns":1800000011' in (directory / "tracking-0.state").read_text(), "a note")
        uploads = [path for method, path in mlflow.requests if method == "PUT"]
        record(directory, range(16, 31), first=False)
        with delivering(directory, mlflow) as (delivery, heard):
            until(delivery, lambda: heard.runs, "the link")
            delivery.ending(State.SUCCEEDED, Reason.COMPLETED)
            delivery.settled()
            delivered(delivery)
        run = mlflow.run_of(RUN_ID)
        assert [path for method, path in mlflow.requests if method == "PUT"] == uploads
        before = list(mlflow.requests)
        with delivering(directory, mlflow) as (delivery, _):
            pass
        assert mlflow.requests == before
    assert run.series(CPU) == [(1, 1.0), (11, 6.5), (21, 16.5), (30, 26.0)]
    state = msgspec.json.decode((directory / "tracking-0.state").read_bytes())
    assert state["over"] == "delivered"


def test_a_directory_that_was_deleted_ends_its_delivery(tmp_path: Path) -> None:
    directory = attempt(tmp_path)
    with FakeMlflow() as mlflow, delivering(directory, mlflow) as (delivery, _):
        until(delivery, lambda: mlflow.runs, "the run")
        mlflow.behave("refuses")
        directory.rename(tmp_path / "gone")
        delivery.ending(State.SUCCEEDED, Reason.COMPLETED)
        until(delivery, lambda: delivery.over.startswith("given up"), "its end")
