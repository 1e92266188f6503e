"""Requests for runs that nobody answered, and those that were refused: what is left of them at the caller."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import serverless_gpu
from serverless_gpu.errors import IdempotencyConflict, ServerUnavailable
from tests.support.golden import golden
from tests.support.remote.fake_server import FakeServer
from tests.support.remote.stream import play, train


@pytest.mark.parametrize("watched", [True, False])
def test_a_run_that_may_have_been_started_is_named_and_found_again(
    fake: FakeServer, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_PATIENCE", "0.5")
    play(fake.script(), tmp_path, 7)
    fake.lose = 10_000
    with pytest.raises(ServerUnavailable, match=re.escape(golden("remote.unanswered.started-known"))) as raised:
        train.distributed(0.1) if watched else train.submit(0.1)
    (run_id,) = fake.runs
    assert run_id in raised.value.message and f"sgpu show {run_id}" in (raised.value.hint or "")
    assert (home / "remote" / run_id / "1" / "spec.json").exists()
    assert serverless_gpu.attach(run_id).results() == [7]


def test_what_the_server_refuses_leaves_nothing_behind(fake: FakeServer, home: Path) -> None:
    fake.refuse = IdempotencyConflict("run 1 is another one")
    with pytest.raises(IdempotencyConflict):
        train.submit(0.1)
    assert [path.name for path in (home / "remote").iterdir() if path.name[0] != "."] == []


def test_a_request_has_the_text_of_its_arguments_without_secrets(fake: FakeServer, tmp_path: Path) -> None:
    play(fake.script(), tmp_path, 7)
    train.submit(0.1)
    (run,) = fake.runs.values()
    assert run.request is not None and run.request.arguments == {"lr": "0.1"}
