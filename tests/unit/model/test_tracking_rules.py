"""What is written into an MLflow run, and that MLflow takes it: names, lengths, states, pauses, numbers of points."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.lifecycle.attempt import TERMINAL, Reason, State
from serverless_gpu.model.receipt import Receipt, Segments
from serverless_gpu.model.spec import Command, Resources, RunSpec, Tracking
from serverless_gpu.model.tracking_rules import (
    POINTS_MAX,
    cut,
    first_tags,
    folder,
    last_tags,
    params_of,
    pause_s,
    receipt_tags,
    send_interval_s,
    spec_params,
    status_of,
    valid_key,
    variables,
)
from serverless_gpu.testing.mlflow import Refusal, check
from tests.support.golden import golden

RECEIPT = Receipt(
    run_id="01",
    fence=1,
    state="SUCCEEDED",
    reason=None,
    gpu_type="H100",
    gpus=("GPU-1", "GPU-2"),
    kind=DeviceKind.GPU,
    segments=Segments(run_ms=1000),
    gpu_ms=2500,
    micros=1_250_000,
    currency="USD",
    peak_memory_bytes=None,
    warm=True,
    warm_reason="",
    gate="2 of 2 free",
    quarantined=(),
    tags={},
    facts=3,
    world_size=2,
    environment="live",
)


@pytest.mark.parametrize(
    ("key", "valid"),
    [
        ("lr", "lr"),
        ("model/size", "model/size"),
        ("optimizer.β 1:x-y", "optimizer.β 1:x-y"),
        ("a=b", "a_b"),
        ("/a//b/../c/.", "a/b/c"),
        ("..", "_"),
        ("", "_"),
        ("new\nline", "new_line"),
        ("k" * 300, "k" * 250),
    ],
)
def test_names_are_made_such_that_mlflow_takes_them(key: str, valid: str) -> None:
    assert valid_key(key) == valid


@settings(max_examples=50)
@given(st.text())
def test_every_name_becomes_one_that_mlflow_takes(key: str) -> None:
    try:
        check(valid_key(key), "", 1)
    except Refusal as refusal:
        raise AssertionError(f"{key!r} became {valid_key(key)!r}: {refusal}") from None


def test_long_text_is_cut_where_it_matters_less_and_says_so() -> None:
    assert cut("short", 10) == "short"
    assert cut("a" * 30, 12) == "aaaa… (cut)"[:4] + "a… (cut)"
    assert cut("first" + "x" * 30 + "last", 12, keep_end=True) == "… (cut)xlast"
    assert len(cut("y" * 7000, 6000)) == 6000


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (State.SUCCEEDED, "FINISHED"),
        (State.FAILED, "FAILED"),
        (State.LOST, "FAILED"),
        (State.CANCELLED, "KILLED"),
        (State.TIMED_OUT, "KILLED"),
        (State.BUDGET_STOPPED, "KILLED"),
        (State.STOPPING, "RUNNING"),
    ],
)
def test_states_have_a_name_in_mlflow(state: State, status: str) -> None:
    assert status_of(state) == status


def test_every_end_is_one_in_mlflow() -> None:
    assert all(status_of(state) != "RUNNING" for state in TERMINAL)


def test_parameters_are_the_clients_and_the_specs() -> None:
    spec = RunSpec(name="train", resources=Resources(gpus=8, gpu_type="H100"), timeout_s=60.0, retries=2)
    tracking = Tracking(params={"lr": "0.1", "sgpu.gpus": "all of them", "bad=name": "x" * 7000})
    params = params_of(tracking, spec_params(spec))
    assert params.pop("bad_name") == cut("x" * 7000, 6000)
    assert params == {
        "sgpu.name": "train",
        "sgpu.gpus": "all of them",
        "sgpu.gpu_type": "H100",
        "sgpu.environment": "live",
        "sgpu.timeout_s": "60.0",
        "sgpu.retries": "2",
        "lr": "0.1",
    }
    assert spec_params(RunSpec()) == {"sgpu.environment": "live"}
    program = RunSpec(payload=Command(argv=("python", "t 2.py", "--token", "abc")))
    assert spec_params(program) == {
        "sgpu.command": golden("model.tracking_rules.python-py-token"),
        "sgpu.environment": "live",
    }


def test_tags_of_users_do_not_pass_for_mlflows_or_ours() -> None:
    tracking = Tracking(run_name="job", parent_id="p", tags={"mlflow.user": "ada"})
    tags = first_tags(tracking, "01", 2, {"team": "search", "mlflow.user": "eve", "sgpu.run_id": "other"})
    assert tags == {
        "team": "search",
        "sgpu.tag.mlflow.user": "eve",
        "sgpu.tag.sgpu.run_id": "other",
        "mlflow.user": "ada",
        "sgpu.run_id": "01",
        "sgpu.attempt": "2",
        "mlflow.runName": "job",
        "mlflow.parentRunId": "p",
    }


def test_a_run_of_the_drivers_keeps_its_name_parent_state_and_description() -> None:
    tracking = Tracking(run_id="theirs", run_name="job", parent_id="p", tags={"mlflow.source.name": "x.py"})
    assert first_tags(tracking, "01", 1, {}) == {"sgpu.run_id": "01", "sgpu.attempt": "1"}
    assert last_tags(tracking, State.FAILED, Reason.RANK_RAISED, "no") == {}
    assert "mlflow.note.content" not in receipt_tags(tracking, RECEIPT)
    assert folder(tracking, "01", 2, 3) == "sgpu/01/attempt_2/node_3/"


def test_the_end_and_the_receipt_become_tags() -> None:
    assert last_tags(Tracking(), State.FAILED, Reason.RANK_RAISED, "") == {
        "sgpu.state": "FAILED",
        "sgpu.reason": "rank_raised",
    }
    tags = receipt_tags(Tracking(), RECEIPT)
    note = tags.pop("mlflow.note.content")
    assert note.replace("    ", "") == RECEIPT.text()
    assert tags == {
        "sgpu.gpu_seconds": "2.500",
        "sgpu.devices": "2 H100",
        "sgpu.environment": "live",
        "sgpu.gate": "2 of 2 free",
        "sgpu.warm": "true",
        "sgpu.cost": "1.250000 USD",
    }
    assert folder(Tracking(), "01", 1, 0) == "sgpu/"


def test_variables_leave_out_what_is_not_known() -> None:
    assert variables("r", "1", "") == {"MLFLOW_RUN_ID": "r", "MLFLOW_EXPERIMENT_ID": "1"}
    assert variables("r", "1", "http://x")["MLFLOW_TRACKING_URI"] == "http://x"


def test_pauses_grow_and_are_bounded() -> None:
    pauses = [pause_s(failures) for failures in range(1, 1000)]
    assert pauses[:6] == [1, 2, 4, 8, 16, 30]
    assert pauses == sorted(pauses)
    assert (pause_s(0), pauses[-1]) == (1, 300)


@pytest.mark.parametrize(("series", "nodes"), [(1, 1), (30, 1), (192, 1), (192, 8), (192, 64), (1200, 16)])
def test_ten_days_are_fewer_points_than_are_ours_to_write(series: int, nodes: int) -> None:
    elapsed_s, sent = 0, 0
    while elapsed_s < 864_000:
        elapsed_s += send_interval_s(elapsed_s, series, nodes)
        sent += series * nodes
    assert sent <= POINTS_MAX


def test_points_come_every_ten_seconds_for_an_hour_at_least_of_one_machine() -> None:
    assert send_interval_s(0, 192, 1) == 10
    assert send_interval_s(3600, 192, 1) == 10
    assert send_interval_s(10 * 3600, 192, 1) == 40
    assert send_interval_s(-5, 1, 1) == 10
