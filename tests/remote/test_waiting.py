"""What a caller who waits is told, and what not."""

from __future__ import annotations

from pathlib import Path

import pytest

import serverless_gpu
from serverless_gpu import distributed
from serverless_gpu.errors import NotAuthenticated
from serverless_gpu.model.attempt import State
from serverless_gpu.wire.attempts import NOT_SENT
from tests.remote.fake_server import FakeServer
from tests.remote.test_stream import pickled


@distributed(gpus=1, gpu_type="H100", remote=True)
def train(lr: float) -> object:
    """Return what it is given."""
    return lr


def test_F43_results_that_do_not_get_on_are_said_to_who_waits_and_progress_is_not(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = fake.script()
    script.say(State.RUNNING)
    script.say(State.STOPPING, "sending results to the server: 16.8 MB of 200 MB")
    script.say(State.STOPPING, f"{NOT_SENT}the server has no room to store this")
    script.end({"results/0.pkl": pickled(tmp_path, 1)})
    run = train.submit(0.1)
    assert run.follow() is None and run.results() == [1]
    err = capsys.readouterr().err
    assert f"serverless-gpu: {NOT_SENT}the server has no room to store this" in err and "16.8 MB of" not in err


def test_a_token_that_is_revoked_meanwhile_leaves_a_run_that_is_named(
    fake: FakeServer,
) -> None:
    script = fake.script()
    script.say(State.RUNNING)
    run = train.submit(0.1)
    assert run.status() == "RUNNING"
    fake.refuse_tokens = True
    fake.break_streams()
    with pytest.raises(NotAuthenticated) as caught:
        run.results()
    assert f"run {run.id} goes on" in caught.value.hint and f"sgpu cancel {run.id}" in caught.value.hint


def test_a_run_that_has_ended_is_never_said_to_wait(fake: FakeServer, tmp_path: Path) -> None:
    script = fake.script()
    run_id = train.submit(0.1).id
    script.say(State.RUNNING)
    script.end({"results/0.pkl": pickled(tmp_path, 1)})
    fake.pause_s = 0.05
    assert serverless_gpu.attach(run_id).status() == "SUCCEEDED"
