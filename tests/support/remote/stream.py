"""Helpers of the tests of stream that other tests use as well."""

from __future__ import annotations

from pathlib import Path

from serverless_gpu import distributed
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.node.inside import payload
from tests.support.remote.fake_server import Script


@distributed(gpus=1, gpu_type="H100", remote=True)
def train(lr: float) -> object:
    """Return what it is given."""
    return lr


def pickled(directory: Path, value: object) -> bytes:
    """Return a result as a rank writes it."""
    path = directory / "value.pkl"
    payload.dump(value, str(path))
    data = path.read_bytes()
    path.unlink()
    return data


def play(script: Script, tmp_path: Path, value: object = 1) -> None:
    """Be placed, run and return."""
    script.say(State.STARTING)
    script.say(State.RUNNING)
    script.write(0, b"step 1\n")
    script.end({"results/0.pkl": pickled(tmp_path, value)})
