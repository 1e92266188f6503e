"""Attempts of one run whose deliveries are late, or at once: one MLflow run, and its last attempt says how it went."""

from __future__ import annotations

from pathlib import Path

import msgspec

from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.receipt import Receipt, Segments
from serverless_gpu.testing import FakeClock
from serverless_gpu.testing.mlflow import FakeMlflow
from serverless_gpu.tracking.delivery import MlflowDelivery
from serverless_gpu.tracking.mlflow import MlflowTracker
from tests.support.tracking.deliveries import (
    CALLED_NS,
    CPU,
    RUN_ID,
    Heard,
    attempt,
    delivered,
    delivering,
    job,
    record,
    tracking,
    until,
)

RECEIPT = Receipt(
    run_id=RUN_ID,
    fence=1,
    state="SUCCEEDED",
    reason=None,
    gpu_type="CPU",
    gpus=("CPU-0",),
    kind=DeviceKind.CPU,
    segments=Segments(),
    gpu_ms=40,
    micros=None,
    currency="USD",
    peak_memory_bytes=None,
    warm=False,
    warm_reason="",
    gate="",
    quarantined=(),
    tags={},
    facts=0,
    world_size=1,
)


def test_an_attempt_that_mlflow_missed_finds_the_run_that_a_later_one_made(tmp_path: Path) -> None:
    first, second = attempt(tmp_path), attempt(tmp_path, 2)
    with FakeMlflow() as mlflow:
        mlflow.behave("refuses")
        with delivering(first, mlflow) as (early, heard):
            until(early, lambda: heard.problems, "that it is away")
            early.ending(State.FAILED, Reason.RANK_RAISED, "no")
            early.settled()
            mlflow.behave("answers")
            with delivering(second, mlflow, job(fence=2)) as (delivery, _):
                delivery.ending(State.SUCCEEDED, Reason.COMPLETED)
                delivery.settled()
                delivered(delivery)
            delivered(early)
        run = mlflow.run_of(RUN_ID)
    assert (run.status, run.tags["sgpu.attempt"], run.tags["sgpu.state"]) == ("FINISHED", "2", "SUCCEEDED")


def test_an_attempt_that_begins_in_the_same_process_does_not_make_what_one_before_may_still_get(tmp_path: Path) -> None:
    first, second = attempt(tmp_path), attempt(tmp_path, 2)
    clock = FakeClock(wall_ns=CALLED_NS)
    with FakeMlflow() as mlflow:
        mlflow.behave("fails", only="runs/create")
        with delivering(first, mlflow, clock=clock) as (early, heard):
            until(early, lambda: heard.problems, "the failure")
            mlflow.behave("answers")
            with delivering(second, mlflow, job(fence=2), clock=clock) as (late, _):
                looks = len(mlflow.requests)
                until(late, lambda: len(mlflow.requests) > looks + 3, "some looks")
                assert mlflow.runs == []
                clock.advance(11)
                until(late, lambda: mlflow.runs, "the run")
                for one in (late, early):
                    one.ending(State.SUCCEEDED, Reason.COMPLETED)
                    one.settled()
                    delivered(one)
        assert mlflow.run_of(RUN_ID).tags["sgpu.attempt"] == "2"


def test_a_clock_that_was_set_back_does_not_keep_a_run_from_being_made(tmp_path: Path) -> None:
    directory = attempt(tmp_path)
    clock = FakeClock(wall_ns=CALLED_NS)
    with FakeMlflow() as mlflow:
        mlflow.behave("fails", only="runs/create")
        with delivering(directory, mlflow, clock=clock) as (delivery, heard):
            until(delivery, lambda: heard.problems, "the failure")
            clock.step_wall(-7200)
            mlflow.behave("answers")
            until(delivery, lambda: heard.runs, "the run")
        assert [tracked.run_id for tracked in heard.runs] == [mlflow.run_of(RUN_ID).run_id]


def test_a_process_that_remembers_nothing_looks_before_it_makes_a_run(tmp_path: Path) -> None:
    directory = attempt(tmp_path)
    clock = FakeClock(wall_ns=CALLED_NS)
    with FakeMlflow() as mlflow:
        with delivering(directory, mlflow, clock=clock) as (delivery, heard):
            until(delivery, lambda: heard.runs, "the run")
        (directory / "tracking-0.state").unlink()  # a disk that was full
        clock.advance(60)
        with delivering(directory, mlflow, clock=clock) as (delivery, heard):
            until(delivery, lambda: heard.runs, "the run")
        assert mlflow.run_of(RUN_ID).run_id == heard.runs[0].run_id


def test_an_attempt_that_is_delivered_late_does_not_say_how_the_run_goes(tmp_path: Path) -> None:
    first, second = attempt(tmp_path), attempt(tmp_path, 2)
    record(first, range(1, 12))
    (first / "receipt.json").write_bytes(msgspec.json.encode(RECEIPT))
    (second / "receipt.json").write_bytes(msgspec.json.encode(RECEIPT))
    with FakeMlflow() as mlflow:
        with delivering(first, mlflow) as (early, _):
            until(early, lambda: mlflow.runs and len(mlflow.runs[0].series(CPU)) == 2, "two points")
        with delivering(second, mlflow, job(fence=2)) as (late, _):
            until(late, lambda: mlflow.runs[0].tags["sgpu.attempt"] == "2", "the second attempt")
            with delivering(first, mlflow) as (early, _):  # another process, of a monitor that was killed
                early.ending(State.FAILED, Reason.RANK_RAISED, "no")
                early.settled()
                delivered(early)
            run = mlflow.run_of(RUN_ID)
            assert (run.status, run.end_time, run.tags["sgpu.attempt"]) == ("RUNNING", None, "2")
            assert (run.tags["sgpu.state"], run.tags["sgpu.sentence"], run.tags["mlflow.note.content"]) == (
                "RUNNING",
                "",
                "",
            )
            assert "sgpu/receipt.json" in run.files
            late.ending(State.SUCCEEDED, Reason.COMPLETED)
            late.settled()
            delivered(late)
        assert (run.status, run.tags["sgpu.state"]) == ("FINISHED", "SUCCEEDED")
        assert "mlflow.note.content" in run.tags


