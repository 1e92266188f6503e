"""One attempt's delivery as the monitor's main thread has it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.model.spec import RunSpec, Tracking
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.mlflow_server.server import Serving
from serverless_gpu.node.monitor import delivery as delivery_module
from serverless_gpu.node.monitor.backlog import Backlog, BacklogAttempt
from serverless_gpu.node.monitor.messages import Observe, Untracked
from serverless_gpu.node.monitor.process import MlflowDeliveries
from serverless_gpu.node.monitor.recorder import Recorder
from serverless_gpu.testing import FakeClock
from serverless_gpu.tracking.base import TrackerAway
from serverless_gpu.tracking.delivery import MlflowDelivery
from tests.support.golden import golden
from tests.support.local.observe import wait_for

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
    def fail(self: MlflowDelivery) -> None:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(MlflowDelivery, "run", fail)
    clock, home, woken = FakeClock(), Home(tmp_path), threading.Event()
    deliveries = MlflowDeliveries(home, clock, woken.set)
    recorder = Recorder(observed(tmp_path), 1, clock)
    deliveries.begin(recorder)
    delivery = recorder.delivery
    assert delivery is not None
    assert woken.wait(10)
    wait_for(lambda: delivery.is_done, "the delivery to end")
    assert [word for word in delivery.news() if isinstance(word, Untracked) and word.final]
    assert list(deliveries.tend({recorder.key: recorder})) == []
    assert os.listdir(home.tracking) == [], "it is not tried again"
    clock.advance(_LONG_S)
    assert list(deliveries.tend({})) == [] and list(Backlog(home.tracking, clock).take(frozenset(), 9)) == []
    assert golden("node.delivering.nobody-thought") in capsys.readouterr().err


@pytest.mark.parametrize(("failures", "state"), [(0, "pending"), (2, "away")])
def test_ranks_wait_for_a_home_server_that_starts_and_not_for_one_that_could_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, state: str
) -> None:
    monkeypatch.setattr(
        delivery_module, "ensure_server", lambda *_, **__: Serving("http://127.0.0.1:1", False, failures=failures)
    )
    observe = msgspec.structs.replace(observed(tmp_path), spec=RunSpec(tracker=Tracking()))
    heard = delivery_module.AttemptDelivery(
        Home(tmp_path), BacklogAttempt(observe=observe, origin_ns=1), {}, None, lambda: None
    )
    with pytest.raises(TrackerAway) as caught:
        delivery_module.address_of(Home(tmp_path), observe, {})
    heard.untracked(str(caught.value), final=False)
    assert msgspec.json.decode((Path(observe.directory) / "tracking.json").read_bytes())["state"] == state
    assert isinstance(heard.status, Untracked) and heard.status.is_starting is (failures == 0)
