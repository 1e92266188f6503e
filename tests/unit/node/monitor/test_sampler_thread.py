"""The monitor's thread that looks at the node."""

from __future__ import annotations

import threading

import pytest

from serverless_gpu.model.telemetry import HostSample
from serverless_gpu.node.monitor.sampler import NodeSample, SampleRequest, SamplerThread
from serverless_gpu.testing import FakeClock


class Failing:
    """A machine that cannot be looked at twice, and is made at the second try."""

    made = 0

    def __init__(self) -> None:
        Failing.made += 1
        self.looks = 0
        if Failing.made == 1:
            raise OSError("too many open files")

    def look(self, wanted: SampleRequest, at_ns: int) -> NodeSample:
        self.looks += 1
        if self.looks < 3:
            raise MemoryError("none left")
        return NodeSample(at_ns=at_ns, devices=(), host=HostSample(), gpus={}, ranks={})


def test_a_look_that_fails_is_left_out_and_logged_once_and_the_next_one_succeeds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rung = threading.Semaphore(0)
    thread = SamplerThread(Failing, FakeClock(), rung.release)
    for _ in range(3):
        assert thread.ask(SampleRequest())
        assert rung.acquire(timeout=60)
        assert thread.take() is None
    assert thread.ask(SampleRequest())
    assert rung.acquire(timeout=60)
    assert thread.take() is not None
    logged = capsys.readouterr().err
    assert (logged.count("OSError: too many open files"), logged.count("MemoryError: none left")) == (1, 1)