def test_a_second_run_in_the_callers_own_mlflow_run_says_how_it_goes(tmp_path: Path) -> None:
    directory = attempt(tmp_path)
    with FakeMlflow() as mlflow:
        mlflow.store.do("POST", "runs/create", {"run_name": "mine", "tags": []})
        mine = mlflow.runs[0]
        mine.tags.update({"sgpu.run_id": "another", "sgpu.attempt": "3"})
        with delivering(directory, mlflow, job(tracking(uri="http://x", run_id=mine.run_id))) as (delivery, _):
            delivery.ending(State.SUCCEEDED, Reason.COMPLETED)
            delivery.settled()
            delivered(delivery)
        assert (mine.tags["sgpu.run_id"], mine.tags["sgpu.attempt"]) == (RUN_ID, "1")


def test_an_attempt_that_goes_on_leaves_nothing_of_how_the_one_before_ended(tmp_path: Path) -> None:
    first, second = attempt(tmp_path), attempt(tmp_path, 2)
    (first / "receipt.json").write_bytes(msgspec.json.encode(RECEIPT))
    with FakeMlflow() as mlflow:
        with delivering(first, mlflow) as (early, _):
            early.ending(State.FAILED, Reason.RANK_RAISED, "a rank raised an exception: E: no")
            early.settled()
            delivered(early)
        run = mlflow.run_of(RUN_ID)
        assert run.tags["sgpu.sentence"] and run.tags["mlflow.note.content"]
        with delivering(second, mlflow, job(fence=2)) as (late, _):
            until(late, lambda: run.status == "RUNNING", "the second attempt")
            assert (run.tags["sgpu.state"], run.tags["mlflow.note.content"]) == ("RUNNING", "")
            late.ending(State.SUCCEEDED, Reason.COMPLETED, "")
            late.settled()
            delivered(late)
    assert (run.tags["sgpu.state"], run.tags["sgpu.sentence"]) == ("SUCCEEDED", "")


def test_an_attempt_that_is_over_at_once_leaves_nothing_of_how_the_one_before_ended(tmp_path: Path) -> None:
    first, second = attempt(tmp_path), attempt(tmp_path, 2)
    with FakeMlflow() as mlflow:
        with delivering(first, mlflow) as (early, _):
            early.ending(State.FAILED, Reason.RANK_RAISED, "a rank raised an exception: E: no")
            early.settled()
            delivered(early)
        late = MlflowDelivery(second, job(fence=2), MlflowTracker(mlflow.uri, {}), Heard())
        late.ending(State.SUCCEEDED, Reason.COMPLETED, "")
        late.settled()
        late.run()
        tags = mlflow.run_of(RUN_ID).tags
    assert (tags["sgpu.state"], tags["sgpu.sentence"], late.over) == ("SUCCEEDED", "", "delivered")


def test_of_a_gang_the_node_that_failed_says_how_it_ended_and_all_of_them_what_it_used(tmp_path: Path) -> None:
    first, other = attempt(tmp_path / "a"), attempt(tmp_path / "b")
    for directory in (first, other):
        (directory / "receipt.json").write_bytes(msgspec.json.encode(RECEIPT))
    with (
        FakeMlflow() as mlflow,
        delivering(first, mlflow, job(num_nodes=2)) as (one, _),
        delivering(other, mlflow, job(node_rank=1, num_nodes=2)) as (two, heard),
    ):
        until(two, lambda: heard.runs, "the second node knows the run")
        two.ending(State.FAILED, Reason.RANK_RAISED, "rank 3 raised ValueError")
        until(two, lambda: mlflow.run_of(RUN_ID).status == "FAILED", "the node that failed has ended it")
        one.ending(State.FAILED, Reason.PEER_FAILED, "the run failed on another of its nodes")
        one.settled()
        delivered(one)
        run = mlflow.run_of(RUN_ID)
        assert "sgpu.gpu_seconds" not in run.tags, "one node's is not the gang's"
        two.settled()
        delivered(two)
        run = mlflow.run_of(RUN_ID)
    assert (run.tags["sgpu.reason"], run.tags["sgpu.sentence"]) == ("rank_raised", "rank 3 raised ValueError")
    assert run.tags["sgpu.node_0.gpu_seconds"] == run.tags["sgpu.node_1.gpu_seconds"] == f"{RECEIPT.gpu_ms / 1e3:.3f}"
    assert run.tags["sgpu.gpu_seconds"] == f"{2 * RECEIPT.gpu_ms / 1e3:.3f}"
    assert {"sgpu/receipt.json", "sgpu/node_1/receipt.json"} <= run.files.keys()


def test_a_gang_whose_failed_node_says_nothing_ends_by_the_word_of_another(tmp_path: Path) -> None:
    first, other = attempt(tmp_path / "a"), attempt(tmp_path / "b")
    with FakeMlflow() as mlflow:
        with delivering(first, mlflow, job(num_nodes=2)) as (one, _):
            until(one, lambda: mlflow.runs, "the run")
        with delivering(other, mlflow, job(node_rank=1, num_nodes=2)) as (two, _):  # the first node is gone
            two.ending(State.FAILED, Reason.PEER_FAILED, "the run failed on another of its nodes")
            two.settled()
            delivered(two)
        assert mlflow.run_of(RUN_ID).status == "FAILED"
