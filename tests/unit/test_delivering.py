"""One attempt's delivery as the monitor's main thread has it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from serverless_gpu.model.spec import RunSpec
from serverless_gpu.model.tracking import Tracking
from serverless_gpu.node.home import Home
from serverless_gpu.node.monitor.backlog import Backlog
from serverless_gpu.node.monitor.deliveries import Deliveries
from serverless_gpu.node.monitor.recorder import Recorder
from serverless_gpu.node.monitor.words import Observe, Untracked
from serverless_gpu.testing import FakeClock
from serverless_gpu.tracking.delivery import Delivery

_LONG_S = 3600


def observed(tmp_path: Path) -> Observe:
    """Return an attempt, whose directory is there."""
    directory = tmp_path / "runs" / "run-a" / "1"
    directory.mkdir(parents=True)
    return Observe(
        run_id="run-a",
        fence=1,
        directory=str(directory),
        spec=RunSpec(tracker=Tracking(uri="http://mlflow.test:5000")),
        world_size=1,
        python="python3",
        environ={},
        called_ns=1,
    )


def test_a_mistake_of_ours_ends_a_delivery_for_good_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Delivery) -> None:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(Delivery, "run", fail)
    clock, home, woken = FakeClock(), Home(tmp_path), threading.Event()
    deliveries = Deliveries(home, clock, woken.set)
    recorder = Recorder(observed(tmp_path), 1, clock)
    deliveries.begin(recorder)
    delivering = recorder.delivering
    assert delivering is not None
    delivering._thread.join(10)
    assert delivering.is_done and woken.is_set()
    assert [word for word in delivering.news() if isinstance(word, Untracked) and word.final]
    assert list(deliveries.tend({recorder.key: recorder})) == []
    assert os.listdir(home.tracking) == [], "it is not tried again"
    clock.advance(_LONG_S)
    assert list(deliveries.tend({})) == [] and list(Backlog(home.tracking, clock).take(frozenset(), 9)) == []
    assert "nobody thought of this" in capsys.readouterr().err
