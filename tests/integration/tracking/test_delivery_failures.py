"""F44 for our own metrics: MLflow refuses, hangs, fails, comes back; nothing is lost, doubled or reordered.

That training neither fails nor slows is the monitor's to show: a delivery is a thread of its process.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.testing import FakeClock
from serverless_gpu.testing.mlflow import Behaviour, FakeMlflow
from serverless_gpu.tracking.base import TrackerAway
from serverless_gpu.tracking.mlflow import MlflowTracker
from tests.support.golden import golden
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

WHOLE = [(1, 1.0), (11, 6.5), (21, 16.5), (31, 26.5), (41, 36.5), (45, 43.5)]
AWAY = ("refuses", "fails", pytest.param("hangs", marks=pytest.mark.slow), "loses")


@pytest.mark.parametrize("behaviour", AWAY)
def test_F44_what_was_missed_arrives_in_order_once_mlflow_is_back(tmp_path: Path, behaviour: Behaviour) -> None:
    directory = attempt(tmp_path)
    record(directory, range(1, 12))
    with FakeMlflow() as mlflow, delivering(directory, mlflow) as (delivery, heard):
        until(delivery, lambda: mlflow.runs and len(mlflow.runs[0].series(CPU)) == 2, "two points")
        mlflow.behave(behaviour)
        record(directory, range(12, 46), first=False)
        until(delivery, lambda: heard.sentences, "that it is away")
        delivery.ending(State.SUCCEEDED, Reason.COMPLETED)
        delivery.settled()
        tries = delivery.failures
        until(delivery, lambda: delivery.failures > tries, "another try")
        mlflow.behave("answers")
        delivered(delivery)
        run = mlflow.run_of(RUN_ID)
    assert run.series(CPU) == WHOLE
    assert run.status == "FINISHED"
    assert len(heard.sentences) == 1
    sentence, note = heard.sentences[0]
    assert sentence.startswith(f"MLflow at {mlflow.uri} ")
    assert sentence.endswith("; the node keeps system metrics on its disk until MLflow is available again")
    assert not note


@pytest.mark.parametrize("behaviour", AWAY)
def test_F44_an_mlflow_that_is_away_from_the_beginning_has_one_run_in_the_end(
    tmp_path: Path, behaviour: Behaviour
) -> None:
    directory = attempt(tmp_path)
    record(directory, range(1, 46))
    clock = FakeClock(wall_ns=CALLED_NS)
    with FakeMlflow() as mlflow:
        mlflow.behave(behaviour)
        with delivering(directory, mlflow, clock=clock) as (delivery, heard):
            until(delivery, lambda: heard.problems, "that it is away")
            delivery.ending(State.SUCCEEDED, Reason.COMPLETED)
            delivery.settled()
            mlflow.behave("answers")
            clock.advance(11)
            delivered(delivery)
        run = mlflow.run_of(RUN_ID)
    assert run.series(CPU) == WHOLE
    assert [final for _, final in heard.problems] == [False]
    assert len(heard.runs) == 1


def test_F44_a_run_whose_creation_was_not_answered_is_found_not_made_again(tmp_path: Path) -> None:
    directory = attempt(tmp_path)
    clock = FakeClock(wall_ns=CALLED_NS)
    with FakeMlflow() as mlflow:
        mlflow.behave("fails", only="runs/create")
        with delivering(directory, mlflow, clock=clock) as (delivery, heard):
            until(delivery, lambda: heard.problems, "the failure")
            mlflow.behave("loses", only="runs/create")
            looks = len(mlflow.requests)
            # For ten seconds it is only looked for: a server that was stopped may still be about to make it.
            until(delivery, lambda: len(mlflow.requests) > looks + 3, "some looks")
            assert {path.rpartition("/")[2] for _, path in mlflow.requests[looks:]} == {"search"}
            clock.advance(11)
            until(delivery, lambda: heard.runs, "the run")
        assert len(mlflow.runs) == 1
    assert [tracked.run_id for tracked in heard.runs] == [mlflow.run_of(RUN_ID).run_id]


def dropped(heard: Heard) -> list[tuple[str, bool]]:
    """Return what was said of points that were dropped."""
    return [(sentence, note) for sentence, note in heard.sentences if "dropped" in sentence]


def test_F44_beyond_the_backlog_the_oldest_points_are_dropped_counted_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serverless_gpu.tracking.delivery.BACKLOG_BYTES_MAX", 20_000)
    directory = attempt(tmp_path)
    with FakeMlflow() as mlflow, delivering(directory, mlflow) as (delivery, heard):
        until(delivery, lambda: mlflow.runs and "sgpu/spec.json" in mlflow.runs[0].files, "the run")
        mlflow.behave("refuses")
        record(directory, range(1, 1001))
        until(delivery, lambda: delivery.failures or dropped(heard), "that it is away")
        failures = delivery.failures  # the first may have come when only some of the samples were there
        until(delivery, lambda: delivery.failures > failures or dropped(heard), "that it was tried with all of them")
        mlflow.behave("answers")
        until(delivery, lambda: dropped(heard), "that points were dropped")
        record(directory, range(1001, 1012), first=False)
        delivery.ending(State.SUCCEEDED, Reason.COMPLETED)
        delivery.settled()
        delivered(delivery)
        run = mlflow.run_of(RUN_ID)
    steps = [step for step, _ in run.series(CPU)]
    assert steps == sorted(steps)
    assert (steps[0] > 500, steps[-1]) == (True, 1011)
    series = {point.key for point in run.points}
    missing = (101 + 1 + 1) * len(series) - len(run.points)  # a point each at 1, 11, … 1001, 1011 would have been all
    ((sentence, note),) = dropped(heard)
    assert note
    said = int(sentence.split()[0].replace(",", ""))
    assert sentence == golden("tracking.delivery_failures.points-system-metrics", said=said)
    assert 0 < said <= missing
    assert missing - said <= len(series)


@pytest.mark.slow
def test_F44_a_slow_mlflow_gets_everything(tmp_path: Path) -> None:
    directory = attempt(tmp_path)
    record(directory, range(1, 46))
    with FakeMlflow(slow_s=0.1) as mlflow:
        mlflow.behave("slow")
        with delivering(directory, mlflow) as (delivery, heard):
            delivery.ending(State.SUCCEEDED, Reason.COMPLETED)
            delivery.settled()
            delivered(delivery)
        assert mlflow.run_of(RUN_ID).series(CPU) == WHOLE
    assert (heard.problems, heard.sentences) == ([], [])


def test_F44_a_tracker_that_was_never_there_is_given_up_a_day_after_the_end(tmp_path: Path) -> None:
    directory = attempt(tmp_path)
    clock = FakeClock(wall_ns=CALLED_NS)
    with FakeMlflow() as mlflow:
        mlflow.behave("refuses")
        with delivering(directory, mlflow, clock=clock) as (delivery, heard):
            clock.advance(3 * 86_400)  # a run may take as long as it likes
            until(delivery, lambda: heard.problems, "that it is away")
            delivery.ending(State.SUCCEEDED, Reason.COMPLETED)
            clock.advance(86_000)
            before = delivery.failures
            until(delivery, lambda: delivery.failures > before + 1, "another try")
            assert delivery.over == ""
            clock.advance(500)
            until(delivery, lambda: delivery.over, "its end")
    assert delivery.over.startswith(f"given up: MLflow at {mlflow.uri} does not answer (")


def test_F44_a_server_that_is_no_mlflow_is_refused_at_once(tmp_path: Path) -> None:
    directory = attempt(tmp_path)
    with FakeMlflow() as mlflow:
        mlflow.behave("foreign")
        with delivering(directory, mlflow) as (delivery, heard):
            until(delivery, lambda: delivery.over, "its end")
    assert [final for _, final in heard.problems] == [True]
    assert delivery.over == f"refused: {heard.problems[0][0]}"


@pytest.mark.parametrize("behaviour", ["forbids", "foreign"])
def test_F44_a_server_that_is_not_itself_for_a_while_loses_nothing(tmp_path: Path, behaviour: Behaviour) -> None:
    directory = attempt(tmp_path)
    record(directory, range(1, 12))
    with FakeMlflow() as mlflow, delivering(directory, mlflow) as (delivery, heard):
        until(delivery, lambda: mlflow.runs and len(mlflow.runs[0].series(CPU)) == 2, "two points")
        mlflow.behave(behaviour)
        record(directory, range(12, 46), first=False)
        until(delivery, lambda: heard.sentences, "that it is away")
        mlflow.behave("answers")
        delivery.ending(State.SUCCEEDED, Reason.COMPLETED)
        delivery.settled()
        delivered(delivery)
        assert mlflow.run_of(RUN_ID).series(CPU) == WHOLE


def test_F44_files_that_mlflow_does_not_take_become_tags(tmp_path: Path) -> None:
    directory = attempt(tmp_path)
    record(directory, range(1, 12))
    with FakeMlflow() as mlflow:
        mlflow.behave("fails", only="mlflow-artifacts")
        with delivering(directory, mlflow) as (delivery, _):
            until(delivery, lambda: mlflow.runs and len(mlflow.runs[0].series(CPU)) == 2, "two points")
            run = mlflow.run_of(RUN_ID)
    assert run.files == {}
    assert run.tags["sgpu.file.spec.json"] == '{"run_id": "01"}'
    assert run.tags["sgpu.file._air.py"] == "print('again')\n"


def test_F44_a_run_that_was_deleted_in_mlflow_costs_nothing_but_a_sentence(tmp_path: Path) -> None:
    directory = attempt(tmp_path)
    record(directory, range(1, 12))
    with FakeMlflow() as mlflow, delivering(directory, mlflow) as (delivery, heard):
        until(delivery, lambda: mlflow.runs and len(mlflow.runs[0].series(CPU)) == 2, "two points")
        mlflow.runs[0].lifecycle_stage = "deleted"
        record(directory, range(12, 46), first=False)
        delivery.ending(State.FAILED, Reason.RANK_RAISED, "no")
        delivery.settled()
        delivered(delivery)
        assert mlflow.runs[0].series(CPU) == WHOLE[:2]
    assert delivery.over == "delivered"
    assert len(heard.sentences) == 1
    assert golden("tracking.delivery_failures.points-system-metrics-dropped") in heard.sentences[0][0]


def test_F44_a_server_that_is_still_being_started_is_waited_for(tmp_path: Path) -> None:
    directory = attempt(tmp_path)
    there: list[str] = []

    def address() -> str:
        if not there:
            raise TrackerAway("MLflow is being started")
        return there[0]

    with FakeMlflow() as mlflow, delivering(directory, MlflowTracker(address, {})) as (delivery, heard):
        until(delivery, lambda: heard.problems, "that it is not there")
        there.append(mlflow.uri)
        until(delivery, lambda: heard.runs, "the run")
    assert heard.problems == [(golden("tracking.delivery_failures.mlflow-being-started"), False)]


def test_a_delivery_needs_a_tracker_in_its_spec(tmp_path: Path) -> None:
    what = job(tracking(uri="http://x"))
    untracked = type(what)(run_id="r", fence=1, spec=type(what.spec)(), called_ns=0)
    with (
        pytest.raises(ValueError, match=re.escape(golden("tracking.delivery_failures.run-tracked"))),
        delivering(tmp_path, FakeMlflow(), untracked),
    ):
        pass
