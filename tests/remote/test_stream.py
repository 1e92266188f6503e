"""A call through a scripted server: what its caller gets, whatever happens to the line."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from serverless_gpu import distributed
from serverless_gpu.model.attempt import State
from serverless_gpu.node.inside import payload
from tests.remote.fake_server import FakeServer, Script


@distributed(gpus=1, gpu_type="H100", remote=True)
def train(lr: float) -> float:
    """Return what it is given."""
    return lr


def pickled(directory: Path, value: object) -> bytes:
    """Return a result as a rank writes it."""
    path = directory / "value.pkl"
    payload.dump(value, str(path))
    data = path.read_bytes()
    path.unlink()
    return data


def later(work: Callable[[], None]) -> threading.Thread:
    """Do something beside the test."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def play(script: Script, tmp_path: Path, value: object = 1) -> None:
    """Be placed, run and return."""
    script.say(State.STARTING)
    script.say(State.RUNNING)
    script.write(0, b"step 1\n")
    script.end({"results/0.pkl": pickled(tmp_path, value)})


def test_a_call_is_one_request_and_feels_like_a_local_one(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(fake.script(), tmp_path, 0.1)
    assert train.distributed(lr=0.1) == [0.1]
    out, err = capsys.readouterr()
    assert out == "[rank 0] step 1\n"
    assert "serverless-gpu: " in err and "1 GPU verified free" in err
    fake.seen.clear()
    play(fake.script(), tmp_path, 0.2)
    assert train.distributed(lr=0.2) == [0.2]
    assert fake.seen == {"POST runs": 1}, "the second call knows the server already"
